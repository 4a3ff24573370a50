"""Which off-policy correction and clip learns best: the quickstart job under each candidate, several seeds.

    python -m benchmarks.corrections --json

Each run is `rollart train jobs/quickstart.yaml` as a user would start it, with one setting changed. `--workers` runs
several at a time, for machines with many cores (each run keeps about two busy). Success is held-out, sampled and
greedy, from the run's own evaluation.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CANDIDATES: dict[str, tuple[str, ...]] = {
    "decoupled, 1 update": ("train.correction=decoupled",),
    "bypass, 1 update": ("train.correction=bypass",),
    "decoupled, 2 updates": ("train.correction=decoupled", "train.updates_per_step=2"),
    "bypass, 2 updates": ("train.correction=bypass", "train.updates_per_step=2"),
}
ROLLART = (sys.executable, "-m", "rollart.cli")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time; each keeps about two cores busy")
    parser.add_argument("--out", type=Path, default=Path("runs/corrections"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.workers) as pool:
        models = list(pool.map(_model, range(args.seeds)))
        # Seed by seed, so that a drift of the machine touches every candidate alike.
        runs = [(name, seed) for seed in range(args.seeds) for name in CANDIDATES]
        rows = list(pool.map(lambda run: _train(*run, models[run[1]], args.out, tuple(args.set)), runs))
    report = {name: _row([row for row in rows if row["candidate"] == name]) for name in CANDIDATES}
    if args.json:
        print(json.dumps({"candidates": report, "runs": rows}, indent=2))
        return
    for name, row in report.items():
        print(f"{name}: " + "; ".join(f"{key} {value}" for key, value in row.items()))


def _model(seed: int) -> Path:
    path = Path(f"models/tiny-{seed}")
    if not path.exists():
        subprocess.run([*ROLLART, "model", "tiny", str(path), "--seed", str(seed)], check=True, capture_output=True)
    return path


def _train(name: str, seed: int, model: Path, out: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    folder = out / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    command = [*ROLLART, "train", "jobs/quickstart.yaml", f"seed={seed}", f"model.path={model}"]
    command += [*CANDIDATES[name], *overrides, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    print(f"{name}, seed {seed}: {summary['eval']}", file=sys.stderr, flush=True)
    return {
        "candidate": name,
        "seed": seed,
        "steps": summary["steps"],
        "step_s": summary["step_time_s"]["p50"],
        "stale": summary["waste"]["stale"]["trajectories"],
        **{
            f"{task}/{play}/{when}": row[when] if play == "sampled" else row[play][when]
            for task, row in summary["eval"].items()
            for play in ("sampled", "greedy")
            for when in ("before", "after")
        },
    }


def _row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each task's success after training: the seeds' median, and from worst to best."""
    keys = [key for key in rows[0] if key.endswith("/after")]
    return {key: [round(pick([row[key] for row in rows]), 4) for pick in (statistics.median, min, max)] for key in keys}


if __name__ == "__main__":
    main()

"""What keeping every trajectory costs the quickstart: runs with `trajectories.keep` 1 and 0, in turn.

    python -m benchmarks.recording --json

A run's figure is the median seconds of its steps, the first ones left out. `ratio` is that with all kept, by that with
none: 1.03 means that recording costs 3 % of the throughput. It needs a machine that does nothing else. `cpu_ratio` is
of the CPU seconds of all processes of a run, start and end included, which other work disturbs less.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_STEPS = 10
"""At the start of a run: nothing overlaps yet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-0", help="made where it is not there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.model.exists():
        subprocess.run([sys.executable, "-m", "rollart.cli", "model", "tiny", str(args.model)], check=True, cwd=ROOT)
    seconds: dict[int, list[float]] = {1: [], 0: []}
    cpu_s: dict[int, list[float]] = {1: [], 0: []}
    for number in range(args.rounds):
        for keep in (1, 0) if number % 2 else (0, 1):
            before_s = children_s()
            seconds[keep].append(step_s(args.model, keep, args.steps, seed=number))
            cpu_s[keep].append(children_s() - before_s)
            print(
                f"round {number + 1}/{args.rounds}: keep {keep}, {seconds[keep][-1]:.4f} s a step, "
                f"{cpu_s[keep][-1]:.2f} CPU s in all",
                file=sys.stderr,
            )
    ratios = [kept / bare for kept, bare in zip(seconds[1], seconds[0], strict=True)]
    figures = {
        "ratio": round(statistics.median(seconds[1]) / statistics.median(seconds[0]), 4),
        "rounds": [round(ratio, 4) for ratio in ratios],
        "cpu_ratio": round(statistics.median(cpu_s[1]) / statistics.median(cpu_s[0]), 4),
        "step_s": {"kept": seconds[1], "bare": seconds[0]},
        "cpu_s": {"kept": cpu_s[1], "bare": cpu_s[0]},
    }
    print(json.dumps(figures, indent=2) if args.json else f"{figures['ratio']} ({figures['rounds']})")


def children_s() -> float:
    """CPU seconds of all processes below this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def step_s(model: Path, keep: int, steps: int, seed: int) -> float:
    with tempfile.TemporaryDirectory(prefix="rollart-recording-") as folder:
        out = Path(folder) / "run"
        overrides = [f"model.path={model.absolute()}", f"train.steps={steps}", f"seed={seed}", "evaluation.every=0"]
        overrides += ["evaluation.first=false", "evaluation.greedy=false", f"trajectories.keep={keep}"]
        command = [sys.executable, "-m", "rollart.cli", "train", "jobs/quickstart.yaml", *overrides]
        subprocess.run([*command, "--out", str(out), "--json"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["timing_s/step"] for row in rows[SKIPPED_STEPS:])


if __name__ == "__main__":
    main()

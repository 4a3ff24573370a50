"""Our side of `benchmarks.engine` here, beside another checkout of RollArt, in turn.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.engine_versions /tmp/before --json

Both play the workloads of `benchmarks.engine` on the same CPU, one thread each, the other one first in every second
round, so that both see the same minutes of the machine. The ratios are of CPU seconds; above 1 means that this
checkout is slower.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHILD = """
import json, sys, tempfile, torch
from benchmarks.engine import MODEL, THREADS, Settings, _time, make_model
from benchmarks.engine_sides import EmbeddedSide

torch.set_num_threads(THREADS)
settings, edition, found = Settings(), int(sys.argv[1]), {}
with tempfile.TemporaryDirectory() as folder:
    make_model(MODEL, folder)
    side = EmbeddedSide(folder)
    for name, turns in settings.turns.items():
        side.play(settings.workload(turns, MODEL.vocab, 0).first_turns(1))  # warms up
        found[name] = _time(side, settings.workload(turns, MODEL.vocab, edition)).cpu_s
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    here: list[dict[str, float]] = []
    there: list[dict[str, float]] = []
    for number in range(args.rounds):
        sides = [(ROOT, here), (args.other.resolve(), there)]
        for root, rows in sides if number % 2 else reversed(sides):
            rows.append(_bench(root, number + 1))
            print(f"round {number + 1}/{args.rounds}: {root}: {rows[-1]}", file=sys.stderr, flush=True)
    report = {name: _ratios([(a[name], b[name]) for a, b in zip(here, there, strict=True)]) for name in here[0]}
    if args.json:
        print(json.dumps({"ratios": report, "cpu_s": {"here": here, "there": there}}, indent=2))
        return
    for name, row in report.items():
        print(f"{name}: {row['median']} ({row['rounds']})")


def _bench(root: Path, edition: int) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", CHILD, str(edition)]
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return {name: round(cpu_s, 2) for name, cpu_s in json.loads(done.stdout).items()}


def _ratios(pairs: list[tuple[float, float]]) -> dict[str, object]:
    rounds = [round(ours / theirs, 3) for ours, theirs in pairs]
    return {"median": statistics.median(rounds), "rounds": rounds}


if __name__ == "__main__":
    main()

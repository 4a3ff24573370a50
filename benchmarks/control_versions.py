"""What a generate call costs the control plane here, beside another checkout of RollArt, in turn.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.control_versions /tmp/before --json

Each round makes the runs of `benchmarks.control` once in both, the other one first in every second round, so that both
see the same minutes of the machine. The ratios are of CPU seconds per call; above 1 means that this checkout costs
more. `recorded` is with 10,000 live and every trajectory kept here, by the other without.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIVE = (1_000, 10_000, 50_000)
RECORDED = 10_000
CHILD = """
import json, sys, MODULE as bench

def us_per_call(run):  # versions before this one return (calls, seconds)
    return 1e6 * (run[1] / run[0] if isinstance(run, tuple) else run.call_s)

found = {size: us_per_call(bench.run_turns(int(size))) for size in sys.argv[2:]}
if sys.argv[1] != "0":
    found["recorded"] = us_per_call(bench.run_turns(int(sys.argv[1]), record=True))
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--live", type=int, nargs="*", default=list(LIVE), help="trajectories alive at a time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    here: list[dict[str, float]] = []
    there: list[dict[str, float]] = []
    for number in range(args.rounds):
        sides = [(ROOT, here, RECORDED), (args.other.resolve(), there, 0)]
        for root, rows, recorded in sides if number % 2 else reversed(sides):
            rows.append(_bench(root, args.live, recorded))
            print(f"round {number + 1}/{args.rounds}: {root}: {rows[-1]}", file=sys.stderr)
    report = {
        name: _ratios(
            [(ours[name], theirs.get(name, theirs[str(RECORDED)])) for ours, theirs in zip(here, there, strict=True)]
        )
        for name in here[0]
    }
    if args.json:
        print(json.dumps({"ratios": report, "us_per_call": {"here": here, "there": there}}, indent=2))
        return
    for name, row in report.items():
        print(f"{name}: {row['median']} ({row['rounds']})")


def _bench(root: Path, live: list[int], recorded: int) -> dict[str, float]:
    own = (root / "benchmarks" / "control.py").exists()  # else of a version whose benchmarks were part of the package
    code = CHILD.replace("MODULE", "benchmarks.control" if own else "rollart.bench.control")
    command = [sys.executable, "-c", code, str(recorded), *map(str, live)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return {name: round(us, 2) for name, us in found.items()}


def _ratios(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    rounds = [round(ours / theirs, 3) for ours, theirs in pairs]
    return {"median": statistics.median(rounds), "rounds": rounds}


if __name__ == "__main__":
    main()

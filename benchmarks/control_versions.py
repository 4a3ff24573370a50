"""What a generate call costs the control plane here, beside another checkout of RollArt, in turn.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.control_versions /tmp/before --json

Each round runs `benchmarks.control` once in both, the other one first in every second round: a pass of it and not its
own rounds, so that both see the same minutes of the machine. The ratios are of CPU seconds per call; above 1 means
that this checkout costs more. `recorded` is with every trajectory kept, where this checkout can.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    here: list[dict[str, Any]] = []
    there: list[dict[str, Any]] = []
    for number in range(args.rounds):
        sides = [(ROOT, here), (args.other.resolve(), there)]
        for root, rows in sides if number % 2 else reversed(sides):
            rows.append(_bench(root))
            print(f"round {number + 1}/{args.rounds}: {root}: {rows[-1]['calls_per_s']} calls/s", file=sys.stderr)
    sizes = list(here[0]["us_per_call"])
    report: dict[str, Any] = {
        size: _ratios([(a["us_per_call"][size], b["us_per_call"][size]) for a, b in zip(here, there, strict=True)])
        for size in sizes
    }
    if "recording" in here[0]:
        report["recorded"] = _ratios(
            [(1e6 / a["recording"]["calls_per_s"], 1e6 / b["calls_per_s"]) for a, b in zip(here, there, strict=True)]
        )
    if args.json:
        print(json.dumps({"ratios": report, "here": here, "there": there}, indent=2))
        return
    for size, row in report.items():
        print(f"{size}: {row['median']} ({row['rounds']})")


def _bench(root: Path) -> dict[str, Any]:
    own = (root / "benchmarks" / "control.py").exists()  # else of a version whose benchmarks were part of the package
    module = "benchmarks.control" if own else "rollart.bench.control"
    code = f"import json, {module} as bench; bench.ROUNDS = 1; print(json.dumps(bench.measure()))"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    rows: dict[str, Any] = json.loads(done.stdout)
    return rows


def _ratios(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    rounds = [round(ours / theirs, 3) for ours, theirs in pairs]
    return {"median": statistics.median(rounds), "rounds": rounds}


if __name__ == "__main__":
    main()

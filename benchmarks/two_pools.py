"""R1 in a real job: two pools, two unlike tasks, which pool serves which. `python -m benchmarks.two_pools`.

    python -m benchmarks.two_pools --job jobs/gpu_two_parts.yaml --rounds 1 --skip 4 --out runs/parts --json
    python -m benchmarks.two_pools --job jobs/gpu_two_parts.yaml --rounds 1 --skip 4 --out runs/parts --read --json

Only `tasks.affinity` changes from run to run. The sides of a round, each a run of its own, in turns:

- reading-half-writing-quarter and so on: each task is given a pool. Those with tasks on different ones come first.
- auto: every task `auto`, so the pools' speeds are learnt from their engines while the job runs.
- any: affinity off. A group goes to the pool with the fewest of them, whatever suits its task.

Printed: seconds a step of each run, without the first steps; off by on, and `auto` by the best fixed assignment, round
by round; what `rollart explain` shows of the `auto` run; how busy each pool's engines were. Then `rollart sim fit` on
the `any` runs alone, the only ones in which both pools do both kinds of work, and every side simulated with that
profile, beside what was measured: also those that were not run. `--only` names sides; `--seconds` begins no further run
after so long; runs that `--out` has are read, not run again (of each: job.yaml, events.jsonl, figures.json), and
`--read` runs nothing.
"""

import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.command import main
from benchmarks.modes import SKIPPED_STEPS, Bench, Runs, compared
from rollart.config.job import Job
from rollart.config.load import load_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.report.explain import Explain, Placements

JOB = Path(__file__).resolve().parents[1] / "jobs" / "gpu_two_parts.yaml"
AUTO, OFF = "auto", "any"
SECONDS = -1
"""Where lists of `engine.worked` have them."""


def measure(
    rounds: int = 1,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    job: Path = JOB,
    skip: int = SKIPPED_STEPS,
    only: Sequence[str] = (),
    read: bool = False,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Real rounds, then the fit, then all sides simulated. Run directories are kept under `out`, and read there."""
    given = load_job(job, overrides)
    fixed = fixed_assignments(given)
    every = {
        side: [f"tasks.{number}.affinity={pool}" for number, pool in enumerate(pools)]
        for side, pools in sides_of(given, fixed).items()
    }
    if unknown := [side for side in only if side not in every]:
        raise JobError(f"--only: {', '.join(unknown)} is not a side; choose among {', '.join(every)}")
    if read and out is None:
        raise JobError("--read: name the directory of the runs with --out")
    if given.train.steps < skip + 2:
        raise JobError(f"train.steps: {given.train.steps} leaves no step to measure; give {skip + 2} or more")
    out = out or Path("runs") / f"bench-pools-{time.strftime('%Y%m%d-%H%M%S')}"
    began_s = time.monotonic()
    bench = Bench(job, {side: [*overrides, *every[side]] for side in only or every}, rounds, out, skip)
    real, failed = bench.real(read, math.inf if seconds is None else seconds)
    simulated, profile, residuals = bench.simulated(OFF, list(only or every))
    return {
        **compared(real, simulated),
        **ratios(real, [side for side in fixed if side in real]),
        "steps_s": {side: [step_seconds(folder, skip) for folder in bench.folders(side)] for side in real},
        "train_s": {side: [round(run["train_s"], 3) for run in runs] for side, runs in real.items()},
        "busy": {side: [engines_busy(folder, skip) for folder in bench.folders(side)] for side in real},
        "explain": [explained(folder) for folder in bench.folders(AUTO)] if AUTO in real else [],
        "fitted_on": OFF,
        "profile": profile,
        "residuals": residuals,
        **({"failed": failed} if failed else {}),
        "runs": str(out),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def fixed_assignments(job: Job) -> dict[str, tuple[str, ...]]:
    """Each way to give every task a pool: its name, and the pools in the order of the tasks."""
    if len(job.engine_pools) < 2 or len(job.tasks) < 2:
        raise JobError("the job needs two pools with engines and two tasks; take jobs/gpu_two_parts.yaml")
    names = [pool.name for pool in job.engine_pools]
    ways = sorted(itertools.product(names, repeat=len(job.tasks)), key=lambda pools: -len(set(pools)))
    return {"-".join(f"{task.name}-{pool}" for task, pool in zip(job.tasks, way, strict=True)): way for way in ways}


def sides_of(job: Job, fixed: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """All of them, the ones that matter most first: there may be no time for the others."""
    apart = {side: pools for side, pools in fixed.items() if len(set(pools)) > 1}
    free = {side: (side,) * len(job.tasks) for side in (AUTO, OFF)}
    return {**apart, **free, **fixed}


def ratios(real: Runs, fixed: Sequence[str]) -> dict[str, Any]:
    """What is asked of `auto`, and what affinity is worth, by rounds that have both."""
    if not fixed:
        return {}
    best = min(fixed, key=lambda side: statistics.fmean(run["step_s"] for run in real[side]))
    pairs = {"auto_by_best_fixed": (AUTO, best), "off_by_auto": (OFF, AUTO), "off_by_best_fixed": (OFF, best)}
    found: dict[str, Any] = {"best_fixed": best}
    for name, (over, under) in pairs.items():
        rounds = [
            round(upper["step_s"] / lower["step_s"], 3)
            for upper, lower in zip(real.get(over, []), real.get(under, []), strict=False)
        ]
        if rounds:
            found[name] = {"median": statistics.median(rounds), "rounds": rounds}
    return found


def step_seconds(folder: Path, skip: int) -> dict[str, float]:
    """Of the steps that count: their median and quartiles."""
    ends = [event.t for event in read_events(folder / "events.jsonl") if isinstance(event, schema.StepEnd)]
    took = [after - before for before, after in itertools.pairwise(ends[skip - 1 :] if skip else [0.0, *ends])]
    low, middle, high = statistics.quantiles(took, n=4, method="inclusive")
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3), "steps": len(took)}


def engines_busy(folder: Path, skip: int) -> dict[str, float]:
    """By pool: seconds of its engines' steps in a second of the steps that count."""
    began_s = now_s = 0.0
    pools: dict[str, str] = {}
    at: dict[str, float] = defaultdict(float)
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    for event in read_events(folder / "events.jsonl"):
        match event:
            case schema.Send():
                pools[event.engine] = event.pool
            case schema.EngineWorked():
                at[event.engine] = event.decode[SECONDS] + event.mixed[SECONDS] + event.prefill[SECONDS]
            case schema.StepEnd():
                now_s, after = event.t, dict(at)
                if event.step + 1 == skip:
                    began_s, before = event.t, dict(at)
    busy: dict[str, float] = defaultdict(float)
    for engine, seconds in sorted(after.items()):
        busy[pools[engine]] += (seconds - before.get(engine, 0.0)) / (now_s - began_s)
    return {pool: round(share, 3) for pool, share in busy.items()}


def explained(folder: Path) -> dict[str, Any]:
    """What `rollart explain` shows of a run: each pool's speed beside the table, and what became of each task."""
    explain = Explain()
    for event in read_events(folder / "events.jsonl"):
        explain.read(event)
    found: Placements = explain.result
    return {
        "looks": found.looks,
        "predicted_step_s": found.predicted_step_s,
        "speeds": msgspec.to_builtins(found.speeds),
        "tasks": {
            name: {
                "pools": task.pools,
                "why": task.reason,
                "attempts": task.attempts,
                "changes": msgspec.to_builtins(task.changes),
            }
            for name, task in found.tasks.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main(measure))

"""Many fault plans, one after the other: `rollart sim JOB --chaos N`.

Plan number i is drawn from seed i and run under the i-th variant of the job; an audit that reads nothing but the
events checks the promises. Any seed can be run again alone: `--chaos 1 --first SEED`.
"""

import shutil
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rollart.config.job import Job
from rollart.config.load import load_job
from rollart.config.sim import FAULT_KINDS
from rollart.launch.simulation import simulate
from rollart.sim.faults import draw_plan

TOTALS = ("violations", "deadlocks", "lost", "trained_twice", "finished", "stopped", "stopped_full")
PLAN_LIMIT_S = 60
"""CPU seconds for one plan, hundreds of times what it takes: beyond, it goes in circles. Not seconds of the clock: who
pauses the plans, or keeps the machine busy, has found no fault."""
MAX_FAILURES = 50
"""Failures that are told one by one."""


def run_plans(
    path: Path,
    overrides: tuple[str, ...],
    plans: int,
    *,
    first: int = 0,
    workers: int = 1,
    out: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run the plans and say what they showed. The run directories of plans that fail are kept under `out`."""
    began_s = told_s = time.monotonic()
    seeds = range(first, first + plans)
    work = [(path, overrides, seed, out) for seed in seeds]
    failures: list[dict[str, Any]] = []
    fired = {kind: [0, 0] for kind in FAULT_KINDS}
    totals = dict.fromkeys(TOTALS, 0)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done, row in enumerate(pool.map(_run_plan, work), start=1):
            for kind, (count, during) in row["faults"].items():
                fired[kind][0] += count
                fired[kind][1] += during
            for key in totals:
                totals[key] += row[key]
            if row["text"]:
                failures.append({"seed": row["seed"], "text": row["text"]})
            if progress is not None and time.monotonic() - told_s > 5.0:
                told_s = time.monotonic()
                progress(f"{done}/{plans} plans, {totals['violations']} violations, {told_s - began_s:.0f} s")
    return {
        "plans": plans,
        **totals,
        "faults": {kind: {"fired": count, "during_swap": during} for kind, (count, during) in fired.items()},
        "wall_s": round(time.monotonic() - began_s, 1),
        "failures": failures[:MAX_FAILURES],
    }


def plan_job(path: Path, overrides: tuple[str, ...], seed: int) -> Job:
    """The job of one plan: its variant, its seed, its faults."""
    job = load_job(path, [*overrides, f"seed={seed}"])
    variants = job.sim.chaos.variants
    if variants:
        job = load_job(path, [*variants[seed % len(variants)], *overrides, f"seed={seed}"])
    faults = draw_plan(job.sim.chaos, seed)
    return job.model_copy(update={"sim": job.sim.model_copy(update={"faults": faults})})


def _run_plan(work: tuple[Path, tuple[str, ...], int, Path | None]) -> dict[str, Any]:
    path, overrides, seed, out = work
    folder = out / f"seed-{seed}" if out is not None else None
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, PLAN_LIMIT_S)
    try:
        result = simulate(plan_job(path, overrides, seed), folder)
    except (
        Exception,
        _TooLong,
    ) as error:  # a bug of ours is what chaos looks for: it counts, and the other plans go on
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"crashed: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return {"seed": seed, **dict.fromkeys(TOTALS, 0), "violations": 1, "faults": {}, "text": text}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    groups = result.summary["groups"]
    violations = list(result.violations)
    if result.summary["state"] == "stopped" and not result.full:
        # every other fault that is drawn can be survived
        violations.insert(0, f"promise 8: the job stopped: {result.summary['reason']}")
    if folder is not None and not violations:
        shutil.rmtree(folder)
    return {
        "seed": seed,
        "violations": len(violations),
        "deadlocks": int(result.deadlock),
        "lost": groups["lost"],
        "trained_twice": groups["trained_twice"],
        "finished": int(result.summary["state"] == "finished"),
        "stopped": int(result.summary["state"] == "stopped" and not result.full),
        "stopped_full": int(result.full),
        "faults": result.faults,
        "text": "; ".join(violations[:3]),
    }


class _TooLong(KeyboardInterrupt):
    """Goes through an event loop, which takes any other error for a callback's own."""


def _too_long(number: int, frame: object) -> None:
    raise _TooLong(f"a plan took more than {PLAN_LIMIT_S} CPU seconds: it goes in circles")

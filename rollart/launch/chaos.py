"""Many fault plans, one after the other: `rollart sim JOB --chaos N`.

Plan number i is drawn from seed i and run under the i-th variant of the job; an audit that reads nothing but the
events checks the promises. Any seed can be run again alone: `--chaos 1 --first SEED`.
"""

import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from rollart.config.job import Job
from rollart.config.load import load_job
from rollart.config.sim import FAULT_KINDS
from rollart.launch.simulation import simulate
from rollart.report.reports import ChaosReport, FailedPlan, FaultCount
from rollart.sim.faults import draw_plan

TOTALS = ("violations", "deadlocks", "lost", "trained_twice", "finished", "stopped", "stopped_full")
PLAN_LIMIT_S = 60
"""CPU seconds for one plan, hundreds of times what it takes. Beyond that it is taken for an endless loop. Seconds of
the clock would also count while the machine is busy or the process is paused."""
MAX_FAILURES = 50
"""Failures that are listed one by one."""


def run_plans(
    path: Path,
    overrides: tuple[str, ...],
    plans: int,
    *,
    first: int = 0,
    workers: int = 1,
    out: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> ChaosReport:
    """Run the plans. The run directories of plans that fail are kept under `out`."""
    began_s = told_s = time.monotonic()
    work = [(path, overrides, seed, out) for seed in range(first, first + plans)]
    failures: list[FailedPlan] = []
    totals: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    during_swap: Counter[str] = Counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done, plan in enumerate(pool.map(run_plan, work), start=1):
            totals.update(plan.counts)
            for kind, (count, during) in plan.faults.items():
                fired[kind] += count
                during_swap[kind] += during
            if plan.text:
                failures.append(FailedPlan(seed=plan.seed, text=plan.text))
            if progress is not None and time.monotonic() - told_s > 5.0:
                told_s = time.monotonic()
                progress(f"{done}/{plans} plans, {totals['violations']} violations, {told_s - began_s:.0f} s")
    return ChaosReport(
        plans=plans,
        **{what: totals[what] for what in TOTALS},
        faults={kind: FaultCount(fired=fired[kind], during_swap=during_swap[kind]) for kind in FAULT_KINDS},
        wall_s=round(time.monotonic() - began_s, 1),
        failures=failures[:MAX_FAILURES],
    )


def plan_job(path: Path, overrides: tuple[str, ...], seed: int) -> Job:
    """The job of one plan: its variant, its seed, its faults."""
    job = load_job(path, [*overrides, f"seed={seed}"])
    variants = job.sim.chaos.variants
    if variants:
        job = load_job(path, [*variants[seed % len(variants)], *overrides, f"seed={seed}"])
    faults = draw_plan(job.sim.chaos, seed, shards=job.cluster.coordinators > 1)
    return job.model_copy(update={"sim": job.sim.model_copy(update={"faults": faults})})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one plan showed."""

    seed: int
    counts: Mapping[str, int]
    """Of `TOTALS`, those that are not 0."""
    faults: Mapping[str, list[int]]
    text: str


def run_plan(work: tuple[Path, tuple[str, ...], int, Path | None]) -> _Plan:
    path, overrides, seed, out = work
    folder = out / f"seed-{seed}" if out is not None else None
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, PLAN_LIMIT_S)
    try:
        result = simulate(plan_job(path, overrides, seed), folder)
    except (
        Exception,
        _TooLong,
    ) as error:  # a bug of ours: it counts, and the other plans go on
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"crashed: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return _Plan(seed=seed, counts={"violations": 1}, faults={}, text=text)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    ended, groups = result.summary.state, result.summary.groups
    violations = list(result.violations)
    if ended == "stopped" and not result.full:  # a job must survive every other fault
        violations.insert(0, f"promise 8: the job stopped: {result.summary.reason}")
    if folder is not None and not violations:
        shutil.rmtree(folder)
    counts = {
        "violations": len(violations),
        "deadlocks": int(result.deadlock),
        "lost": groups.lost,
        "trained_twice": groups.trained_twice,
        "stopped_full" if result.full else ended: 1,
    }
    return _Plan(seed=seed, counts=counts, faults=result.faults, text="; ".join(violations[:3]))


class _TooLong(KeyboardInterrupt):
    """An event loop lets this one through; it would log any other error and go on."""


def _too_long(number: int, frame: object) -> None:
    raise _TooLong(f"a plan took more than {PLAN_LIMIT_S} CPU seconds: an endless loop")

"""One job simulated with many values of some keys: `rollart sim JOB --sweep key=a,b,c`."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rollart.config.load import load_job
from rollart.errors import JobError
from rollart.launch.simulation import simulate
from rollart.report.reports import SweepReport, SweepRow


def run_sweep(
    path: Path,
    overrides: tuple[str, ...],
    sweeps: Sequence[str],
    *,
    workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> SweepReport:
    """Every combination of the values, in the order given. All jobs are checked before any is run."""
    choices = [_values(sweep) for sweep in sweeps]
    keys = [sweep.partition("=")[0] for sweep in sweeps]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            raise JobError(f"--sweep {key}: is given twice; give all its values at once, such as {key}=1,2,3")
    combinations = list(itertools.product(*choices))
    for changes in combinations:
        load_job(path, (*overrides, *changes))
    rows: list[SweepRow] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for row in pool.map(_run, [(path, overrides, changes) for changes in combinations]):
            rows.append(row)
            if progress is not None:
                progress(f"{len(rows)}/{len(combinations)}: {' '.join(row.changes)}: {row.step_s:.1f} s a step")
    return SweepReport(keys=keys, rows=rows)


def _values(sweep: str) -> list[str]:
    """A value may have commas of its own in brackets: `{kind: normal, mean: 3}`."""
    key, equals, text = sweep.partition("=")
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    if not equals or not key or not all(value.strip() for value in values):
        raise JobError(f"--sweep {sweep!r}: write it as key=a,b,c, such as rollout.staleness=1,2,3")
    return [f"{key}={value.strip()}" for value in values]


def _run(work: tuple[Path, tuple[str, ...], tuple[str, ...]]) -> SweepRow:
    path, overrides, changes = work
    summary = simulate(load_job(path, (*overrides, *changes))).summary
    return SweepRow(
        changes=list(changes),
        state=summary.state,
        step_s=round(summary.step_time_s.mean, 3),
        p95_step_s=round(summary.step_time_s.p95, 3),
        tokens_per_s=round(summary.throughput_tokens_per_s, 1),
        cost=round(summary.cost.total, 4),
        stale=summary.waste["stale"].trajectories,
        exposed_s=round(summary.weights.exposed_s, 3),
        utilisation={name: round(pool.utilisation, 4) for name, pool in summary.pools.items()},
    )

"""Late groups aborted or waited for, for real, and what it does to lengths. `python -m benchmarks.late`.

`rollout.late: abort` is the paper's design: what a swap makes too old is thrown away. `wait` lets the batch wait for
it. Everything is real: processes, model, environments, trainer, weights. It is the job of `benchmarks.modes` in mode
`rollart`, made small, with a task whose episodes have 1 to 12 turns (`benchmarks/uneven_turns.py`): a swap comes long
before the long ones end. Rounds are interleaved, each with a seed of its own. `turns` are the mean of what was trained
on; those of `wait`, which throws nothing away, are what was asked for.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.command import main
from benchmarks.modes import JOB, SKIPPED_STEPS, make_model
from benchmarks.uneven_turns import TURNS
from rollart.config.job import Job
from rollart.config.load import load_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.training import train

SIDES = ("abort", "wait")
STEPS = 24
SMALL = (
    *("tasks.0.use=benchmarks.uneven_turns", "rollout.groups_per_step=4", "tasks.0.group_size=4"),
    *(f"tasks.0.max_turns={max(TURNS)}", "tasks.0.max_tokens=8", f"train.steps={STEPS}", "checkpoint.every=1000"),
    *("tasks.0.latency={kind: normal, mean: 0.25, sigma: 0.05}", "mode=rollart"),
)


def job_of(side: str, seed: int) -> Job:
    return load_job(JOB, [*SMALL, f"rollout.late={side}", f"seed={seed}"])


def real_run(side: str, number: int, folder: Path) -> dict[str, Any]:
    result = train(job_of(side, number), folder)
    summary = result.summary
    if summary.state != "finished" or result.violations:
        raise JobError(f"{folder}: {summary.reason} {result.violations}")
    ends = [event.t for event in read_events(folder / "events.jsonl") if isinstance(event, schema.StepEnd)]
    lengths = next(iter(summary.tasks.values())).lengths
    found = {
        "step_s": (ends[-1] - ends[SKIPPED_STEPS - 1]) / (len(ends) - SKIPPED_STEPS),
        "turns": lengths.trained_turns,
        "stale_groups": summary.groups.stale,
        "trained_groups": summary.groups.trained,
        "greatest_age": summary.staleness.max,
    }
    print(f"round {number + 1}, {side}: {found}", file=sys.stderr, flush=True)
    return found


def measure(rounds: int = 3, out: Path | None = None) -> dict[str, Any]:
    """Run directories are kept under `out`."""
    out = out or Path("runs") / f"bench-late-{time.strftime('%Y%m%d-%H%M%S')}"
    make_model(Path(job_of("abort", 0).model.path))
    real: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            real[side].append(real_run(side, number, out / f"{side}-{number}"))
    asked = statistics.fmean(run["turns"] for run in real["wait"])
    return {
        "drawn_turns": statistics.fmean(TURNS),
        "sides": {
            side: {
                "step_s": round(statistics.median(run["step_s"] for run in runs), 3),
                "rounds_s": [round(run["step_s"], 3) for run in runs],
                "turns": [round(run["turns"], 2) for run in runs],
                "turns_against_wait": round(statistics.fmean(run["turns"] for run in runs) / asked, 3),
                "stale_groups": [run["stale_groups"] for run in runs],
                "trained_groups": [run["trained_groups"] for run in runs],
                "greatest_age": max(run["greatest_age"] for run in runs),
            }
            for side, runs in real.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main(measure))

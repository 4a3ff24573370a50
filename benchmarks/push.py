"""What slow pushes cost a step, on the virtual clock. `python -m benchmarks.push`.

Two comparisons, both simulated. `modes`: `rollart` and `areal` on `jobs/sim_32b.yaml`, the paper's cluster and links,
on a few seeds. `links`: `rollart` on a quarter of that job's groups with a training step of fixed length, at several
rates of the push: a step should take as long as training or the push, whichever is longer, where rollout keeps up.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import main
from rollart.config.load import load_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.simulation import simulate

JOB = Path(__file__).resolve().parent.parent / "jobs" / "sim_32b.yaml"
MODES = ("rollart", "areal")
SEEDS = (0, 1, 2)
SKIPPED_STEPS = 3
"""Of each run, not counted in `step_s`: rollout begins with nothing in flight, and all groups start at once."""
TRAIN_S = 200.0
RATES_GB_S = (1.0, 0.47, 0.25, 0.15)
SHORT = ("rollout.groups_per_step=16", "rollout.staleness=3", f"sim.train.step_s={TRAIN_S}", "train.steps=12")


def measure(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds a step of every run, and what it was made of."""
    modes = {mode: [_run((f"mode={mode}", f"seed={seed}", *overrides)) for seed in SEEDS] for mode in MODES}
    links = [_run((*SHORT, f"sim.links.push_gb_s={rate}", *overrides)) for rate in RATES_GB_S]
    return {
        "simulated": True,
        "job": JOB.name,
        "seeds": SEEDS,
        "skipped_steps": SKIPPED_STEPS,
        "modes": {mode: {"step_s": _mean(runs), "runs": runs} for mode, runs in modes.items()},
        "rollart_over_areal": round(_mean(modes["rollart"]) / _mean(modes["areal"]), 3),
        "links": [{**run, "longer_of_both_s": round(max(run["train_s"], run["push_s"]), 1)} for run in links],
    }


def _mean(runs: Sequence[dict[str, Any]]) -> float:
    return round(statistics.fmean(run["step_s"] for run in runs), 1)


def _run(overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        result = simulate(load_job(JOB, overrides), out)
        if result.summary.state != "finished" or result.violations:
            raise JobError(f"{' '.join(overrides)}: {result.summary.reason} {result.violations}")
        ends = [event for event in read_events(out / "events.jsonl") if isinstance(event, schema.StepEnd)]
    counted = len(ends) - SKIPPED_STEPS
    summary = result.summary
    run = {
        "step_s": round((ends[-1].t - ends[SKIPPED_STEPS - 1].t) / counted, 1),
        "all_steps_s": round(summary.step_time_s.mean, 1),
        "train_s": round(statistics.fmean(event.train_s for event in ends), 1),
        "push_s": round(summary.weights.push_s, 1),
        "exposed_s": round(summary.weights.exposed_s, 2),
        "max_steps": summary.staleness.max_steps,
        "stale": summary.waste["stale"].trajectories,
    }
    print(f"{' '.join(overrides)}: {run}", file=sys.stderr, flush=True)
    return run


if __name__ == "__main__":
    sys.exit(main(measure))

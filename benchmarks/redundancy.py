"""Spare groups and members on one real job, and what the simulator says of them: `python -m benchmarks.redundancy`.

Everything is real: processes, model, environments, rewards, trainer, weights. It is the job of `benchmarks.modes`, on
policy (`sync+`), made small, with latencies of environment steps drawn from a lognormal distribution, whose tail is
what spares are for; `carried` and `cancelled` are the same with bound 1. Rounds are interleaved, each with a seed of
its own: all settings of a round meet the same latencies. The simulator is fitted on the runs without spares alone.
`step_s` are means over rounds; `lengths` are mean tokens of what was trained on and of all that was begun, as
`summary.json` has them. With `--out` runs are kept, and one that is whole there is not made again: so that it can be
measured in pieces.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.modes import JOB, SKIPPED_STEPS, make_model
from rollart.config.job import Job
from rollart.config.load import build_job, load_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.rundir import summary_again
from rollart.launch.simulation import simulate
from rollart.launch.training import train
from rollart.report.summary import Summary
from rollart.sim.fit import fit_runs

LATENCY = "{kind: lognormal, mean: 0.5, sigma: 1.0}"
SMALL = [
    *("rollout.groups_per_step=4", "tasks.0.group_size=4", "tasks.0.max_turns=3", "tasks.0.max_tokens=8"),
    *(f"tasks.0.latency={LATENCY}", "mode=sync+"),
]
CASES: dict[str, list[str]] = {
    "none": [],
    "2 groups": ["rollout.spare_groups=2"],
    "4 groups": ["rollout.spare_groups=4"],
    "1 member": ["rollout.spare_members=1"],
    "2 members": ["rollout.spare_members=2"],
    "2 groups, 1 member": ["rollout.spare_groups=2", "rollout.spare_members=1"],
    "carried, none": ["mode=rollart"],
    "carried, 2 groups": ["mode=rollart", "rollout.spare_groups=2"],
    "cancelled, 2 groups": ["mode=rollart", "rollout.spare_groups=2", "rollout.surplus=cancel"],
}
"""The last three with bound 1."""
FITTED = "none"


def job_of(case: str, steps: int, seed: int) -> Job:
    return load_job(JOB, [*SMALL, *CASES[case], f"train.steps={steps}", f"seed={seed}"])


def figures(summary: Summary, folder: Path) -> dict[str, Any]:
    ends = [event.t for event in read_events(folder / "events.jsonl") if isinstance(event, schema.StepEnd)]
    lengths = next(iter(summary.tasks.values())).lengths
    begun = sum(summary.trajectories.values())
    return {
        "step_s": (ends[-1] - ends[SKIPPED_STEPS - 1]) / (len(ends) - SKIPPED_STEPS),
        "wasted": sum(row.trajectories for row in summary.waste.values()) / begun,
        "lengths": [lengths.trained_tokens, lengths.admitted_tokens],
    }


def real_run(case: str, steps: int, number: int, folder: Path) -> dict[str, Any]:
    summary = summary_again(folder) if (folder / "summary.json").exists() else None
    if summary is None or (summary.state, summary.steps) != ("finished", steps):
        if folder.exists():
            shutil.rmtree(folder)
        result = train(job_of(case, steps, number), folder)
        summary = result.summary
        if summary.state != "finished" or result.violations:
            raise JobError(f"{folder}: {summary.reason} {result.violations}")
    found = figures(summary, folder)
    sys.stderr.write(f"round {number + 1}, {case}: {found['step_s']:.2f} s a step\n")
    return found


def simulated_run(case: str, steps: int, number: int, profile: dict[str, Any]) -> dict[str, Any]:
    raw = job_of(case, steps, number).model_dump(mode="json")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        return figures(simulate(build_job({**raw, "sim": profile}), path).summary, path)


def row(real: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> dict[str, Any]:
    step_s = statistics.fmean(run["step_s"] for run in real)
    predicted_s = statistics.fmean(run["step_s"] for run in simulated)
    return {
        "step_s": round(step_s, 3),
        "simulated_s": round(predicted_s, 3),
        "simulated_over_real": round(predicted_s / step_s, 3),
        "rounds_s": [round(run["step_s"], 3) for run in real],
        "wasted": round(statistics.fmean(run["wasted"] for run in real), 3),
        "simulated_wasted": round(statistics.fmean(run["wasted"] for run in simulated), 3),
        "lengths": [round(statistics.fmean(run["lengths"][at] for run in real), 2) for at in (0, 1)],
    }


def measure(rounds: int, steps: int, cases: list[str], out: Path) -> dict[str, Any]:
    make_model(Path(job_of(FITTED, steps, 0).model.path))
    real: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
            real[case].append(
                real_run(case, steps, number, out / f"{case.replace(' ', '-').replace(',', '')}-{number}")
            )
    profile = fit_runs([out / f"{FITTED}-{number}" for number in range(rounds)]).profile()
    simulated = {case: [simulated_run(case, steps, number, profile) for number in range(rounds)] for case in cases}
    return {
        "cases": {case: row(real[case], simulated[case]) for case in cases},
        "settings": {
            "rounds": rounds,
            "steps": steps,
            "skipped_steps": SKIPPED_STEPS,
            "job": SMALL,
            "fitted_on": FITTED,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}; always with none")
    parser.add_argument("--out", type=Path, help="where runs are kept, and found again (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    with contextlib.ExitStack() as ends:
        out = args.out or Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="rollart-redundancy-")))
        found = measure(args.rounds, args.steps, list(dict.fromkeys([FITTED, *args.cases])), out)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for case, one in found["cases"].items():
        step_s = f"{one['step_s']:7.2f} s a step, simulated {one['simulated_s']:7.2f}"
        print(f"{case:>20}  {step_s}, wasted {one['wasted']:.0%}")


if __name__ == "__main__":
    main()

"""Spare groups and members on one real job, and what the simulator says of them: `python -m benchmarks.redundancy`.

Everything is real: processes, model, environments, rewards, trainer, weights. It is the job of `benchmarks.modes`, on
policy (`sync+`), made small, with latencies of environment steps drawn from a lognormal distribution, whose tail is
what spares are for; `carried` and `cancelled` are the same with bound 1. Rounds are interleaved, each with a seed of
its own: all settings of a round meet the same latencies. The simulator is fitted on the runs without spares alone.
`step_s` are means over rounds.

`lengths`: the same with a second task, whose groups have 1 to 12 turns (`benchmarks/uneven_turns.py`), 3.88 in the
mean. Of each task: mean turns of what was trained on, and of all that was begun, as `summary.json` has them.

With `--out` runs are kept, and one that is whole there is not made again: so that it can be measured in pieces.
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
from benchmarks.uneven_turns import TURNS
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
TASK = f"group_size: 4, max_tokens: 8, affinity: cpu, latency: {LATENCY}"
UNEVEN = [
    f"tasks=[{{name: even, use: benchmarks.digits, max_turns: 3, {TASK}}}, "
    f"{{name: uneven, use: benchmarks.uneven_turns, max_turns: {max(TURNS)}, {TASK}}}]",
    "rollout.groups_per_step=4",
]
LENGTHS: dict[str, list[str]] = {
    "bound 0, none": [*UNEVEN, "mode=sync+"],
    "bound 0, 2 groups cancelled": [*UNEVEN, "mode=sync+", "rollout.spare_groups=2"],
    "bound 1, none": [*UNEVEN, "mode=rollart"],
    "bound 1, 2 groups cancelled": [*UNEVEN, "mode=rollart", "rollout.spare_groups=2", "rollout.surplus=cancel"],
    "bound 1, 2 groups carried": [*UNEVEN, "mode=rollart", "rollout.spare_groups=2"],
    "bound 2, 2 groups carried": [*UNEVEN, "mode=rollart", "rollout.staleness=2", "rollout.spare_groups=2"],
}


def job_of(case: str, steps: int, seed: int) -> Job:
    return load_job(JOB, [*(LENGTHS.get(case) or [*SMALL, *CASES[case]]), f"train.steps={steps}", f"seed={seed}"])


def figures(summary: Summary, folder: Path) -> dict[str, Any]:
    ends = [event.t for event in read_events(folder / "events.jsonl") if isinstance(event, schema.StepEnd)]
    begun = sum(summary.trajectories.values())
    return {
        "step_s": (ends[-1] - ends[SKIPPED_STEPS - 1]) / (len(ends) - SKIPPED_STEPS),
        "wasted": sum(row.trajectories for row in summary.waste.values()) / begun,
        "turns": {
            name: [task.lengths.trained_turns, task.lengths.admitted_turns] for name, task in summary.tasks.items()
        },
        "stale": summary.groups.stale,
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
    }


def turns(real: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{
            name: {
                "trained": round(statistics.fmean(run["turns"][name][0] for run in real), 2),
                "admitted": round(statistics.fmean(run["turns"][name][1] for run in real), 2),
                "trained_rounds": [round(run["turns"][name][0], 2) for run in real],
            }
            for name in real[0]["turns"]
        },
        "step_s": round(statistics.fmean(run["step_s"] for run in real), 3),
        "wasted": round(statistics.fmean(run["wasted"] for run in real), 3),
        "stale_groups": [run["stale"] for run in real],
    }


def measure(rounds: int, steps: int, cases: list[str], out: Path) -> dict[str, Any]:
    make_model(Path(job_of(FITTED, steps, 0).model.path))
    timed = [case for case in cases if case in CASES]
    timed = list(dict.fromkeys([FITTED, *timed])) if timed else []
    lengthy = [case for case in cases if case in LENGTHS]
    real: dict[str, list[dict[str, Any]]] = {case: [] for case in [*timed, *lengthy]}
    for number in range(rounds):
        order = list(real)
        for case in order[number % len(order) :] + order[: number % len(order)]:
            count = steps * (LENGTHY_STEPS if case in LENGTHS else 1)
            real[case].append(
                real_run(case, count, number, out / f"{case.replace(' ', '-').replace(',', '')}-{number}")
            )
    found: dict[str, Any] = {"cases": {}, "lengths": {case: turns(real[case]) for case in lengthy}}
    if timed:
        profile = fit_runs([out / f"{FITTED}-{number}" for number in range(rounds)]).profile()
        for case in timed:
            simulated = [simulated_run(case, steps, number, profile) for number in range(rounds)]
            found["cases"][case] = row(real[case], simulated)
    found["settings"] = {
        "rounds": rounds,
        "steps": steps,
        "skipped_steps": SKIPPED_STEPS,
        "job": SMALL,
        "fitted_on": FITTED,
        "lengthy_steps": steps * LENGTHY_STEPS,
        "drawn_turns": statistics.fmean(TURNS),
    }
    return found


LENGTHY_STEPS = 3
"""Times as many: one group in eight is long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    every = [*CASES, *LENGTHS]
    parser.add_argument("--cases", nargs="*", default=every, choices=every, metavar="CASE", help="; ".join(every))
    parser.add_argument("--out", type=Path, help="where runs are kept, and found again (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    with contextlib.ExitStack() as ends:
        out = args.out or Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="rollart-redundancy-")))
        found = measure(args.rounds, args.steps, args.cases, out)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for case, one in found["cases"].items():
        step_s = f"{one['step_s']:7.2f} s a step, simulated {one['simulated_s']:7.2f}"
        print(f"{case:>20}  {step_s}, wasted {one['wasted']:.0%}")
    for case, one in found["lengths"].items():
        print(f"{case:>28}  {one['step_s']:7.2f} s a step, turns {one['even']} {one['uneven']}")


if __name__ == "__main__":
    main()

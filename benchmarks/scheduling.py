"""Scheduling beyond the paper, against its design on the same load, simulated. `python -m benchmarks.scheduling`.

The paper's mix with resets that fail as in its experiment A, half of its pools and half of its batch, rollout alone: so
rollout is what a step takes. Late groups aborted (the paper's design) or waited for (`rollout.late`), and engines
swapped a quarter at a time (`rollout.rolling`). Lengths are compared with those of `wait`, which throws nothing away:
what training sees too little of.
"""

import statistics
import sys
from dataclasses import replace
from typing import Any

from benchmarks.command import main
from benchmarks.paper import FAILING_RESETS, GROUP, TASKS, Setup
from rollart.errors import JobError
from rollart.launch.simulation import simulate

IDEAS: dict[str, dict[str, Any]] = {
    "abort (the paper)": {},
    "wait": {"late": "wait"},
    "rolling swaps": {"rolling": 12},
}
LOAD = Setup(
    tasks=dict.fromkeys(TASKS, "auto"),
    pools={"compute": ("h800", 32, 1), "bandwidth": ("h20", 16, 1)},
    mode="rollart",
    groups=32,
    steps=14,
    skip=4,
    sim={"train": {"step_s": 1.0}, "links": {"push_gb_s": 100, "pull_gb_s": 100}, "tasks": FAILING_RESETS},
)


def one_run(setup: Setup) -> dict[str, Any]:
    ends: list[float] = []
    result = simulate(setup.job, None, ends=ends)
    summary = result.summary
    if summary.state != "finished" or result.violations:
        raise JobError(f"{setup}: {summary.reason} {result.violations}")
    wasted = sum(one.tokens for one in summary.waste.values())
    trained = {name: task.lengths.trained_tokens * task.trained for name, task in summary.tasks.items()}
    figures = {
        "step_s": (ends[-1] - ends[setup.skip - 1]) / (len(ends) - setup.skip),
        "stale_groups": summary.groups.stale,
        "trained_groups": summary.groups.trained,
        "wasted": wasted / (wasted + GROUP * sum(trained.values())),
        "turns": {name: task.lengths.trained_turns for name, task in summary.tasks.items()},
        "tokens": {name: task.lengths.trained_tokens for name, task in summary.tasks.items()},
    }
    print(setup.rollout, setup.seed, figures, file=sys.stderr)
    return figures


def measure(seeds: int = 3, steps: int = 14) -> dict[str, Any]:
    """`seeds`: runs of each. `steps`: of each run."""
    runs = {
        name: [one_run(replace(LOAD, rollout=rollout, seed=seed, steps=steps)) for seed in range(seeds)]
        for name, rollout in IDEAS.items()
    }
    whole = {task: statistics.fmean(run["turns"][task] for run in runs["wait"]) for task in TASKS}
    said = {task: statistics.fmean(run["tokens"][task] for run in runs["wait"]) for task in TASKS}
    rows = []
    for name, found in runs.items():
        rows.append(
            {
                "what": name,
                "step_s": [round(run["step_s"], 1) for run in found],
                "stale_groups": [run["stale_groups"] for run in found],
                "wasted": round(statistics.fmean(run["wasted"] for run in found), 3),
                "tokens_against_wait": {
                    task: round(statistics.fmean(run["tokens"][task] for run in found) / said[task], 3)
                    for task in TASKS
                },
                "turns_against_wait": {
                    task: round(statistics.fmean(run["turns"][task] for run in found) / whole[task], 3)
                    for task in TASKS
                },
            }
        )
    return {"simulated": True, "seeds": seeds, "steps": steps, "rows": rows}


if __name__ == "__main__":
    sys.exit(main(measure))

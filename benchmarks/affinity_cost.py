"""Fleets of equal price: each kind of hardware alone, and mixed pools. A part of `rollart bench affinity`.

The search is over every split of the budget and every assignment of the tasks to its pools, whole or as `auto` shares
them out. All are predicted from the profiles that the one kind's run has measured; those on the splits that are
predicted to be fastest are simulated, and the simulated figures are the result. What the prediction misses can only
make the mixed pool look worse: both kinds alone are always simulated.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.affinity_mixes import CHEAP, DEAR, GROUP, MODEL, STALENESS, Mix, lean
from benchmarks.affinity_runs import BANDWIDTH, COMPUTE, KINDS, Fleet, Run, Trial, auto, fleet_text, play_all
from rollart.policy.planning import Problem, best_plan
from rollart.policy.prediction import PoolSpeed
from rollart.policy.profile import TaskProfile

STEPS = 26
WARM_UP = 6
"""Steps at the start that are left out: engines start, nothing is measured, and the first groups start at once."""
PLAYED = 3
"""Splits of the budget that are simulated: those that are predicted to be fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A mix, and a budget of this many engines of the dear kind."""

    mix: Mix
    dear: int

    @property
    def budget(self) -> float:
        return self.dear * DEAR.cost

    @property
    def alone(self) -> list[Fleet]:
        return [{COMPUTE: self.dear}, {BANDWIDTH: round(self.budget / CHEAP.cost)}]

    @property
    def mixed(self) -> list[Fleet]:
        """Every split of the budget that has both kinds. Counts are whole, so a fleet costs a little more or less."""
        return [
            {COMPUTE: dear, BANDWIDTH: round((self.budget - dear * DEAR.cost) / CHEAP.cost)}
            for dear in range(1, self.dear)
        ]

    def step_s(self, trial: Trial, run: Run) -> float:
        """Seconds for a step, scaled to what the budget would buy."""
        return run.step_beyond_s(WARM_UP) * price(trial.fleet) / self.budget


def price(fleet: Fleet) -> float:
    return sum(count * KINDS[pool].cost for pool, count in fleet.items())


def at_equal_cost(comparisons: Sequence[Comparison], workers: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """One row of figures for each comparison."""
    alone = [[auto(one.mix, fleet, steps) for fleet in one.alone] for one in comparisons]
    alone_runs = _grouped(alone, workers)
    mixed = [search(one, runs[1].profiles, steps) for one, runs in zip(comparisons, alone_runs, strict=True)]
    mixed_runs = _grouped(mixed, workers)
    return [
        _row(one, [*first, *then], [*first_runs, *then_runs])
        for one, first, first_runs, then, then_runs in zip(
            comparisons, alone, alone_runs, mixed, mixed_runs, strict=True
        )
    ]


def _grouped(trials: Sequence[Sequence[Trial]], workers: int) -> list[list[Run]]:
    runs = iter(play_all(list(itertools.chain.from_iterable(trials)), workers))
    return [list(itertools.islice(runs, len(some))) for some in trials]


def search(one: Comparison, profiles: Mapping[str, TaskProfile], steps: int) -> list[Trial]:
    """On the splits that are predicted to be fastest: `auto`, and the fixed assignment predicted to be best."""
    found: list[tuple[float, Fleet, Mapping[str, str]]] = []
    for fleet in one.mixed:
        problem = problem_of(one.mix, fleet, profiles)
        fixed = [
            dict(zip(one.mix.tasks, chosen, strict=True))
            for chosen in itertools.product(fleet, repeat=len(one.mix.tasks))
        ]
        predicted_s = {
            number: problem.step_s({task: {pool: 1.0} for task, pool in where.items()})
            for number, where in enumerate(fixed)
        }
        best = min(predicted_s, key=lambda number: predicted_s[number])
        step_s = min(predicted_s[best], problem.step_s(best_plan(problem)))
        found.append((step_s * price(fleet), fleet, fixed[best]))
    found.sort(key=lambda item: item[0])
    return [
        trial
        for _, fleet, where in found[:PLAYED]
        for trial in (auto(one.mix, fleet, steps), Trial(mix=one.mix, affinity=where, fleet=fleet, steps=steps))
    ]


def problem_of(mix: Mix, fleet: Fleet, profiles: Mapping[str, TaskProfile]) -> Problem:
    total = sum(mix.weights.values())
    return Problem(
        profiles=profiles,
        demand={task: GROUP * mix.groups_per_step * weight / total for task, weight in mix.weights.items()},
        members=dict.fromkeys(mix.tasks, GROUP),
        pools=[
            PoolSpeed(name=name, hardware=KINDS[name], model=MODEL, engines=count, gpus=1, max_batch=256)
            for name, count in fleet.items()
        ],
        fixed={},
        ahead=STALENESS + 0.5,
    )


def _row(one: Comparison, trials: Sequence[Trial], runs: Sequence[Run]) -> dict[str, Any]:
    rows: dict[str, dict[str, float]] = {}
    for trial, run in zip(trials, runs, strict=True):
        row = rows.setdefault(fleet_text(trial.fleet), {"price": round(price(trial.fleet), 2)})
        way = "auto" if set(trial.affinity.values()) == {"auto"} else "fixed"
        row["alone" if len(trial.fleet) == 1 else way] = round(one.step_s(trial, run), 2)
    alone = {fleet: row["alone"] for fleet, row in rows.items() if "alone" in row}
    mixed = {fleet: min(row["auto"], row["fixed"]) for fleet, row in rows.items() if "auto" in row}
    split = min(mixed, key=lambda fleet: mixed[fleet])
    best_auto_s = min(row["auto"] for row in rows.values() if "auto" in row)
    better_s = min(alone.values())
    return {
        "mix": one.mix.name,
        "tasks": list(one.mix.tasks),
        "lean": {task: round(lean(how), 2) for task, how in one.mix.tasks.items()},
        "groups_per_step": one.mix.groups_per_step,
        "budget": round(one.budget, 2),
        "step_s_at_budget": rows,
        "split": split,
        "mixed_over_better_kind": round(mixed[split] / better_s, 4),
        "auto_over_better_kind": round(best_auto_s / better_s, 4),
        "mixed_over_each_kind": {fleet: round(mixed[split] / step_s, 4) for fleet, step_s in alone.items()},
    }

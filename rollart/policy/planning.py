"""Which share of each task goes to which pool, so that the whole mix finishes soonest.

Not each task to its favourite: the pools share the work, and a step waits for the last of them. Whole tasks are placed
first; one is split over pools only where that is clearly faster.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.policy.prediction import Forecast, PoolSpeed, forecast, price
from rollart.policy.profile import TaskProfile

EXHAUSTIVE = 256
"""Up to this many assignments of whole tasks are all tried; beyond, one task is moved at a time."""
PARTS = (2, 4, 8, 16)
"""Numbers of parts that a task is split into, coarse first."""
CLEARLY = 0.005
"""A move that gains less than this share is not made: predictions are not finer."""
ALIKE = 0.03
"""Assignments whose steps differ by less than this share are alike: of these one of whole tasks is taken, whose work
costs least."""
SPLIT_COST = 0.05
"""Added to the predicted step where a task is split: its groups come in lumps, and small parts are served unevenly."""

Plan = Mapping[str, Mapping[str, float]]
"""Task -> pool -> share of the task's trajectories; the shares of a task add up to 1, and none is 0."""


@dataclass(slots=True, kw_only=True)
class Problem:
    """What is to be placed where. Remembers what it has worked out: a pool's forecast depends on its own work only."""

    profiles: Mapping[str, TaskProfile]
    demand: Mapping[str, float]
    """Task -> trajectories in a step."""
    members: Mapping[str, int]
    """Task -> size of its groups."""
    pools: Sequence[PoolSpeed]
    fixed: Mapping[str, Mapping[str, float]]
    """Tasks that are not to be placed, because the user says where they are: pool -> share."""
    ahead: float
    """Steps that a group may take."""
    _known: dict[tuple[str, tuple[tuple[str, float], ...]], Forecast] = field(default_factory=dict)
    _prices: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def serving(self) -> list[str]:
        """The pools that have engines; all, where none has."""
        return [pool.name for pool in self.pools if pool.engines] or [pool.name for pool in self.pools]

    @property
    def free(self) -> list[str]:
        """The tasks that may be placed anywhere."""
        return [task for task in self.profiles if task not in self.fixed]

    def on(self, pool: PoolSpeed, work: Mapping[str, float]) -> Forecast:
        """`work`: task -> the share that this pool has."""
        key = (pool.name, tuple((task, share) for task, share in work.items() if share > 0.0))
        found = self._known.get(key)
        if found is None:
            counts = {task: share * self.demand[task] for task, share in key[1]}
            found = self._known[key] = forecast(pool, counts, self.profiles, self.members, self.ahead)
        return found

    def periods(self, plan: Plan) -> dict[str, float]:
        """Pool -> seconds it needs for its part of a step."""
        return {
            pool.name: self.on(pool, {task: plan[task].get(pool.name, 0.0) for task in self.profiles}).period_s
            for pool in self.pools
        }

    def step_s(self, plan: Plan) -> float:
        """Seconds until the last pool has done its part."""
        split = any(len(shares) > 1 for shares in plan.values())
        return max(self.periods(plan).values()) * (1.0 + SPLIT_COST * split)

    def price(self, plan: Plan) -> float:
        """What the work of a step costs, each task on engines that are full: least where each is on the hardware that
        suits it."""
        return sum(
            share * self.demand[task] * self._price(pool, task)
            for task, shares in plan.items()
            for pool in self.pools
            if (share := shares.get(pool.name, 0.0))
        )

    def _price(self, pool: PoolSpeed, task: str) -> float:
        key = (pool.name, task)
        if key not in self._prices:
            self._prices[key] = price(pool, self.profiles[task])
        return self._prices[key]


def best_plan(problem: Problem) -> dict[str, dict[str, float]]:
    """The plan with the shortest predicted step."""
    split = whole = _whole_tasks(problem)
    for parts in PARTS:
        split = _improved(problem, split, part=1.0 / parts)
    return split if problem.step_s(split) < (1.0 - ALIKE) * problem.step_s(whole) else whole


def spread(problem: Problem) -> dict[str, dict[str, float]]:
    """Each free task over all pools, by what the pools can do with an average task: for as long as none is known."""
    speeds = {
        pool.name: 1.0 / problem.on(pool, dict.fromkeys(problem.profiles, 1.0)).period_s
        for pool in problem.pools
        if pool.engines
    }
    total = sum(speeds.values())
    shares = {name: speed / total for name, speed in speeds.items()}
    return {task: dict(problem.fixed.get(task, shares)) for task in problem.profiles}


def _whole_tasks(problem: Problem) -> dict[str, dict[str, float]]:
    names, free = problem.serving, problem.free

    def placed(chosen: Sequence[str]) -> dict[str, dict[str, float]]:
        plan = {**problem.fixed, **{task: {pool: 1.0} for task, pool in zip(free, chosen, strict=True)}}
        return {task: dict(plan[task]) for task in problem.profiles}

    if len(names) ** len(free) <= EXHAUSTIVE:
        plans = [placed(chosen) for chosen in itertools.product(names, repeat=len(free))]
        limit_s = (1.0 + ALIKE) * min(problem.step_s(plan) for plan in plans)
        return min((plan for plan in plans if problem.step_s(plan) <= limit_s), key=problem.price)
    by_name = {pool.name: pool for pool in problem.pools}
    best = placed([min(names, key=lambda name: problem.on(by_name[name], {task: 1.0}).period_s) for task in free])
    return _improved(problem, best, part=1.0)


def _improved(problem: Problem, plan: dict[str, dict[str, float]], *, part: float) -> dict[str, dict[str, float]]:
    """Move parts of tasks from pool to pool for as long as that makes the step shorter."""

    def value(plan: Plan) -> tuple[float, float]:
        periods = problem.periods(plan).values()
        return max(periods), sum(periods)

    while True:
        best = min(_neighbours(problem, plan, part), key=value, default=plan)
        if value(best)[0] > (1.0 - CLEARLY) * value(plan)[0]:
            return plan
        plan = best


def _neighbours(problem: Problem, plan: Plan, part: float) -> Iterator[dict[str, dict[str, float]]]:
    """Every plan in which one task has moved a part from one pool to another."""
    for task in problem.free:
        for source, target in itertools.permutations(problem.serving, 2):
            has = plan[task].get(source, 0.0)
            if has < part - 1e-9:
                continue
            shares = dict(plan[task])
            shares[source] = has - part
            shares[target] = shares.get(target, 0.0) + part
            yield {
                other: {name: share for name, share in shares.items() if share > 1e-9}
                if other == task
                else dict(plan[other])
                for other in plan
            }

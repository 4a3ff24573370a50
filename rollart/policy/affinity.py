"""Which pool suits which task: from measured profiles, for the whole mix, with hysteresis.

A task's profile is what its trajectories were seen to need: prefill tokens (not found in a cache), decode
tokens, and how much context they hold. A pool's speed follows from its hardware. Tasks are assigned so that
the whole mix finishes soonest, not each on its favourite; a change must promise a clear gain.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.hardware import Hardware, ModelShape, decode_step_s, kv_capacity_tokens, prefill_s_per_token

CLEAR_GAIN = 0.1
"""A new assignment must be faster by this share to be taken."""
REPLAN_EVERY = 64
"""Trajectories between two looks at the assignment."""
MEMORY = 0.05
"""Weight of the newest trajectory in a task's profile."""
EXHAUSTIVE = 4096
"""Up to this many assignments are all tried; beyond, one task is moved at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProfile:
    """What one trajectory of a task needs, on average."""

    prefill_tokens: float
    decode_tokens: float
    context_tokens: float
    """Largest context of a trajectory."""
    trajectories: int = 0
    """How many were measured."""

    def seen(self, prefill_tokens: int, decode_tokens: int, context_tokens: int) -> "TaskProfile":
        """With one more trajectory; the first ones count evenly, later ones by `MEMORY`."""
        weight = max(MEMORY, 1.0 / (self.trajectories + 1))
        return TaskProfile(
            prefill_tokens=self.prefill_tokens + weight * (prefill_tokens - self.prefill_tokens),
            decode_tokens=self.decode_tokens + weight * (decode_tokens - self.decode_tokens),
            context_tokens=self.context_tokens + weight * (context_tokens - self.context_tokens),
            trajectories=self.trajectories + 1,
        )


UNKNOWN = TaskProfile(prefill_tokens=2000.0, decode_tokens=1000.0, context_tokens=3000.0)
"""Before anything was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpeed:
    """What a pool of engines can do with the job's model."""

    name: str
    hardware: Hardware
    model: ModelShape
    engines: int
    gpus: int
    max_batch: int

    def trajectory_s(self, profile: TaskProfile) -> float:
        """Engine seconds one trajectory takes here, its share of a full batch."""
        kv_tokens = kv_capacity_tokens(self.model, self.hardware, self.gpus)
        batch = max(1.0, min(self.max_batch, kv_tokens / max(1.0, profile.context_tokens)))
        step_s = decode_step_s(self.model, self.hardware, self.gpus, batch, batch * profile.context_tokens)
        prefill_s = prefill_s_per_token(self.model, self.hardware, self.gpus)
        return profile.prefill_tokens * prefill_s + profile.decode_tokens * step_s / batch


Assignment = Mapping[str, str]


def finish_s(
    assignment: Assignment,
    demand: Mapping[str, float],
    times: Mapping[tuple[str, str], float],
    engines: Mapping[str, int],
) -> tuple[float, float]:
    """(time until the busiest pool is done, total engine time) for one batch's worth of work."""
    load = dict.fromkeys(engines, 0.0)
    for task, pool in assignment.items():
        load[pool] += demand[task] * times[task, pool] / engines[pool]
    return max(load.values()), sum(load.values())


def assign(
    profiles: Mapping[str, TaskProfile],
    demand: Mapping[str, float],
    pools: Sequence[PoolSpeed],
    fixed: Assignment,
) -> dict[str, str]:
    """The assignment of tasks to pools under which all of it finishes soonest.

    `demand` is the trajectories of each task in a batch; `fixed` holds tasks whose pool the user named.
    """
    names = [pool.name for pool in pools]
    engines = {pool.name: pool.engines for pool in pools}
    times = {(task, pool.name): pool.trajectory_s(profile) for task, profile in profiles.items() for pool in pools}
    free = [task for task in profiles if task not in fixed]

    def value(assignment: Assignment) -> tuple[float, float]:
        return finish_s(assignment, demand, times, engines)

    if len(names) ** len(free) <= EXHAUSTIVE:
        options = (
            {**fixed, **dict(zip(free, chosen, strict=True))} for chosen in itertools.product(names, repeat=len(free))
        )
        return min(options, key=value)
    best = {**fixed, **{task: min(names, key=lambda name: times[task, name]) for task in free}}
    improved = True
    while improved:
        improved = False
        for task, name in itertools.product(free, names):
            moved = {**best, task: name}
            if value(moved) < value(best):
                best, improved = moved, True
    return best


class Affinity:
    """The job's current assignment, kept up to date from what is measured."""

    def __init__(
        self,
        tasks: Mapping[str, str],
        demand: Mapping[str, float],
        pools: Sequence[PoolSpeed],
        order: Mapping[str, Sequence[str]],
    ) -> None:
        """`tasks`: name -> pool, or "auto". `order`: pool -> itself and its stand-ins, best first."""
        self._fixed = {task: pool for task, pool in tasks.items() if pool != "auto"}
        self._demand = dict(demand)
        self._pools = list(pools)
        self._order = {name: tuple(names) for name, names in order.items()}
        self.profiles = dict.fromkeys(tasks, UNKNOWN)
        self._since = 0
        self.pool_of = assign(self.profiles, self._demand, self._pools, self._fixed)

    def order(self, task: str) -> tuple[str, ...]:
        """The task's pool, then the ones that may stand in for it."""
        return self._order[self.pool_of[task]]

    def seen(self, task: str, prefill_tokens: int, decode_tokens: int, context_tokens: int) -> dict[str, str] | None:
        """A trajectory ended. Returns the tasks that move, with their new pool, when the assignment changes."""
        self.profiles[task] = self.profiles[task].seen(prefill_tokens, decode_tokens, context_tokens)
        if len(self._fixed) == len(self.profiles) or len(self._pools) == 1:
            return None
        self._since += 1
        if self._since < REPLAN_EVERY:
            return None
        self._since = 0
        best = assign(self.profiles, self._demand, self._pools, self._fixed)
        if self.predict(best) > (1.0 - CLEAR_GAIN) * self.predict(self.pool_of):
            return None
        moves = {name: pool for name, pool in best.items() if self.pool_of[name] != pool}
        self.pool_of = best
        return moves or None

    def predict(self, assignment: Assignment) -> float:
        """Seconds until the busiest pool has done one batch's worth of work."""
        times = {
            (task, pool.name): pool.trajectory_s(profile)
            for task, profile in self.profiles.items()
            for pool in self._pools
        }
        return finish_s(assignment, self._demand, times, {pool.name: pool.engines for pool in self._pools})[0]

    def explain(self) -> dict[str, dict[str, float]]:
        """Task -> pool -> predicted engine seconds of one trajectory there."""
        return {
            task: {pool.name: pool.trajectory_s(profile) for pool in self._pools}
            for task, profile in self.profiles.items()
        }

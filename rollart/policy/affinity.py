"""The job's assignment of tasks to pools: declared, or measured and kept up to date, with hysteresis.

A state machine without a clock: it is told what each trajectory needed, what the engines' steps took and which engines
are up, and answers with a decision when it has looked at the assignment. The rollout writes every decision down and
starts new groups by it; trajectories under way stay where they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollart.policy.planning import ALIKE, Plan, Problem, best_plan, spread
from rollart.policy.prediction import NEVER_S, WAVE, PoolSpeed
from rollart.policy.profile import Meter, TaskProfile
from rollart.policy.speeds import Gauge, Rate, is_news, learnt
from rollart.types import EngineWork

CLEAR_GAIN = 0.05
"""A new assignment must be predicted to be faster by this share to be taken: noise must not move tasks."""
CLEARLY_CHEAPER = 0.1
"""Or, where it is about as fast, its work must cost less by this share."""
FIRST_LOOK = 8
"""Trajectories of each free task before the first assignment by measurement."""
REPLAN_EVERY = 64
"""Trajectories between two looks, or half a step's worth where that is more."""
MAX_OWED = 2.0
"""Groups that a pool can be owed, or owe: one that was passed over for long does not get all of them at once."""
YOUNG = 4
"""Until this many steps' worth were measured, looks come this many times as often. Short trajectories end first, so the
first profiles make tasks look shorter than they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a pool would do with all of one task and nothing else."""

    step_s: float
    """Seconds for the task's part of a step."""
    trajectory_s: float
    """Seconds of one trajectory's life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What was measured of a pool's engines; None where nothing was yet."""

    prefill: Rate | None
    decode: Rate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One look at the assignment: what was known, what was predicted, and what follows."""

    reason: str
    plan: Plan
    moves: Mapping[str, Mapping[str, float]]
    """The tasks whose shares changed, with their new ones."""
    step_s: Mapping[str, float]
    """Pool -> predicted seconds for its part of a step, under the plan."""
    engines: Mapping[str, int]
    """Pool -> engines up."""
    profiles: Mapping[str, TaskProfile]
    predictions: Mapping[str, Mapping[str, Prediction]]
    """Task -> pool -> alone there."""
    speeds: Mapping[str, Speed]
    """The pools of which anything was measured."""


class Affinity:
    def __init__(
        self,
        tasks: Mapping[str, str],
        demand: Mapping[str, float],
        members: Mapping[str, int],
        pools: Sequence[PoolSpeed],
        order: Mapping[str, Sequence[str]],
        *,
        ahead: float = 1.5,
    ) -> None:
        """`tasks`: name -> pool, "auto", or "any". `demand`: trajectories of each task in a step. `members`:
        trajectories in a group of each task. `order`: pool -> itself and its stand-ins, best first. `ahead`: steps that
        a group may take."""
        self._fixed = {task: pool for task, pool in tasks.items() if pool not in ("auto", "any")}
        self._anywhere = [task for task, pool in tasks.items() if pool == "any"]
        self._demand = dict(demand)
        self._members = dict(members)
        self.pools = list(pools)
        self._order = {name: tuple(names) for name, names in order.items()}
        self._ahead = ahead
        self._step = sum(demand.values())
        self._since = self._seen = 0
        self._measured = False
        """The plan comes from profiles of all free tasks."""
        self._meters = {task: Meter(demand[task]) for task in tasks}
        self._gauges = {pool.name: Gauge() for pool in pools}
        self._owed: dict[tuple[str, str], float] = {}
        self.plan: Plan = spread(self._problem())

    @property
    def profiles(self) -> dict[str, TaskProfile]:
        return {task: meter.profile for task, meter in self._meters.items()}

    @property
    def _free(self) -> list[str]:
        return [task for task in self._meters if task not in self._fixed and task not in self._anywhere]

    def _problem(self) -> Problem:
        return Problem(
            profiles=self.profiles,
            demand=self._demand,
            members=self._members,
            pools=self.pools,
            fixed={
                **{task: {self._stand_in(pool): 1.0} for task, pool in self._fixed.items()},
                **dict.fromkeys(self._anywhere, self._by_engines()),
            },
            ahead=self._ahead,
        )

    def _stand_in(self, wanted: str) -> str:
        """The pool that serves a declared task now: its own, unless that has no engine up."""
        up = [pool.name for pool in self.pools if pool.engines]
        return next((name for name in self._order[wanted] if name in up), wanted)

    def _by_engines(self) -> dict[str, float]:
        """Pool -> its share of the engines that are up; of all pools alike, where none is."""
        engines = {pool.name: pool.engines for pool in self.pools if pool.engines}
        engines = engines or dict.fromkeys((pool.name for pool in self.pools), 1)
        return {name: count / sum(engines.values()) for name, count in engines.items()}

    def place(self, task: str, living: Mapping[str, int] | None = None) -> tuple[str, ...]:
        """For the next group of this task: its pool, then the ones that may stand in for it. Pools take turns in
        proportion to their shares; one on which more groups live than the plan reckons with is passed over, for it
        has fallen behind. One with affinity "any" goes where fewest of its groups live for the engines there, whatever
        suits it. `living`: pool -> groups of the task that are under way there."""
        if task in self._fixed:
            return self._order[self._fixed[task]]
        shares = self.plan[task]
        for pool, share in shares.items():
            self._owed[task, pool] = min(MAX_OWED, self._owed.get((task, pool), 0.0) + share)
        filled = {pool: (living or {}).get(pool, 0) / share for pool, share in shares.items()}
        most = (self._ahead + WAVE) * self._demand[task] / self._members[task]
        fewest = min(filled.values())
        under = [pool for pool in shares if (filled[pool] == fewest if task in self._anywhere else filled[pool] < most)]
        chosen = max(under or shares, key=lambda pool: self._owed[task, pool])
        self._owed[task, chosen] = max(-MAX_OWED, self._owed[task, chosen] - 1.0)
        return self._order[chosen]

    def first(self) -> Decision:
        """The assignment that the job begins with."""
        reason = "declared" if not self._free else "only one pool has engines"
        if self._free and len(self.pools) > 1:
            reason = "nothing is measured yet: each free task is spread over the pools by what they can do"
        return self._decision(self._problem(), reason, self.plan, {})

    def seen(self, task: str, needed: TaskProfile) -> Decision | None:
        """A trajectory ended, and needed this. A decision where it was time to look at the assignment."""
        changed = self._meters[task].add(needed)
        self._since += 1
        self._seen += 1
        if not self._measured:
            self._measured = all(self._meters[name].profile.trajectories >= FIRST_LOOK for name in self._free)
            return self._look("every task is measured") if self._measured else None
        if changed:
            return self._look(f"{task} has changed")
        every = max(REPLAN_EVERY, self._step / 2)
        if self._seen < YOUNG * self._step:
            every /= YOUNG
        return self._look(f"{self._since} trajectories since the last look") if self._since >= every else None

    def engines(self, up: Mapping[str, int]) -> Decision | None:
        """Engines came or went; `up`: pool -> how many take part now. A decision where that changes anything."""
        if all(pool.engines == up[pool.name] for pool in self.pools):
            return None
        changed = [
            f"{pool.name} {pool.engines} -> {up[pool.name]}" for pool in self.pools if pool.engines != up[pool.name]
        ]
        self.pools = [pool.with_engines(up[pool.name]) for pool in self.pools]
        return self._look(f"engines came or went: {', '.join(changed)}")

    def worked(self, pool: str, before: EngineWork | None, now: EngineWork) -> Decision | None:
        """What an engine of this pool has done, by its last report (None: since it began) and by this one. A decision
        where its speed turns out to be another than was reckoned with. Where all is declared nothing is learnt."""
        if not self._free:
            return None
        speed = next(one for one in self.pools if one.name == pool)
        gauge = self._gauges[pool]
        gauge.add(before, now, speed.table, speed.prefill_table)
        if len(self.pools) == 1:
            return None
        news = is_news(pool, speed.learnt, learnt(self._gauges)[pool])
        return self._look(news) if news else None

    def _look(self, occasion: str) -> Decision:
        self._since = 0
        found = learnt(self._gauges)
        self.pools = [replace(pool, learnt=found[pool.name]) for pool in self.pools]
        problem = self._problem()
        self.plan = {**self.plan, **problem.fixed}
        if not self._free or len(self.pools) == 1 or not any(pool.engines for pool in self.pools):
            return self._decision(problem, f"{occasion}; there is nothing to choose", self.plan, {})
        best = best_plan(problem) if self._measured else spread(problem)
        now_s, then_s = problem.step_s(self.plan), problem.step_s(best)
        gain = 1.0 - then_s / now_s if now_s else 0.0
        share = f"{gain:.0%} faster" if now_s < NEVER_S else "the one that can be served"
        saved = 1.0 - problem.price(best) / max(1e-12, problem.price(self.plan))
        if gain > -ALIKE and gain <= CLEAR_GAIN and saved > CLEARLY_CHEAPER:
            share = f"about as fast, and its work {saved:.0%} cheaper"
        elif gain <= CLEAR_GAIN:
            kept = (
                f"the best other assignment is {share}, and {CLEAR_GAIN:.0%} is asked for"
                if gain > 0
                else "none is faster"
            )
            return self._decision(problem, f"{occasion}; kept: {kept}", self.plan, {})
        moves = {task: dict(shares) for task, shares in best.items() if dict(self.plan[task]) != shares}
        self.plan = best
        self._owed.clear()
        return self._decision(
            problem,
            f"{occasion}; the new assignment is {share}: {then_s:.1f} s a step instead of {_words(now_s)}",
            best,
            moves,
        )

    def _decision(
        self, problem: Problem, reason: str, plan: Plan, moves: Mapping[str, Mapping[str, float]]
    ) -> Decision:
        predictions: dict[str, dict[str, Prediction]] = {}
        for task in self._meters:
            predictions[task] = {}
            for pool in self.pools:
                alone = problem.on(pool, {task: 1.0})
                predictions[task][pool.name] = Prediction(step_s=alone.period_s, trajectory_s=alone.trajectory_s[task])
        return Decision(
            reason=reason,
            plan={task: dict(shares) for task, shares in plan.items()},
            moves=moves,
            step_s=problem.periods(plan),
            engines={pool.name: pool.engines for pool in self.pools},
            profiles=self.profiles,
            predictions=predictions,
            speeds={
                name: Speed(prefill=gauge.prefill, decode=gauge.decode)
                for name, gauge in self._gauges.items()
                if gauge.prefill is not None or gauge.decode is not None
            },
        )


def _words(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < NEVER_S else "never"

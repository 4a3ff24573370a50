"""What `rollart plan` can use the GPUs for, and what each way to use them is predicted to come to.

With the costs that affinity predicts with. A step takes as long as the longest of training, the push of its weights,
and the pools; so this is for modes in which these overlap.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rollart.config.job import Job
from rollart.config.settings import EngineSettings, PoolSettings, TaskSettings
from rollart.config.sim import SimTaskSettings
from rollart.errors import JobError
from rollart.hardware import Disaggregated, Hardware, TrainCosts, train_costs
from rollart.launch.pools import build_affinity, task_shares
from rollart.policy.planning import Problem, best_plan
from rollart.policy.prediction import PoolSpeed
from rollart.policy.profile import TaskProfile
from rollart.report.reports import Apart, Split
from rollart.sim.dice import Dice

DRAWN = 256
"""Trajectories of each task that its profile is worked out from."""
GRID = 8
"""Sizes of each pool, and of the trainer, that are tried at first; then those between the best ones."""
NEAREST = 6
"""Of the best so far, how many have their neighbours tried."""
PAIRS = ((1, 1), (1, 2), (1, 3), (2, 1))
"""Prefill and decode workers of one engine that are tried."""
LINK_GB_S = 25.0
"""Of a prefill worker, where the job has none to say."""
FILTERED_MOST = 0.9
"""Groups dropped because their members all earned the same: no more than this share is reckoned with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a prediction depends on beside the numbers of GPUs."""

    bound: int
    free: bool = False
    """Tasks that name a pool may go to another one."""
    apart: Apart | None = None
    """One pool's engines have prefill on workers of their own."""

    @classmethod
    def of(cls, split: Split) -> "Variant":
        return cls(bound=split.bound, free=split.free, apart=split.apart)


def read_limits(job: Job, text: str) -> dict[str, tuple[int, int]]:
    """Kind -> fewest and most GPUs. Raises JobError."""
    found: dict[str, tuple[int, int]] = {}
    for part in text.split(","):
        kind, equals, span = part.strip().partition("=")
        low, dots, high = span.partition("..")
        try:
            bounds = (int(low), int(high)) if dots else (int(span), int(span))
        except ValueError:
            bounds = (1, 0)
        if not equals or kind not in job.kinds or not 0 <= bounds[0] <= bounds[1]:
            raise JobError(
                f"--pools {part!r}: write it as kind=low..high, such as h800=0..96; kinds: {', '.join(job.kinds)}"
            )
        found[kind] = bounds
    used = {pool.hardware for pool in job.engine_pools} | {job.train_pool.hardware}
    if missing := sorted(used - set(found)):
        raise JobError(f"--pools: says nothing of {missing[0]}, which the job uses; add {missing[0]}=low..high")
    if unused := sorted(set(found) - used):
        raise JobError(f"--pools: no pool of the job has {unused[0]}; add one to the job, or remove it here")
    return found


@dataclass(slots=True)
class _Expected:
    """One task: what a trajectory needs, and what training on it costs."""

    profile: TaskProfile
    tokens: float
    pairs: float


class Splits:
    def __init__(self, job: Job, limits: Mapping[str, tuple[int, int]], budget: float | None, goal: str) -> None:
        self._job = job
        self._limits = limits
        self._budget = budget
        self._goal = goal
        self._model = job.sim.shape
        self.pools: list[PoolSettings] = list(job.engine_pools)
        kinds = [pool.hardware for pool in self.pools]
        if len(set(kinds)) < len(kinds):
            raise JobError("plan: two pools have the same hardware; give each kind one pool of engines")
        self._expected = {
            task.name: _expected(job, task, job.sim.tasks.get(task.name, SimTaskSettings())) for task in job.tasks
        }
        self._affinity = build_affinity(job, self._model)
        self._known: dict[tuple[Variant, tuple[int, ...]], tuple[dict[str, dict[str, float]], dict[str, float]]] = {}
        self._found: dict[Variant, dict[tuple[int, ...], Split]] = {}
        self.own = Variant(bound=job.rollout.staleness)

    @property
    def considered(self) -> int:
        return sum(len(found) for found in self._found.values())

    @cached_property
    def _counts(self) -> dict[str, float]:
        """Task -> trajectories that a step trains on."""
        shares = task_shares(self._job)
        groups = self._job.rollout.groups_per_step
        return {task.name: shares[task.name] * groups * task.group_size for task in self._job.tasks}

    @cached_property
    def _played(self) -> dict[str, float]:
        """Task -> trajectories that are played for it: those of groups that are dropped too."""
        if self._job.rollout.zero_variance != "refill":
            return self._counts
        return {task.name: self._counts[task.name] / (1.0 - _filtered(self._job, task)) for task in self._job.tasks}

    @property
    def _train_kind(self) -> Hardware:
        return self._job.kinds[self._job.train_pool.hardware]

    # --- the search -------------------------------------------------------------------------------------------

    def search(self, variant: Variant, margin: float, progress: Callable[[str], None]) -> list[Split]:
        """Splits that fit, the best first if rollout takes `margin` times as long as predicted: a coarse grid, then the
        neighbours of its best."""
        found = self._found.setdefault(variant, {})

        def add(train_gpus: int, sizes: Sequence[int]) -> None:
            key = (train_gpus, *sizes)
            if key not in found and self._fits(train_gpus, sizes, variant):
                found[key] = self.split(train_gpus, sizes, variant)
                if self.considered % 50 == 0:
                    progress(f"predicted {self.considered} splits")

        def value(split: Split) -> tuple[float, float]:
            step_s = max(split.other_s, margin * split.rollout_s)
            return (split.price * step_s, step_s) if self._goal == "cost" else (step_s, split.price)

        for train_gpus, sizes in self._grid():
            add(train_gpus, sizes)
        strides = [max(1, self._span(pool) // GRID) for pool in self.pools]
        while True:
            for key in sorted(found, key=lambda key: value(found[key]))[:NEAREST]:
                for train_gpus, sizes in self._neighbours(key, strides):
                    add(train_gpus, sizes)
            if max(strides) == 1:
                break
            strides = [max(1, stride // 2) for stride in strides]
        return sorted(found.values(), key=value)

    def neighbours(self, split: Split, variant: Variant) -> list[Split]:
        """Those that fit and have one engine more or less than this one, or one in place of GPUs of the trainer."""
        key = (split.train_gpus, *(split.pools[pool.name] for pool in self.pools))
        return [
            self.split(train_gpus, sizes, variant)
            for train_gpus, sizes in self._neighbours(key, [1] * len(self.pools))
            if self._fits(train_gpus, sizes, variant)
        ]

    def shifted(self, split: Split, variant: Variant) -> list[Split]:
        """Those with the GPUs of one engine given to the trainer."""
        found = []
        for pool in self.pools:
            unit = _engines(pool).gpus
            sizes = [split.pools[other.name] - unit * (other is pool) for other in self.pools]
            if pool.hardware == self._train_kind.name and self._fits(split.train_gpus + unit, sizes, variant):
                found.append(self.split(split.train_gpus + unit, sizes, variant))
        return found

    def _neighbours(self, key: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        for number, stride in enumerate(strides):
            unit = _engines(self.pools[number]).gpus
            for change in (-stride, stride):
                sizes = [*key[1 : 1 + number], key[1 + number] + change * unit, *key[2 + number :]]
                yield key[0], sizes
                if self.pools[number].hardware == self._train_kind.name:
                    yield key[0] - change * unit, sizes

    def _span(self, pool: PoolSettings) -> int:
        return self._limits[pool.hardware][1] // _engines(pool).gpus

    def _grid(self) -> Iterator[tuple[int, list[int]]]:
        most_train = self._limits[self._train_kind.name][1]
        trains = sorted({max(1, round(most_train * part / GRID)) for part in range(1, GRID)})
        own = self._job.train.gpus
        for train_gpus in sorted({*trains, own}):
            yield from ((train_gpus, sizes) for sizes in self._sizes(train_gpus, 0))

    def _sizes(self, train_gpus: int, number: int) -> Iterator[list[int]]:
        if number == len(self.pools):
            yield []
            return
        pool = self.pools[number]
        unit = _engines(pool).gpus
        most = self._limits[pool.hardware][1] - (train_gpus if pool.hardware == self._train_kind.name else 0)
        engines = max(0, most // unit)
        for count in sorted({round(engines * part / GRID) for part in range(GRID + 1)}):
            for rest in self._sizes(train_gpus, number + 1):
                yield [count * unit, *rest]

    def _fits(self, train_gpus: int, sizes: Sequence[int], variant: Variant) -> bool:
        used = dict.fromkeys(self._limits, 0)
        used[self._train_kind.name] += train_gpus
        for pool, size in zip(self.pools, sizes, strict=True):
            used[pool.hardware] += size
        inside = all(low <= used[kind] <= high for kind, (low, high) in self._limits.items())
        if not inside or train_gpus < 1 or min(sizes) < 0 or not sum(sizes):
            return False
        counts, apart = engine_counts(self.pools, self._named(sizes), variant.apart), variant.apart
        if apart is not None and not counts[apart.decode]:
            return False
        if sum(counts.values()) <= self._job.rollout.rolling or train_gpus < self._job.sim.train.expert:
            return False
        return self._budget is None or self._price(train_gpus, sizes) <= self._budget

    def _named(self, sizes: Sequence[int]) -> dict[str, int]:
        return {pool.name: size for pool, size in zip(self.pools, sizes, strict=True)}

    def _price(self, train_gpus: int, sizes: Sequence[int]) -> float:
        def each(pool: PoolSettings) -> float:
            return self._job.kinds[pool.hardware].cost if pool.cost is None else pool.cost

        return train_gpus * each(self._job.train_pool) + sum(
            size * each(pool) for pool, size in zip(self.pools, sizes, strict=True)
        )

    def pairs(self) -> list[Apart]:
        """Ways to have prefill on workers of its own: of each pool of vLLM servers, on its GPUs or another pool's."""
        one_machine = self._job.cluster.type == "ray"  # where an engine's workers are, whatever their pools
        return [
            Apart(
                decode=decode.name,
                prefill=prefill.name,
                gpus=_engines(prefill).gpus,
                workers=workers,
                decoders=decoders,
            )
            for decode in self.pools
            for prefill in self.pools
            for workers, decoders in PAIRS
            if _engines(decode).type == "vllm" and (decode is prefill or not one_machine)
        ]

    # --- predictions ------------------------------------------------------------------------------------------

    def split(self, train_gpus: int, sizes: Sequence[int], variant: Variant) -> Split:
        """With its prediction."""
        plan, periods = self._rollout(sizes, variant)
        costs = self._train(train_gpus)
        tokens = sum(count * self._expected[task].tokens for task, count in self._counts.items())
        pairs = sum(count * self._expected[task].pairs for task, count in self._counts.items())
        parts = {"training": self._job.sim.train.fixed_s + costs.step_s(tokens, pairs), **periods}
        if self._job.sim.train.step_s is not None:
            parts["training"] = self._job.sim.train.step_s
        parts["push"] = self._model.weight_bytes / (self._job.sim.links.push_gb_s * 1e9)
        bottleneck = max(parts, key=lambda name: parts[name])
        return Split(
            train_gpus=train_gpus,
            pools=self._named(sizes),
            affinity=plan,
            bound=variant.bound,
            free=variant.free,
            apart=variant.apart,
            predicted_s=round(parts[bottleneck], 1),
            rollout_s=round(max(periods.values()), 1),
            other_s=round(max(parts["training"], parts["push"]), 1),
            price=round(self._price(train_gpus, sizes), 2),
            bottleneck=bottleneck,
        )

    def own_split(self) -> Split:
        """The job's."""
        sizes = [_engines(pool).count * _engines(pool).gpus for pool in self.pools]
        return self.split(self._job.train.gpus, sizes, self.own)

    def fits(self, split: Split) -> bool:
        return self._fits(split.train_gpus, [split.pools[pool.name] for pool in self.pools], Variant.of(split))

    def again(self, split: Split, variant: Variant) -> Split:
        """The same numbers of GPUs."""
        return self.split(split.train_gpus, [split.pools[pool.name] for pool in self.pools], variant)

    def _train(self, gpus: int) -> TrainCosts:
        train = self._job.sim.train
        if train.token_s is not None:
            return TrainCosts(update_s=0.0, token_s=train.token_s * self._job.train.gpus / gpus, pair_s=0.0)
        return train_costs(
            self._model,
            self._train_kind,
            gpus,
            efficiency=train.efficiency,
            tensor=min(train.tensor, gpus),
            expert=min(train.expert, gpus),
        )

    def _rollout(self, sizes: Sequence[int], variant: Variant) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """The best assignment, and each pool's period. Remembered: it does not depend on the trainer."""
        key = (variant, tuple(sizes))
        if key not in self._known:
            counts = engine_counts(self.pools, self._named(sizes), variant.apart)
            problem = self._problem(
                [self._speed(speed, counts, variant.apart) for speed in self._affinity.pools], variant
            )
            plan = best_plan(problem)
            self._known[key] = (plan, problem.periods(plan))
        return self._known[key]

    def _speed(self, speed: PoolSpeed, counts: Mapping[str, int], apart: Apart | None) -> PoolSpeed:
        speed = speed.with_engines(counts[speed.name])
        measured = self._job.sim.engine.measured.get(speed.name)
        if measured is not None:
            speed = replace(speed, measured=measured.costs(speed.table.kv_tokens))
        if apart is None or apart.decode != speed.name:
            return speed
        prefill = next(pool for pool in self.pools if pool.name == apart.prefill)
        return replace(
            speed,
            disaggregated=Disaggregated(
                hardware=self._job.kinds[prefill.hardware],
                gpus=apart.gpus,
                workers=apart.workers,
                decoders=apart.decoders,
                link_bytes_per_s=LINK_GB_S * 1e9,
            ),
        )

    def _problem(self, speeds: Sequence[PoolSpeed], variant: Variant) -> Problem:
        up = [speed.name for speed in speeds if speed.engines]
        named = (
            {} if variant.free else {task.name: {task.affinity: 1.0} for task in self._job.tasks if task.affinity in up}
        )
        return Problem(
            profiles={name: one.profile for name, one in self._expected.items()},
            demand=self._played,
            members={task.name: task.group_size for task in self._job.tasks},
            pools=speeds,
            fixed=named,
            ahead=variant.bound + 0.5,
        )


def engine_counts(pools: Sequence[PoolSettings], gpus: Mapping[str, int], apart: Apart | None) -> dict[str, int]:
    """Pool -> engines that its GPUs make. Prefill workers take theirs first."""
    units = {pool.name: _engines(pool).gpus for pool in pools}
    counts = {name: gpus[name] // unit for name, unit in units.items()}
    if apart is not None:
        decode, prefill = apart.decode, apart.prefill
        if decode == prefill:
            counts[decode] //= apart.workers + apart.decoders
        else:
            made = min(counts[decode] // apart.decoders, counts[prefill] // apart.workers)
            counts[decode], counts[prefill] = made, counts[prefill] - made * apart.workers
    return counts


def _engines(pool: PoolSettings) -> EngineSettings:
    assert pool.engines is not None
    return pool.engines


def _filtered(job: Job, task: TaskSettings) -> float:
    """Share of its groups whose members all earn the same, as training begins."""
    chance = min(1.0, job.sim.tasks.get(task.name, SimTaskSettings()).success)
    return float(min(FILTERED_MOST, chance**task.group_size + (1.0 - chance) ** task.group_size))


def _expected(job: Job, task: TaskSettings, sim: SimTaskSettings) -> _Expected:
    """What trajectories of a simulated task need, worked out from draws of its distributions."""
    dice = Dice(job.seed)
    needed = [_drawn(job, task, sim, dice, f"plan/{task.name}/{number}") for number in range(DRAWN)]
    profile = needed[0][0]
    for one, _ in needed[1:]:
        profile = profile.seen(one, memory=float(DRAWN))
    lengths = [length for _, length in needed]
    return _Expected(
        profile=profile,
        tokens=statistics.fmean(lengths),
        pairs=statistics.fmean(0.5 * length * length for length in lengths),
    )


def _drawn(job: Job, task: TaskSettings, sim: SimTaskSettings, dice: Dice, key: str) -> tuple[TaskProfile, float]:
    """One trajectory's needs, and its length."""
    turns = min(task.max_turns, dice.count(sim.turns, f"{key}/turns"))
    context = float(dice.count(sim.prompt_tokens, f"{key}/prompt"))
    new, prompts, decoded, held, played = context, 0.0, 0.0, 0.0, 0
    tail = sim.reset_tail and dice.uniform(f"{key}/tail") < sim.reset_tail
    elsewhere_s = dice.draw(sim.reset_tail_s if tail else sim.reset_s, f"{key}/reset")
    elsewhere_s += dice.draw(sim.reward_s, f"{key}/reward")
    for turn in range(turns):
        answer = min(task.max_tokens, dice.count(sim.answer_tokens, f"{key}/{turn}/answer"))
        if context + answer > job.model.context_tokens:
            break
        prompts += context
        decoded += answer
        context += answer
        held += context
        played += 1
        tail = sim.step_tail and dice.uniform(f"{key}/{turn}/tail") < sim.step_tail
        elsewhere_s += dice.draw(sim.step_tail_s if tail else sim.step_s, f"{key}/{turn}/step")
        if turn + 1 < turns:
            seen = dice.count(sim.observation_tokens, f"{key}/{turn}/obs")
            new += seen
            context += seen
    played = max(1, played)
    profile = TaskProfile(
        prompt_tokens=prompts,
        new_tokens=new,
        cached_tokens=max(0.0, prompts - new),
        prefill_tokens=new,
        decode_tokens=decoded,
        decode_squares=decoded * decoded,
        turns=float(played),
        context_tokens=held / played,
        elsewhere_s=elsewhere_s,
        trajectories=1,
    )
    assert math.isfinite(context)
    return profile, context

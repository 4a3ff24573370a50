"""How to split GPUs between training and rollout: `rollart plan JOB`.

Every split is predicted, with the costs that affinity predicts with; the best few are simulated. A step takes as long
as the longest of training, the push of its weights, and the pools; so this is for modes in which these overlap.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import PoolSettings, TaskSettings
from rollart.config.sim import SimTaskSettings
from rollart.errors import JobError
from rollart.hardware import Hardware, TrainCosts, train_costs
from rollart.launch.pools import build_affinity, task_shares
from rollart.launch.simulation import simulate
from rollart.policy.planning import Problem, best_plan
from rollart.policy.prediction import NEVER_S, PoolSpeed
from rollart.policy.profile import TaskProfile
from rollart.report.reports import PlanReport, Split
from rollart.sim.dice import Dice
from rollart.types import ParsedJson

OVERLAPPING = ("rollart", "areal")
DRAWN = 256
"""Trajectories of each task that its profile is worked out from."""
GRID = 8
"""Sizes of each pool, and of the trainer, that are tried at first; then those between the best ones."""
MAX_MARGIN = 2.2
"""Predictions of rollout are too good where little is left over: tails, waves, caches that nearly fit. Of the splits
that are simulated, one is best if they are right, one if rollout takes this many times as long, others in between."""
STEPS, SKIPPED = 9, 3
"""Of a simulated run, and of these not counted."""
MODEL_ERROR = 0.115
"""How far costs are off at worst where they were measured: tests/test_costs_measured.py."""


def make_plan(
    job: Job,
    pools: str,
    *,
    budget: float | None,
    goal: str,
    best: int,
    seeds: int,
    workers: int,
    progress: Callable[[str], None],
) -> PlanReport:
    """The best splits of the GPUs that `pools` allows. Raises JobError where there is none."""
    began_s = time.monotonic()
    if job.mode not in OVERLAPPING:
        raise JobError(
            f"plan: in mode {job.mode!r} training and rollout take turns, which is not planned for; set mode to rollart"
        )
    if any(engines.prefill for _, engines in job.engines):
        raise JobError("plan: engines with prefill apart are not planned for; remove pools.engines.prefill")
    planner = Planner(job, _limits(job, pools))
    chosen: list[Split] = []
    for number in range(best):
        margin = MAX_MARGIN ** (number / max(1, best - 1))
        ranked = planner.search(budget, goal, margin, progress)
        chosen += [split for split in ranked if split not in chosen][:1]
    if not chosen:
        raise JobError(f"plan: no split of --pools {pools!r} fits --budget {budget}; raise one of them")
    as_it_is = planner.split(
        job.train.gpus, {pool.name: pool.engines.count * pool.engines.gpus for pool in planner.pools if pool.engines}
    )
    work = [(planner.job_of(split), seed) for split in (*chosen, as_it_is) for seed in range(seeds)]
    took: list[float] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        for step_s in processes.map(_step_s, work):
            took.append(step_s)
            progress(f"simulated {len(took)}/{len(work)}: {step_s:.1f} s a step, {time.monotonic() - began_s:.0f} s")
    played = [
        _played(split, took[seeds * number : seeds * (number + 1)]) for number, split in enumerate((*chosen, as_it_is))
    ]
    value = (lambda split: split.step_s) if goal == "step-time" else (lambda split: split.cost_of_a_step)
    ranked = sorted(played[:-1], key=value)
    return PlanReport(
        goal=goal,
        considered=planner.considered,
        best=ranked,
        as_it_is=played[-1],
        model_error=MODEL_ERROR,
        wall_s=round(time.monotonic() - began_s, 1),
        job=planner.job_of(ranked[0]),
    )


def _played(split: Split, took: Sequence[float]) -> Split:
    import msgspec

    return msgspec.structs.replace(split, simulated_s=[round(step_s, 1) for step_s in took])


def _limits(job: Job, text: str) -> dict[str, tuple[int, int]]:
    """Kind -> fewest and most GPUs."""
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


class Planner:
    def __init__(self, job: Job, limits: Mapping[str, tuple[int, int]]) -> None:
        self._job = job
        self._limits = limits
        self._model = job.sim.shape
        self.pools: list[PoolSettings] = list(job.engine_pools)
        kinds = [pool.hardware for pool in self.pools]
        if len(set(kinds)) < len(kinds):
            raise JobError("plan: two pools have the same hardware; give each kind one pool of engines")
        self._expected = {
            task.name: _expected(job, task, job.sim.tasks.get(task.name, SimTaskSettings())) for task in job.tasks
        }
        self._affinity = build_affinity(job, self._model)
        self._known: dict[tuple[int, ...], tuple[dict[str, dict[str, float]], dict[str, float]]] = {}
        self._found: dict[tuple[int, ...], Split] = {}
        self.considered = 0

    @cached_property
    def _counts(self) -> dict[str, float]:
        """Task -> trajectories in a step."""
        shares = task_shares(self._job)
        groups = self._job.rollout.groups_per_step
        return {task.name: shares[task.name] * groups * task.group_size for task in self._job.tasks}

    @property
    def _train_kind(self) -> Hardware:
        return self._job.kinds[self._job.train_pool.hardware]

    def search(self, budget: float | None, goal: str, margin: float, progress: Callable[[str], None]) -> list[Split]:
        """Splits that fit, the best first if rollout takes `margin` times as long as predicted: a coarse grid, then the
        neighbours of its best."""
        found = self._found

        def add(train_gpus: int, sizes: Sequence[int]) -> None:
            key = (train_gpus, *sizes)
            if key not in found and self._fits(train_gpus, sizes, budget):
                named = {pool.name: size for pool, size in zip(self.pools, sizes, strict=True)}
                found[key] = self.split(train_gpus, named)
                self.considered += 1
                if self.considered % 50 == 0:
                    progress(f"predicted {self.considered} splits")

        def value(split: Split) -> tuple[float, float]:
            step_s = max(split.other_s, margin * split.rollout_s)
            return (step_s, split.price) if goal == "step-time" else (split.price * step_s, step_s)

        for train_gpus, sizes in self._grid():
            add(train_gpus, sizes)
        strides = [max(1, self._span(pool) // GRID) for pool in self.pools]
        while True:
            for key in sorted(found, key=lambda key: value(found[key]))[:6]:
                for number, stride in enumerate(strides):
                    unit = self._unit(number)
                    for change in (-stride, stride):
                        size = key[1 + number] + change * unit
                        sizes = [*key[1 : 1 + number], size, *key[2 + number :]]
                        add(key[0], sizes)
                        moved = key[0] - change * unit
                        if self.pools[number].hardware == self._train_kind.name:
                            add(moved, sizes)
            if max(strides) == 1:
                break
            strides = [max(1, stride // 2) for stride in strides]
        return sorted(found.values(), key=value)

    def _span(self, pool: PoolSettings) -> int:
        assert pool.engines is not None
        return self._limits[pool.hardware][1] // pool.engines.gpus

    def _unit(self, number: int) -> int:
        engines = self.pools[number].engines
        assert engines is not None
        return engines.gpus

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
        unit = self._unit(number)
        most = self._limits[pool.hardware][1] - (train_gpus if pool.hardware == self._train_kind.name else 0)
        engines = max(0, most // unit)
        for count in sorted({round(engines * part / GRID) for part in range(GRID + 1)}):
            for rest in self._sizes(train_gpus, number + 1):
                yield [count * unit, *rest]

    def _fits(self, train_gpus: int, sizes: Sequence[int], budget: float | None) -> bool:
        used = dict.fromkeys(self._limits, 0)
        used[self._train_kind.name] += train_gpus
        for pool, size in zip(self.pools, sizes, strict=True):
            used[pool.hardware] += size
        inside = all(low <= used[kind] <= high for kind, (low, high) in self._limits.items())
        if not inside or train_gpus < 1 or min(sizes) < 0 or not sum(sizes):
            return False
        return budget is None or self._price(train_gpus, sizes) <= budget

    def _price(self, train_gpus: int, sizes: Sequence[int]) -> float:
        def each(pool: PoolSettings) -> float:
            return self._job.kinds[pool.hardware].cost if pool.cost is None else pool.cost

        return train_gpus * each(self._job.train_pool) + sum(
            size * each(pool) for pool, size in zip(self.pools, sizes, strict=True)
        )

    def split(self, train_gpus: int, sizes: Mapping[str, int]) -> Split:
        """With its prediction."""
        plan, periods = self._rollout([sizes[pool.name] for pool in self.pools])
        costs = self._train(train_gpus)
        tokens = sum(count * self._expected[task].tokens for task, count in self._counts.items())
        pairs = sum(count * self._expected[task].pairs for task, count in self._counts.items())
        parts = {"training": self._job.sim.train.fixed_s + costs.step_s(tokens, pairs), **periods}
        if self._job.sim.train.step_s is not None:
            parts["training"] = self._job.sim.train.step_s
        parts["push"] = self._model.weight_bytes / (self._job.sim.links.push_gb_s * 1e9)
        bottleneck = max(parts, key=lambda name: parts[name])
        rollout_s = max(periods.values())
        return Split(
            train_gpus=train_gpus,
            pools=dict(sizes),
            affinity=plan,
            predicted_s=round(parts[bottleneck], 1),
            rollout_s=round(rollout_s, 1),
            other_s=round(max(parts["training"], parts["push"]), 1),
            price=round(self._price(train_gpus, [sizes[pool.name] for pool in self.pools]), 2),
            bottleneck=bottleneck,
        )

    def _train(self, gpus: int) -> TrainCosts:
        train = self._job.sim.train
        if train.token_s is not None:
            return TrainCosts(update_s=0.0, token_s=train.token_s * self._job.train.gpus / gpus, pair_s=0.0)
        return train_costs(
            self._model, self._train_kind, gpus, efficiency=train.efficiency, tensor=min(train.tensor, gpus)
        )

    def _rollout(self, sizes: Sequence[int]) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """The best assignment, and each pool's period. Remembered: it does not depend on the trainer."""
        key = tuple(sizes)
        if key not in self._known:
            speeds = [
                speed.with_engines(size // speed.gpus) for speed, size in zip(self._affinity.pools, sizes, strict=True)
            ]
            problem = self._problem(speeds)
            plan = best_plan(problem)
            self._known[key] = (plan, problem.periods(plan))
        return self._known[key]

    def _problem(self, speeds: Sequence[PoolSpeed]) -> Problem:
        up = [speed.name for speed in speeds if speed.engines]
        return Problem(
            profiles={name: one.profile for name, one in self._expected.items()},
            demand=self._counts,
            members={task.name: task.group_size for task in self._job.tasks},
            pools=speeds,
            fixed={task.name: task.affinity for task in self._job.tasks if task.affinity in up},
            ahead=self._job.rollout.staleness + 0.5,
        )

    def job_of(self, split: Split) -> ParsedJson:
        """The job with this split; tasks go where they are predicted to go best."""
        raw = self._job.model_dump(mode="json", exclude_defaults=True)
        raw["train"] = {**raw.get("train", {}), "gpus": split.train_gpus, "pool": self._job.train_pool.name}
        pools = []
        for pool in raw["pools"]:
            size = split.pools.get(pool["name"])
            if size == 0 and pool["name"] != self._job.train_pool.name:
                continue
            if size is not None:
                engines = dict(pool["engines"])
                if size:
                    engines["count"] = size // engines.get("gpus", 1)
                    pool = {**pool, "engines": engines}
                else:
                    pool = {key: value for key, value in pool.items() if key != "engines"}
            pools.append(pool)
        raw["pools"] = pools
        for task in raw["tasks"]:
            shares = split.affinity[task["name"]]
            task["affinity"] = next(iter(shares)) if len(shares) == 1 else "auto"
        return raw


def _step_s(work: tuple[ParsedJson, int]) -> float:
    """Seconds a step, simulated; never, where the job does not finish."""
    raw, seed = work
    raw = {**raw, "seed": seed, "train": {**raw["train"], "steps": STEPS}}
    ends: list[float] = []
    result = simulate(build_job(raw), ends=ends)
    if result.summary.state != "finished":
        return NEVER_S
    return (ends[-1] - ends[SKIPPED - 1]) / (len(ends) - SKIPPED)


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
    elsewhere_s = dice.draw(sim.reset_s, f"{key}/reset") + dice.draw(sim.reward_s, f"{key}/reward")
    for turn in range(turns):
        answer = min(task.max_tokens, dice.count(sim.answer_tokens, f"{key}/{turn}/answer"))
        if context + answer > job.model.context_tokens:
            break
        prompts += context
        decoded += answer
        context += answer
        held += context
        played += 1
        elsewhere_s += dice.draw(sim.step_s, f"{key}/{turn}/step")
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

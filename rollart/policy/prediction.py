"""How long a pool of engines needs for its part of a step: a closed queue, solved from measured task profiles.

Engines batch. What a token costs depends on who else is in the batch, whether caches fit beside it, and how many
trajectories are alive at all. So a pool is asked one question: with steps this far apart, does each of its tasks
finish its trajectories in time? The shortest such period is the prediction. Used by `planning`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollart.hardware import (
    RUNTIMES,
    TABLE,
    Disaggregated,
    EngineCosts,
    Hardware,
    Learnt,
    LearntCosts,
    ModelShape,
    Runtime,
    engine_costs,
)
from rollart.policy.profile import TaskProfile

CLOSE_ENOUGH = 0.003
"""Periods are searched to within this share."""
ROUNDS = 4
"""How often the number of live trajectories and the cache hits that follow from it are worked out from each other.
Where caches fit while few live, and not once many do, the two never agree: the pool swings, and so do its steps."""
SWINGS = 1.5
"""The last two periods that were worked out differ by more than this factor: they will not agree."""
WAVE = 0.5
"""Steps' worth of trajectories that are alive beyond what a steady flow would keep alive: a swap frees a step's slots
all at once."""
ROOM = 0.9
"""Share of the KV memory that caches are planned to fill: engines of a pool are not equally full at all times, and one
that is too full falls far behind."""
MAX_STEP_S = 10.0
"""Steps that would have to be longer than this do not keep up."""
NEVER_S = 1e9
"""A pool that cannot serve a task at all takes this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpeed:
    """What a pool of engines can do with the job's model."""

    name: str
    hardware: Hardware
    model: ModelShape
    engines: int
    gpus: int
    max_batch: int
    runtime: Runtime = RUNTIMES["embedded"]
    """What its engines' software adds to a step."""
    chunk_tokens: float = 8192.0
    """Tokens of one step, those of prompts included."""
    disaggregated: Disaggregated | None = None
    """Where prefill is on workers of its own. `gpus` and `max_batch` are then those of one decode worker."""
    kv_tokens: int | None = None
    """Bound of an engine's cache; where none is given its memory is. With prefill apart, of a decode worker's."""
    parallel: str = "tensor"
    """How the GPUs of an engine share the model."""
    measured: EngineCosts | None = None
    """Where steps were measured: in place of what the hardware takes."""
    learnt: Learnt = TABLE
    """How far its engines were seen to be from the table."""

    @property
    def costs(self) -> EngineCosts | LearntCosts:
        """Of an engine's steps; where prefill is apart, of a decode worker's."""
        return self._learnt(self.table)

    @property
    def prefill_costs(self) -> EngineCosts | LearntCosts:
        """Of the steps in which prompts are computed."""
        return self._learnt(self.prefill_table)

    @property
    def table(self) -> EngineCosts:
        """`costs` by the hardware alone."""
        if self.measured is not None:
            return self.measured
        costs = engine_costs(self.model, self.hardware, self.gpus, self.runtime, self.parallel)
        return costs.holding(self.kv_tokens)

    @property
    def prefill_table(self) -> EngineCosts:
        if self.measured is not None:
            return self.measured
        apart = self.disaggregated or self
        return engine_costs(self.model, apart.hardware, apart.gpus, self.runtime, self.parallel)

    def _learnt(self, table: EngineCosts) -> EngineCosts | LearntCosts:
        return table if self.learnt == TABLE else LearntCosts(table=table, learnt=self.learnt)

    def with_engines(self, engines: int) -> "PoolSpeed":
        return replace(self, engines=engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a pool is predicted to do with its part of the work."""

    period_s: float
    """Seconds between two steps that it can keep up with."""
    trajectory_s: Mapping[str, float]
    """Task -> seconds from the start of one trajectory to its end."""


def forecast(
    pool: PoolSpeed,
    work: Mapping[str, float],
    profiles: Mapping[str, TaskProfile],
    members: Mapping[str, int],
    ahead: float,
) -> Forecast:
    """The shortest period in which the pool does `work`: task -> trajectories in a step. Of a pool that swings, the
    mean of its two periods.

    `members`: task -> size of its groups, which are done when their slowest is. `ahead`: how many steps a group may
    take; it follows from the staleness bound.
    """
    tasks = [task for task, count in work.items() if count > 0.0]
    if not tasks:
        return Forecast(period_s=0.0, trajectory_s={})
    if pool.engines == 0:
        return Forecast(period_s=NEVER_S, trajectory_s=dict.fromkeys(tasks, NEVER_S))
    load = _Load(pool=pool, work=work, profiles={task: profiles[task] for task in tasks})
    straggle = {task: profiles[task].straggle(members[task]) for task in tasks}
    limits = {task: ahead / straggle[task] for task in tasks}
    spans = dict(limits)
    last = before = Forecast(period_s=NEVER_S, trajectory_s=dict.fromkeys(tasks, NEVER_S))
    for _ in range(ROUNDS):
        live = {task: (spans[task] * straggle[task] + WAVE) * work[task] / pool.engines for task in tasks}
        computed = load.computed(load.hit_rate(live), spans)
        period_s, lives = load.shortest(limits, computed)
        if abs(period_s - before.period_s) <= CLOSE_ENOUGH * before.period_s:
            return Forecast(period_s=before.period_s, trajectory_s=lives)
        last, before = before, Forecast(period_s=period_s, trajectory_s=lives)
        if period_s >= NEVER_S:
            return before
        spans = {task: min(limits[task], lives[task] / period_s) for task in tasks}
    if max(last.period_s, before.period_s) < SWINGS * min(last.period_s, before.period_s):
        return before
    return Forecast(
        period_s=(last.period_s + before.period_s) / 2,
        trajectory_s={task: (last.trajectory_s[task] + lives[task]) / 2 for task in tasks},
    )


def price(pool: PoolSpeed, one: TaskProfile) -> float:
    """What the engine time of one trajectory costs there, on engines that are full: device seconds times their relative
    price. Unlike a forecast it does not depend on who else is there."""
    apart, costs = pool.disaggregated, pool.costs
    batch = max(1.0, min(float(pool.max_batch), costs.kv_tokens / max(1.0, one.context_tokens)))
    decode_s = one.decode_tokens * costs.step_s(batch, batch * one.context_tokens) / batch
    prefill_s = one.new_tokens * pool.prefill_costs.prefill_token_s(one.context_tokens)
    prefills = (apart.gpus, apart.hardware) if apart is not None else (pool.gpus, pool.hardware)
    return decode_s * pool.gpus * pool.hardware.cost + prefill_s * prefills[0] * prefills[1].cost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A pool and its work: the tasks that it has any of."""

    pool: PoolSpeed
    work: Mapping[str, float]
    profiles: Mapping[str, TaskProfile]

    def computed(self, hit: float, spans: Mapping[str, float]) -> dict[str, float]:
        """Task -> prompt tokens that the engines compute for one trajectory. `spans`: task -> periods that it lives,
        and so the swaps that it lives through, each of which makes its cache worthless."""
        computed: dict[str, float] = {}
        for task, one in self.profiles.items():
            again = max(0.0, one.prompt_tokens - one.new_tokens)
            kept = hit if one.cached_tokens or not one.trajectories else 0.0
            held = max(0.0, one.context_tokens - one.decode_tokens / max(1.0, one.turns) / 2)
            computed[task] = one.new_tokens + again * (1.0 - kept) + kept * spans[task] * held
            if self.pool.disaggregated is not None:  # what was decoded is not in the prefill workers' cache
                computed[task] += kept * one.decode_tokens * (1.0 - 1.0 / max(1.0, one.turns))
        return computed

    def hit_rate(self, live: Mapping[str, float]) -> float:
        """Share of caches that survive until the next turn: all while they fit, none when half as many again want
        room."""
        pool = self.pool
        decoders = pool.disaggregated.decoders if pool.disaggregated else 1
        room = ROOM * decoders * pool.costs.kv_tokens
        wanted = sum(count * self.profiles[task].context_tokens for task, count in live.items())
        return max(0.0, min(1.0, 1.0 - 2.0 * (wanted / max(1.0, room) - 1.0)))

    def shortest(self, limits: Mapping[str, float], computed: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """The shortest period, and the lives in it. `limits`: task -> periods that the mean trajectory may take."""
        low_s = high_s = 1.0
        lives = self._lives(high_s, computed)
        while not _in_time(lives, limits, high_s):
            low_s, high_s = high_s, 2.0 * high_s
            if high_s > NEVER_S:
                return NEVER_S, dict.fromkeys(self.profiles, NEVER_S)
            lives = self._lives(high_s, computed)
        if high_s == 1.0:
            low_s = 1e-3
        while high_s > (1.0 + CLOSE_ENOUGH) * low_s:
            middle_s = (low_s * high_s) ** 0.5
            tried = self._lives(middle_s, computed)
            if _in_time(tried, limits, middle_s):
                high_s, lives = middle_s, tried
            else:
                low_s = middle_s
        assert lives is not None
        return high_s, lives

    def _lives(self, period_s: float, computed: Mapping[str, float]) -> dict[str, float] | None:
        """Task -> seconds of one trajectory's life when steps are `period_s` apart; None where an engine is overrun."""
        pool, apart = self.pool, self.pool.disaggregated
        flows = [
            _Flow(
                rate=self.work[task] / (period_s * pool.engines),
                tokens=computed[task],
                decoded=max(0.0, one.decode_tokens - one.turns),
                turns=max(1.0, one.turns),
                context=one.context_tokens,
            )
            for task, one in self.profiles.items()
        ]
        costs = pool.costs
        decoders = apart.decoders if apart is not None else 1
        beside = sum(flow.rate * flow.tokens for flow in flows) if apart is None else 0.0
        calls = sum(flow.rate * flow.turns for flow in flows) if apart is None else 0.0
        decoded = sum(flow.rate * flow.decoded for flow in flows) / decoders
        context = _mean(flows, lambda flow: flow.decoded)
        seen = _mean(flows, lambda flow: flow.tokens)
        found = _balanced(costs, decoded, context, beside, seen, calls)
        if found is None:
            return None
        step_s, batch = found
        room = min(pool.max_batch, costs.kv_tokens / max(1.0, context))
        if batch > room or beside * step_s + batch > pool.chunk_tokens:
            return None
        prefill = _own_prefill if apart is not None else _shared_prefill
        waits = prefill(pool, flows, step_s, batch, context)
        if waits is None:
            return None
        lives: dict[str, float] = {}
        for (task, one), flow, wait_s in zip(self.profiles.items(), flows, waits, strict=True):
            sent = one.new_tokens * pool.model.kv_bytes_per_token / apart.link_bytes_per_s if apart is not None else 0.0
            lives[task] = one.elsewhere_s + flow.turns * wait_s + sent + flow.decoded * step_s
        return lives


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """What one engine gets of one task."""

    rate: float
    """Trajectories a second."""
    tokens: float
    """Of prompts, computed for one of them."""
    decoded: float
    """Tokens of one beyond the first of each turn, which comes with the prompt."""
    turns: float
    context: float


def _mean(flows: Sequence[_Flow], weight: Callable[[_Flow], float]) -> float:
    """Of the context, where tasks count by what they have in all."""
    weights = [flow.rate * weight(flow) for flow in flows]
    total = sum(weights)
    return sum(flow.context * one for flow, one in zip(flows, weights, strict=True)) / total if total else 0.0


def _balanced(
    costs: EngineCosts | LearntCosts, decoded: float, context: float, prefill: float, seen: float, calls: float
) -> tuple[float, float] | None:
    """(seconds of a step, sequences that decode in it) when `decoded` tokens, and `prefill` of `calls` prompts, are
    computed in a second; None where steps cannot keep up. Each step has what came in during the one before."""
    step_s = costs.step_s(1.0, context)
    for _ in range(80):
        batch = decoded * step_s
        longer_s = costs.step_s(max(1.0, batch), max(1.0, batch) * context, prefill * step_s, seen, calls * step_s)
        if longer_s > MAX_STEP_S:
            return None
        if abs(longer_s - step_s) <= 1e-3 * step_s:
            return longer_s, decoded * longer_s
        step_s = longer_s
    return None


def _shared_prefill(
    pool: PoolSpeed, flows: Sequence[_Flow], step_s: float, batch: float, context: float
) -> list[float] | None:
    """Seconds of each task's calls until their first token: a queue for the steps that compute prompts, then those in
    which their own is computed."""
    costs, budget = pool.costs, max(1.0, pool.chunk_tokens - batch)
    added_s = [flow.tokens / flow.turns * costs.prefill_token_s(flow.context) for flow in flows]
    calls_s = []
    for flow in flows:
        tokens = flow.tokens / flow.turns
        own_s = costs.step_s(batch, batch * context, min(tokens, budget), flow.context, 1.0)
        calls_s.append(max(1.0, tokens / budget) * max(step_s, own_s))
    calls = [flow.rate * flow.turns for flow in flows]
    busy = sum(rate * seconds for rate, seconds in zip(calls, added_s, strict=True))
    if busy >= 1.0:
        return None
    wait_s = sum(rate * one_s * call_s for rate, one_s, call_s in zip(calls, added_s, calls_s, strict=True))
    return [wait_s / (1.0 - busy) + call_s for call_s in calls_s]


def _own_prefill(
    pool: PoolSpeed, flows: Sequence[_Flow], step_s: float, batch: float, context: float
) -> list[float] | None:
    """The same, where prefill workers do nothing else: a queue of prompts, of which several go into one step."""
    assert pool.disaggregated is not None
    costs, workers = pool.prefill_costs, pool.disaggregated.workers
    busy = sum(flow.rate * flow.tokens * costs.prefill_token_s(flow.context) for flow in flows) / workers
    if busy >= 1.0:
        return None
    calls_s = [costs.prefill_s(flow.tokens / flow.turns, flow.context) for flow in flows]
    return [(1.0 + busy / (1.0 - busy)) * call_s for call_s in calls_s]


def _in_time(lives: Mapping[str, float] | None, limits: Mapping[str, float], period_s: float) -> bool:
    return lives is not None and all(life_s <= limits[task] * period_s for task, life_s in lives.items())

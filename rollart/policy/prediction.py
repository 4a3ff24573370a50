"""How long a pool of engines needs for its part of a step: a closed queue, solved from measured task profiles.

Engines batch. What a token costs depends on who else is in the batch, whether caches fit beside it, and how many
trajectories are alive at all. So a pool is asked one question: with steps this far apart, does each of its tasks
finish its trajectories in time? The shortest such period is the prediction. Used by `planning`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollart.hardware import Disaggregated, Hardware, ModelShape, decode_step_s, kv_capacity_tokens, prefill_s_per_token
from rollart.policy.profile import TaskProfile

CLOSE_ENOUGH = 0.003
"""Periods are searched to within this share."""
ROUNDS = 4
"""How often the number of live trajectories and the cache hits that follow from it are worked out from each other."""
WAVE = 0.5
"""Steps' worth of trajectories that are alive beyond what a steady flow would keep alive: a swap frees a step's slots
all at once."""
ROOM = 0.9
"""Share of the KV memory that caches are planned to fill: engines of a pool are not equally full at all times, and one
that is too full falls far behind."""
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
    chunk_tokens: float = 2048.0
    """Prefill tokens beside one decode step."""
    overhead_s: float = 0.002
    """Each call, before its prefill."""
    disaggregated: Disaggregated | None = None
    """Where prefill is on workers of its own. `gpus` and `max_batch` are then those of one decode worker."""

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
    """The shortest period in which the pool does `work`: task -> trajectories in a step.

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
    period_s, lives = NEVER_S, dict.fromkeys(tasks, NEVER_S)
    for _ in range(ROUNDS):
        live = {task: (spans[task] * straggle[task] + WAVE) * work[task] / pool.engines for task in tasks}
        computed = load.computed(load.hit_rate(live), spans)
        found_s, lives = load.shortest(limits, computed)
        if abs(found_s - period_s) <= CLOSE_ENOUGH * period_s:
            break
        period_s = found_s
        if period_s >= NEVER_S:
            break
        spans = {task: min(limits[task], lives[task] / period_s) for task in tasks}
    return Forecast(period_s=period_s, trajectory_s=lives)


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
        room = ROOM * decoders * kv_capacity_tokens(pool.model, pool.hardware, pool.gpus)
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
        pool, model, apart = self.pool, self.pool.model, self.pool.disaggregated
        workers, decoders = (apart.workers, apart.decoders) if apart is not None else (1, 1)
        prefill_s = prefill_s_per_token(model, (apart or pool).hardware, (apart or pool).gpus)
        loads = [
            (task, one, self.work[task] / (period_s * pool.engines), computed[task])
            for task, one in self.profiles.items()
        ]
        prefilling = sum(rate * (tokens * prefill_s + one.turns * pool.overhead_s) for _, one, rate, tokens in loads)
        decoded = sum(rate * one.decode_tokens for _, one, rate, _ in loads)
        if prefilling >= workers:
            return None
        free = 1.0 if apart is not None else 1.0 - prefilling
        context = sum(rate * one.decode_tokens * one.context_tokens for _, one, rate, _ in loads) / decoded
        step_s, batch = _decode(pool, decoded / decoders, free, context)
        if batch > min(pool.max_batch, kv_capacity_tokens(model, pool.hardware, pool.gpus) / max(1.0, context)):
            return None
        beside_s = 0.0 if apart is not None else step_s * min(1.0, batch)
        calls = [
            (rate * one.turns / workers, _call_s(pool, one, tokens, prefill_s, beside_s))
            for _, one, rate, tokens in loads
        ]
        queue = sum(rate * seconds for rate, seconds in calls)
        if queue >= 1.0:
            return None
        wait_s = sum(rate * seconds * seconds for rate, seconds in calls) / (1.0 - queue)
        lives: dict[str, float] = {}
        for (task, one, _, _), (_, call_s) in zip(loads, calls, strict=True):
            move_s = one.new_tokens * model.kv_bytes_per_token / apart.link_bytes_per_s if apart is not None else 0.0
            lives[task] = one.elsewhere_s + one.turns * (wait_s + call_s) + move_s + one.decode_tokens * step_s / free
        return lives


def _in_time(lives: Mapping[str, float] | None, limits: Mapping[str, float], period_s: float) -> bool:
    return lives is not None and all(life_s <= limits[task] * period_s for task, life_s in lives.items())


def _call_s(pool: PoolSpeed, one: TaskProfile, computed: float, prefill_s: float, beside_s: float) -> float:
    """Seconds in which one call has the prefill to itself, decode steps beside it included."""
    tokens = computed / max(1.0, one.turns)
    return tokens * prefill_s + pool.overhead_s + max(1.0, tokens / pool.chunk_tokens) * beside_s


def _decode(pool: PoolSpeed, rate: float, free: float, context: float) -> tuple[float, float]:
    """(seconds of a decode step, sequences in it) at which `rate` tokens a second come out in the `free` share of the
    time; an infinite batch where they cannot."""
    model, hardware, gpus = pool.model, pool.hardware, pool.gpus
    step_s = decode_step_s(model, hardware, gpus, 1.0, context)
    per_sequence_s = max(
        decode_step_s(model, hardware, gpus, 1000.0, 1000.0 * context)
        - decode_step_s(model, hardware, gpus, 999.0, 999.0 * context),
        0.0,
    )
    if rate * per_sequence_s >= free:
        return step_s, float("inf")
    batch = 1.0
    for _ in range(60):
        step_s = decode_step_s(model, hardware, gpus, max(1.0, batch), batch * context)
        wanted = rate * step_s / free
        if abs(wanted - batch) <= 1e-3 * batch:
            break
        batch = wanted
        if batch > 1e6:
            return step_s, float("inf")
    return step_s, batch

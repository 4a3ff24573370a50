"""A simulated engine: continuous batching as a fluid that is re-planned only at arrivals and finishes.

All decoding sequences advance together, one token a step, so one counter of steps serves them all. Prompts that wait
are packed, in order of arrival, and computed in the steps of those who decode; the step in which a prompt is done gives
its first token. Steps grow longer as contexts do: by the same amount each, so that the time of many is a square.
Events are O(requests), whatever the number of tokens. KV memory is reserved whole when a request enters the batch;
idle sessions keep their cache until the room is needed or the weights change, and a swap makes every in-flight request
prefill again. Members of a group have their first prompt in common, and compute it once.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from rollart.config.sim import SimEngineSettings, SimTaskSettings
from rollart.errors import EngineError, RequestError, WeightError
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.hardware import NODE_GPUS, Disaggregated, EngineCosts, Hardware, ModelShape, engine_costs
from rollart.sim.cores import Core
from rollart.sim.dice import Dice
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink, SimStore
from rollart.sim.tokens import blank_logprobs, blank_tokens
from rollart.types import (
    Completion,
    EngineSpec,
    Finish,
    GenerateRequest,
    Pulled,
    Span,
    SwapReport,
    WeightManifest,
    WeightVersion,
    WorkMeter,
)

ALMOST = 1e-6
"""Tokens, or steps, closer to done than this are done."""
SERVERS = ("vllm", "sglang")
"""Engines whose cache is blocks: of an idle session that is in the way only as many go as are needed, the last ones
first. Other engines drop it whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorld:
    """What all simulated engines share."""

    model: ModelShape
    """The policy."""
    hardware: Mapping[str, Hardware]
    settings: SimEngineSettings
    max_batch: Mapping[str, int]
    """By pool."""
    disaggregated: Mapping[str, Disaggregated]
    """By pool, where its engines have prefill and decode on workers of their own."""
    tasks: Mapping[str, SimTaskSettings]
    """By domain, for the lengths of answers; a judge is a domain too."""
    dice: Dice
    store: SimStore
    pull: SimLink
    blocking: bool
    """`sim.links.blocking`."""
    log: EventLog
    faults: Faults
    cores: Mapping[str, Core] = field(default_factory=dict)
    """By engine, that of the coordinator which calls it."""
    call_s: float = 0.0
    """That it works there for each call."""
    counts_work: bool = True
    """Engines say what they have done, as some task's pool is chosen by how fast they are."""
    kv_tokens: Mapping[str, int | None] = field(default_factory=dict)
    """By pool, the bound of each worker's cache, where its memory is not."""
    judges: Mapping[str, ModelShape] = field(default_factory=dict)
    """By pool, where its engines serve a judge."""
    taken: Mapping[str, float] = field(default_factory=dict)
    """By pool of a judge, the share of its engines' time that other jobs take."""
    parallel: Mapping[str, str] = field(default_factory=dict)
    """By pool: `pools.engines.parallel`."""

    def model_of(self, pool: str) -> ModelShape:
        return self.judges.get(pool, self.model)

    def costs(self, pool: str, hardware: Hardware, gpus: int, kind: str) -> EngineCosts:
        """What steps of a worker of this pool cost; measured, where that is known."""
        parallel = self.parallel.get(pool, "tensor")
        costs = engine_costs(self.model_of(pool), hardware, gpus, self.settings.runtime(kind), parallel)
        costs = costs.holding(self.kv_tokens.get(pool))
        measured = self.settings.measured.get(pool)
        costs = costs if measured is None else measured.costs(costs.kv_tokens)
        taken = self.taken.get(pool, 0.0)
        return costs.slowed(1.0 / (1.0 - taken)) if taken else costs


@dataclass(slots=True, eq=False)
class SimSequence:
    """One request in the engine."""

    request: GenerateRequest
    need: int
    """Tokens it will say."""
    kv: int
    future: "asyncio.Future[Completion]"
    cached: int = 0
    prefill: int = 0
    """Tokens that are to be computed before it decodes."""
    prefilled: int = 0
    busy_s: float = 0.0
    prefill_busy_s: float = 0.0
    target: float = -1.0
    """Step count at which its last token comes; -1 while it does not decode."""
    shift: float = 0.0
    """Its context length minus the step count."""
    began_share: float = 0.0
    slow_s: float = 0.0
    """A fault: its last token takes this much longer, while all others go on."""
    spans: list[Span] = field(default_factory=list)
    said: int = 0
    """Tokens whose version is settled: those before the last swap."""

    def say(self, version: WeightVersion, tokens: int) -> None:
        """So many more are of this version."""
        if tokens:
            self.spans.append(Span(version, tokens))
            self.said += tokens


@dataclass(slots=True, eq=False)
class Pack:
    """Prompts that are computed together."""

    sequences: list[SimSequence]
    tokens: float
    """To be computed, of all of them."""
    chunk: float
    """Of these, in one step."""
    seen: float
    """Tokens that each of them looks at, on average."""
    left: float
    """Steps."""
    step_s: float = 0.0
    """Of a step in which nobody decodes."""
    busy_s: float = 0.0

    def recost(self, costs: EngineCosts) -> None:
        prompts = len(self.sequences) * self.chunk / self.tokens
        self.step_s = costs.step_s(0.0, 0.0, self.chunk, self.seen, prompts)

    def drop(self, sequence: SimSequence) -> None:
        self.sequences.remove(sequence)
        self.tokens -= sequence.prefill

    def shares(self) -> Iterator[tuple[SimSequence, float]]:
        """Its sequences, each with its part of the seconds, by tokens."""
        for sequence in self.sequences:
            yield sequence, self.busy_s * sequence.prefill / self.tokens


class SimEngine:
    __slots__ = (
        "_active",
        "_active_kv",
        "_at_s",
        "_capacity",
        "_computed",
        "_costs",
        "_decode_part",
        "_decoding",
        "_died",
        "_growth_s",
        "_hardware",
        "_held",
        "_idle",
        "_idle_kv",
        "_in_blocks",
        "_loading_gpus",
        "_longest",
        "_loop",
        "_max_batch",
        "_num_decoding",
        "_num_prefilling",
        "_numbers",
        "_packs",
        "_paused",
        "_prefilling",
        "_prefixes",
        "_share_s",
        "_shift",
        "_slow",
        "_staged_s",
        "_staging",
        "_step_s",
        "_steps",
        "_timer",
        "_timer_s",
        "_waiting",
        "_work",
        "_world",
        "answered",
        "dead",
        "fronted",
        "hung",
        "spec",
        "version",
    )
    """So many attributes are slow in a dict: Python keeps those of up to 30 in place."""

    def __init__(self, spec: EngineSpec, world: EngineWorld, died: Callable[[str], object]) -> None:
        self.spec = spec
        self._world = world
        self._died = died
        self._hardware = world.hardware[spec.pool]
        self._costs = world.costs(spec.pool, self._hardware, spec.gpus, spec.type)
        self._longest = self._capacity = self._costs.kv_tokens
        """KV tokens that one request, and all of them, can have."""
        self._in_blocks = spec.type in SERVERS
        self._loading_gpus = spec.gpus
        self._max_batch = world.max_batch[spec.pool]
        self._loop = asyncio.get_running_loop()
        self.version: WeightVersion = 0
        self.dead = ""
        self.hung = False
        self.fronted = False
        """Of a hung one: what answers calls is well, what computes is not."""
        self.answered = 0
        """Calls, since it was started."""
        self._paused = False
        self._held = False
        """It stands still while weights are pushed: `sim.links.blocking`."""
        self._staged_s: dict[WeightVersion, float] = {}
        self._staging: asyncio.Future[None] | None = None
        self._waiting: deque[SimSequence] = deque()
        self._prefilling: deque[SimSequence] = deque()
        """In the batch, and not computed yet."""
        self._packs: list[Pack] = []
        """Under way: one, unless there are several prefill workers."""
        self._num_prefilling = 0
        """In the deque and in packs."""
        self._decoding: list[tuple[float, int, SimSequence]] = []
        self._num_decoding = 0
        self._active: dict[str, SimSequence] = {}
        self._idle: dict[str, int] = {}
        """Cached tokens of sessions between turns, least recently used first."""
        self._prefixes: dict[str, tuple[int, int]] = {}
        """Group -> (tokens of its first prompt, members that have it in the cache here)."""
        self._idle_kv = 0
        self._active_kv = 0
        self._at_s = self._loop.time()
        self._steps = 0.0
        self._share_s = 0.0
        """Seconds of decode that each sequence in the batch has used since the engine began."""
        self._shift = 0.0
        """Sum of `shift` over decoding sequences: their context is this plus their number times the steps."""
        self._step_s = 0.0
        """Of the step that is under way; 0 where nobody decodes and nothing is computed."""
        self._growth_s = 0.0
        """By which each step takes longer than the one before."""
        self._decode_part = 0.0
        """Share of a step that is of those who decode."""
        self._numbers = 0
        self._computed = 0.0
        """Tokens, since it was started."""
        self._work = WorkMeter()
        self._slow: dict[str, SimSequence] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    # --- the port -------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.dead or self.hung:
            await self._alive()
        world = self._world
        if world.call_s:
            await world.cores[self.spec.id].work(world.call_s)
            await self._alive()
        if world.settings.call_s:
            await asyncio.sleep(world.settings.call_s)
            await self._alive()
        task = world.tasks[request.domain].at(self._loop.time())
        need = world.dice.count(task.answer_tokens, f"{request.id}/answer")
        if need > request.sampling.max_tokens:
            need = request.sampling.max_tokens
        if request.prompt_tokens + need > self._longest:
            raise RequestError(f"prompt of {request.prompt_tokens} tokens does not fit in {self._longest} of KV memory")
        sequence = SimSequence(request, need, request.prompt_tokens + need, self._loop.create_future())
        self._active[request.id] = sequence
        self._waiting.append(sequence)
        self._advance()
        self._plan()
        completion = await sequence.future
        if world.faults.armed and (fault := world.faults.take("bad_answer", request.id)) is not None:
            return _spoilt(completion, fault.target)
        return completion

    async def abort(self, request_id: str) -> int:
        if not (self.hung and self.fronted):
            await self._alive()
            self._advance()
            self._stop(request_id)
        return int(self._computed)

    def _stop(self, request_id: str) -> None:
        sequence = self._active.pop(request_id, None)
        if sequence is None:
            return
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._active_kv -= sequence.kv
            self._release(sequence.request.session)
            if not self._slow.pop(request_id, None):
                self._drop(sequence)
        self._plan()

    async def stage(self, version: WeightVersion) -> None:
        await self._alive()
        if self._world.blocking:
            return
        world, began_s = self._world, self._staged_s.setdefault(version, self._loop.time())
        while max(self._staged_s, default=0) <= version and self.version < version:
            try:
                done_s = world.store.staged_s(version, world.pull, began_s)
            except WeightError:
                return  # the swap will say so
            if done_s is None:
                self._staging = world.store.next_manifest()
                await self._staging
            elif done_s > self._loop.time():
                await asyncio.sleep(done_s - self._loop.time())
            else:
                return
            await self._alive()

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        await self._alive()
        world, began_s = self._world, self._loop.time()
        self._advance()
        self._paused = True
        self._plan()
        try:
            start_s = self._staged_s.get(manifest.version, began_s)
            while True:
                done_s, pull_s = world.store.pull_done_s(manifest, world.pull, start_s)
                if done_s <= self._loop.time():
                    break
                await asyncio.sleep(done_s - self._loop.time())
                await self._alive()
            versions = world.store.read(manifest)
            await asyncio.sleep(self._load_s(manifest))
            await self._alive()
            rebuilt = self._restart_all(manifest.version)
        finally:
            self._advance()
            self._paused = False
            self._plan()
        self._staged_s = {version: at_s for version, at_s in self._staged_s.items() if version > manifest.version}
        world.log.emit(schema.Loaded(engine=self.spec.id, version=manifest.version, of=sorted(set(versions))))
        came = Pulled(pull_s, manifest.num_bytes)
        return SwapReport(version=manifest.version, pulled=came, rebuilt_tokens=rebuilt)

    def _load_s(self, manifest: WeightManifest) -> float:
        settings = self._world.settings
        parts = 1 / NODE_GPUS if settings.load_whole else self._loading_gpus
        return manifest.num_bytes / (settings.load_gb_s * 1e9 * parts)

    def hold(self, held: bool) -> None:
        """Stand still, or go on."""
        if not (self.dead or self.hung):
            self._advance()
            self._held = held
            self._plan()

    @property
    def doing(self) -> str:
        """`prefill` while prompts are computed, whoever decodes beside them; `decode`; or "", nothing."""
        return "prefill" if self._packs else "decode" if self._num_decoding else ""

    def recost(self, costs: EngineCosts) -> None:
        """From now on steps take this long: what else runs on its device has changed. The cache stays as large. For
        engines that have no prefill workers."""
        self._advance()
        self._costs = costs
        for pack in self._packs:
            pack.recost(costs)
        self._plan()

    # --- faults ---------------------------------------------------------------------------------------------

    def die(self, reason: str) -> None:
        """The process is gone: everyone who waits on it learns so at once."""
        if self.dead:
            return
        self.dead = reason
        self._cancel_timer()
        for sequence in self._active.values():
            if not sequence.future.done():
                sequence.future.set_exception(EngineError(f"{self.spec.id} died: {reason}"))
        self._active.clear()
        if self._staging is not None and not self._staging.done():
            self._staging.set_result(None)
        self._died(self.spec.id)

    def hang(self, *, fronted: bool = False) -> None:
        """It stops computing, and nobody is told. `fronted`: it still answers everything but requests."""
        self._advance()
        self.hung, self.fronted = True, fronted
        self._cancel_timer()

    def calls(self) -> list[str]:
        """The requests in it, oldest first."""
        return list(self._active)

    def slow(self, request_id: str, seconds: float) -> str:
        """One answer takes this much longer. Returns whose it is."""
        sequence = self._active[request_id]
        sequence.slow_s += seconds
        return sequence.request.session

    async def _alive(self) -> None:
        if self.dead:
            raise EngineError(f"{self.spec.id} died: {self.dead}")
        if self.hung:
            await self._loop.create_future()

    # --- the fluid ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Bring the counters to now, by what was planned last."""
        now_s = self._loop.time()
        passed_s = now_s - self._at_s
        self._at_s = now_s
        if passed_s > 0:
            if self._slow:
                self._computed += len(self._slow) * passed_s
            self._progress(passed_s)

    def _progress(self, passed_s: float) -> None:
        """Steps in which some decode and, beside them, a pack is computed."""
        if not self._step_s:
            return
        steps = steps_in(passed_s, self._step_s, self._growth_s)
        self._computed += steps
        if self._world.counts_work:
            self._note(passed_s, steps)
        if self._num_decoding:
            self._steps += steps
            self._share_s += passed_s * self._decode_part / self._num_decoding
        for pack in self._packs:
            pack.left -= steps
            pack.busy_s += passed_s * (1.0 - self._decode_part)
            self._computed += steps * pack.chunk

    def _note(self, passed_s: float, steps: float) -> None:
        """Count these steps as a real engine counts its own."""
        batch = self._num_decoding
        cached = self._shift + batch * (self._steps + 0.5 * (1.0 + steps))
        if not self._packs:
            self._work.add(passed_s, steps, sequences=batch, cached=cached)
            return
        pack = self._packs[0]
        self._work.add(
            passed_s,
            steps,
            sequences=batch,
            cached=cached,
            prompts=len(pack.sequences) * pack.chunk / pack.tokens,
            tokens=pack.chunk,
            pairs=pack.chunk * pack.seen,
        )

    def _plan(self) -> None:
        """Move what is done, fill the batch, plan the next steps, and look again when the next thing is done."""
        if self.hung or self.dead:
            return
        self._step_s = 0.0
        if self._paused or self._held:
            self._cancel_timer()
            return
        decoding = self._decoding
        while True:
            moved = False
            for pack in self._packs:
                if pack.left <= ALMOST:
                    self._finish_packs()
                    moved = True
                    break
            while decoding and decoding[0][0] <= self._steps + ALMOST:
                self._finish(heapq.heappop(decoding)[2])
                moved = True
            if not ((self._waiting and self._admit()) or moved):
                break
        while decoding and decoding[0][2].target < 0:
            heapq.heappop(decoding)
        if self._prefilling:
            self._form_packs()
        when_s = self._planned_s()
        if when_s == math.inf:
            self._cancel_timer()
        else:
            self._look_at(when_s)

    def _finish_packs(self) -> None:
        """Those that are computed go on."""
        for pack in [pack for pack in self._packs if pack.left <= ALMOST]:
            self._packs.remove(pack)
            self._num_prefilling -= len(pack.sequences)
            for sequence, seconds in pack.shares():
                self._book_prefill(sequence, seconds)
                self._prefilled(sequence)

    def _pack(self, budget: float, costs: EngineCosts) -> Pack:
        """The next prompts, as many as one step computes; one that is longer than that has a pack to itself."""
        sequences = [self._prefilling.popleft()]
        tokens = sequences[0].prefill
        pairs = _pairs(sequences[0])
        while self._prefilling and tokens + self._prefilling[0].prefill <= budget:
            sequence = self._prefilling.popleft()
            sequences.append(sequence)
            tokens += sequence.prefill
            pairs += _pairs(sequence)
        chunk = min(float(tokens), budget)
        seen = pairs / tokens
        pack = Pack(sequences, tokens, chunk, seen, tokens / chunk)
        pack.recost(costs)
        return pack

    # --- what is different where prefill and decode are apart -------------------------------------------------

    def _form_packs(self) -> None:
        if not self._packs:
            budget = max(1.0, self._world.settings.chunk_tokens - self._num_decoding)
            self._packs.append(self._pack(budget, self._costs))

    def _planned_s(self) -> float:
        """Set what a step takes; when the first sequence, or the pack, is done: the next thing to happen here."""
        batch, costs = self._num_decoding, self._costs
        pack = self._packs[0] if self._packs else None
        if not batch:
            if pack is None:
                return math.inf
            self._step_s, self._growth_s, self._decode_part = pack.step_s, 0.0, 0.0
            return self._at_s + pack.left * pack.step_s
        cached = self._shift + batch * (self._steps + 0.5)
        decode_s = costs.step_s(batch, cached)
        self._growth_s = batch * costs.kv_token_s
        steps = self._decoding[0][0] - self._steps
        if pack is None:
            self._step_s, self._decode_part = decode_s, 1.0
        else:
            prompts = len(pack.sequences) * pack.chunk / pack.tokens
            self._step_s = costs.step_s(batch, cached, pack.chunk, pack.seen, prompts)
            self._decode_part = decode_s / self._step_s
            steps = min(steps, pack.left)
        return self._at_s + seconds_of(steps, self._step_s, self._growth_s)

    def _prefilled(self, sequence: SimSequence) -> None:
        self._begin_decode(sequence)

    def _book_prefill(self, sequence: SimSequence, seconds: float) -> None:
        sequence.busy_s += seconds

    def _drop(self, sequence: SimSequence) -> None:
        """Take out an aborted sequence."""
        if sequence.target >= 0:
            self._leave_decode(sequence)
            return
        self._num_prefilling -= 1
        for pack in self._packs:
            if sequence in pack.sequences:
                pack.drop(sequence)
                if not pack.sequences:
                    self._packs.remove(pack)
                return
        self._prefilling.remove(sequence)

    @property
    def _in_batch(self) -> int:
        return self._num_prefilling + self._num_decoding

    def _look_at(self, when_s: float) -> None:
        """Keep a timer that fires early enough; one that fires too early just plans again."""
        if self._timer is not None:
            if self._timer_s <= when_s:
                return
            self._timer.cancel()
        self._timer_s = when_s
        self._timer = self._loop.call_at(when_s, self._look)

    def _look(self) -> None:
        self._timer = None
        self._advance()
        self._plan()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _admit(self) -> bool:
        """Let waiting requests into the batch while sequences and KV memory allow. True if one entered."""
        entered = False
        while self._waiting and self._in_batch < self._max_batch:
            sequence = self._waiting[0]
            session = sequence.request.session
            if self._active_kv + sequence.kv > self._capacity:
                break
            self._waiting.popleft()
            cached = self._idle.pop(session, 0)
            self._idle_kv -= cached
            cached = max(cached, self._hold(sequence, again=cached > 0))
            sequence.cached = min(cached, sequence.request.prompt_tokens - 1)
            self._active_kv += sequence.kv
            self._evict()
            self._queue_prefill(sequence, sequence.request.prompt_tokens - sequence.cached)
            entered = True
        return entered

    def _evict(self) -> None:
        while self._idle and self._active_kv + self._idle_kv > self._capacity:
            session = next(iter(self._idle))
            cached = self._idle[session]
            lost = min(cached, self._active_kv + self._idle_kv - self._capacity) if self._in_blocks else cached
            self._idle_kv -= lost
            if lost < cached:
                self._idle[session] = cached - lost
            else:
                del self._idle[session]
                self._release(session)

    def _hold(self, sequence: SimSequence, *, again: bool = False) -> int:
        """Tokens that its group has in the cache already; it has them as well from now on. `again`: it had them."""
        group = _group(sequence.request.session)
        tokens, members = self._prefixes.get(group, (0, 0))
        self._prefixes[group] = (tokens or len(sequence.request.prompt[0]), members + (not again))
        return tokens

    def _release(self, session: str) -> None:
        """It is neither in the batch nor idle any more. What a group has goes with its last member."""
        group = _group(session)
        tokens, members = self._prefixes.get(group, (0, 0))
        if members > 1:
            self._prefixes[group] = (tokens, members - 1)
        else:
            self._prefixes.pop(group, None)

    def _queue_prefill(self, sequence: SimSequence, tokens: int) -> None:
        sequence.prefilled += tokens
        sequence.prefill = tokens
        self._num_prefilling += 1
        self._prefilling.append(sequence)

    def _begin_decode(self, sequence: SimSequence) -> None:
        """Its first token, or the first after a swap, came with the step in which it was computed."""
        said = sequence.said
        sequence.target = self._steps + sequence.need - said - 1
        sequence.shift = sequence.request.prompt_tokens + said + 1 - self._steps
        sequence.began_share = self._share_s
        self._shift += sequence.shift
        self._num_decoding += 1
        self._numbers += 1
        heapq.heappush(self._decoding, (sequence.target, self._numbers, sequence))

    def _leave_decode(self, sequence: SimSequence) -> int:
        """Take it out of the batch; returns the tokens it said since it came in."""
        said = min(
            sequence.need - sequence.said, int(sequence.need - (sequence.target - self._steps) + ALMOST) - sequence.said
        )
        self._shift -= sequence.shift
        self._num_decoding -= 1
        if not self._num_decoding:
            self._shift = 0.0
        sequence.busy_s += self._share_s - sequence.began_share
        sequence.target = -1.0
        return said

    def _finish(self, sequence: SimSequence) -> None:
        if sequence.target < 0:
            return  # aborted or restarted; its place in the heap is all that was left
        self._leave_decode(sequence)
        sequence.say(self.version, sequence.need - sequence.said)
        if sequence.slow_s:
            self._slow[sequence.request.id] = sequence
            self._loop.call_later(sequence.slow_s, self._at_last, sequence)
        else:
            self._answer(sequence)

    def _at_last(self, sequence: SimSequence) -> None:
        if not (self.hung or self.dead) and self._slow.pop(sequence.request.id, None) is sequence:
            self._advance()
            self._answer(sequence)
            self._plan()

    def _answer(self, sequence: SimSequence) -> None:
        request = sequence.request
        self._active.pop(request.id, None)
        self._active_kv -= sequence.kv
        if request.last:
            self._release(request.session)
        else:
            self._idle[request.session] = sequence.kv
            self._idle_kv += sequence.kv
            self._evict()
        if not sequence.future.done():
            self.answered += 1
            sequence.future.set_result(
                Completion(
                    tokens=blank_tokens(sequence.need),
                    logprobs=blank_logprobs(sequence.need),
                    spans=tuple(sequence.spans),
                    finish=Finish.LENGTH if sequence.need == request.sampling.max_tokens else Finish.STOP,
                    engine=self.spec.id,
                    prefill_tokens=sequence.prefilled,
                    cached_tokens=sequence.cached,
                    busy_s=sequence.busy_s,
                    prefill_busy_s=sequence.prefill_busy_s,
                    work=self._work.report() if self._world.counts_work else None,
                )
            )

    def _restart_all(self, version: WeightVersion) -> int:
        """New weights: close the spans of the old ones, drop idle caches, prefill in-flight work again."""
        self._advance()
        rebuilt = 0
        decoding = [entry[2] for entry in sorted(self._decoding, key=lambda entry: entry[1]) if entry[2].target >= 0]
        for sequence in decoding:
            sequence.say(self.version, self._leave_decode(sequence))
        self._decoding.clear()
        prefilling = [sequence for pack in self._packs for sequence in pack.sequences]
        for pack in self._packs:
            for sequence, seconds in pack.shares():
                self._book_prefill(sequence, seconds)
        prefilling += self._prefilling
        self._packs.clear()
        self._prefilling.clear()
        self._num_prefilling = 0
        self._prefixes.clear()
        for sequence in decoding + prefilling:
            context = sequence.request.prompt_tokens + sequence.said
            lacking = max(1, context - self._hold(sequence))
            rebuilt += lacking
            self._queue_prefill(sequence, lacking)
        self._idle.clear()
        self._idle_kv = 0
        self.version = version
        return rebuilt


def steps_in(seconds: float, step_s: float, growth_s: float) -> float:
    """Steps done in this many seconds, when one takes `step_s` now and each `growth_s` more than the one before."""
    if growth_s <= 0.0:
        return seconds / step_s
    return 2.0 * seconds / (step_s + math.sqrt(step_s * step_s + 2.0 * growth_s * seconds))


def seconds_of(steps: float, step_s: float, growth_s: float) -> float:
    return steps * (step_s + 0.5 * growth_s * steps)


def _group(session: str) -> str:
    """Of `str(TrajectoryId)`."""
    return session.partition(".")[0]


def _pairs(sequence: SimSequence) -> float:
    """Tokens that the tokens to be computed look at, summed."""
    context = sequence.request.prompt_tokens + sequence.said
    return sequence.prefill * (context - 0.5 * sequence.prefill)


def _spoilt(completion: Completion, way: int) -> Completion:
    """An answer that only a broken engine gives."""
    last = completion.spans[-1]
    match way % 4:
        case 0:
            return replace(completion, logprobs=np.full_like(completion.logprobs, np.nan))
        case 1:
            return replace(completion, logprobs=np.full_like(completion.logprobs, 0.5))
        case 2:
            back = (Span(last.version, last.length - 1), Span(last.version - 1, 1))
            return replace(completion, spans=(*completion.spans[:-1], *back))
        case _:
            return replace(completion, logprobs=completion.logprobs[:-1])

"""A simulated engine: continuous batching as a fluid that is re-planned only at arrivals and finishes.

All decoding sequences advance together, one token a step, so one counter of steps serves them all; prefill is done in
order of arrival, a chunk beside each step. Events are O(requests), whatever the number of tokens. KV memory is
reserved whole when a request enters the batch; idle sessions keep their cache until the room is needed or the
weights change, and a swap makes every in-flight request prefill again.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from rollart.config.sim import SimEngineSettings, SimTaskSettings
from rollart.errors import EngineError, RequestError, WeightError
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.hardware import Disaggregated, Hardware, ModelShape, decode_step_s, kv_capacity_tokens, prefill_s_per_token
from rollart.sim.dice import Dice
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink, SimStore
from rollart.types import (
    Completion,
    EngineSpec,
    Finish,
    GenerateRequest,
    Logprobs,
    Span,
    SwapReport,
    Tokens,
    WeightManifest,
    WeightVersion,
)

_ZERO_TOKENS: Tokens = np.zeros(1 << 20, dtype=np.int32)
_ZERO_LOGPROBS: Logprobs = np.zeros(1 << 20, dtype=np.float32)
ALMOST = 1e-6
"""Tokens closer to done than this are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorld:
    """What all simulated engines share."""

    model: ModelShape
    hardware: Mapping[str, Hardware]
    settings: SimEngineSettings
    max_batch: Mapping[str, int]
    """By pool."""
    disaggregated: Mapping[str, Disaggregated]
    """By pool, where its engines have prefill and decode on workers of their own."""
    tasks: Mapping[str, SimTaskSettings]
    dice: Dice
    store: SimStore
    pull: SimLink
    log: EventLog
    faults: Faults


@dataclass(slots=True, eq=False)
class SimSequence:
    """One request in the engine."""

    request: GenerateRequest
    need: int
    """Tokens it will say."""
    kv: int
    future: "asyncio.Future[Completion]"
    cached: int = 0
    prefill: float = 0.0
    """Tokens that are still to be computed before it decodes."""
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

    @property
    def said(self) -> int:
        """Tokens whose version is settled: those before the last swap."""
        return sum(span.length for span in self.spans)


class SimEngine:
    def __init__(self, spec: EngineSpec, world: EngineWorld, died: Callable[[str], object]) -> None:
        self.spec = spec
        self._world = world
        self._died = died
        hardware = world.hardware[spec.pool]
        self._hardware = hardware
        self._measured = world.settings.measured.get(spec.pool)
        self._prefill_s = (
            self._measured.prefill_token_s
            if self._measured is not None
            else prefill_s_per_token(world.model, hardware, spec.gpus)
        )
        self._overhead_tokens = world.settings.overhead_s / self._prefill_s
        self._longest = self._capacity = kv_capacity_tokens(world.model, hardware, spec.gpus)
        """KV tokens that one request, and all of them, can have."""
        self._prefill_workers = 1
        self._gpus = self._loading_gpus = spec.gpus
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
        self._staged_s: dict[WeightVersion, float] = {}
        self._staging: asyncio.Future[None] | None = None
        self._waiting: deque[SimSequence] = deque()
        self._prefilling: deque[SimSequence] = deque()
        self._decoding: list[tuple[float, int, SimSequence]] = []
        self._num_decoding = 0
        self._active: dict[str, SimSequence] = {}
        self._idle: dict[str, int] = {}
        """Cached tokens of sessions between turns, least recently used first."""
        self._idle_kv = 0
        self._active_kv = 0
        self._at_s = self._loop.time()
        self._steps = 0.0
        self._share_s = 0.0
        """Seconds of decode that each sequence in the batch has used since the engine began."""
        self._shift = 0.0
        """Sum of `shift` over decoding sequences: their context is this plus their number times the steps."""
        self._step_rate = 0.0
        self._prefill_rate = 0.0
        self._decode_part = 0.0
        self._numbers = 0
        self._computed = 0.0
        """Tokens, since it was started."""
        self._slow: dict[str, SimSequence] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    # --- the port -------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        await self._alive()
        world = self._world
        if world.settings.call_s:
            await asyncio.sleep(world.settings.call_s)
            await self._alive()
        task = world.tasks[request.domain].at(self._loop.time())
        need = min(request.sampling.max_tokens, world.dice.count(task.answer_tokens, f"{request.id}/answer"))
        if request.prompt_tokens + need > self._longest:
            raise RequestError(f"prompt of {request.prompt_tokens} tokens does not fit in {self._longest} of KV memory")
        sequence = SimSequence(request, need, request.prompt_tokens + need, self._loop.create_future())
        self._active[request.id] = sequence
        self._waiting.append(sequence)
        self._advance()
        self._plan()
        completion = await sequence.future
        fault = world.faults.take("bad_answer", request.id)
        return completion if fault is None else _spoilt(completion, fault.target)

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
            if not self._slow.pop(request_id, None):
                self._drop(sequence)
        self._plan()

    async def stage(self, version: WeightVersion) -> None:
        await self._alive()
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
            await asyncio.sleep(manifest.num_bytes / (world.settings.load_gb_s * 1e9 * self._loading_gpus))
            await self._alive()
            rebuilt = self._restart_all(manifest.version)
        finally:
            self._advance()
            self._paused = False
            self._plan()
        self._staged_s = {version: at_s for version, at_s in self._staged_s.items() if version > manifest.version}
        world.log.emit(schema.Loaded(engine=self.spec.id, version=manifest.version, of=sorted(set(versions))))
        return SwapReport(version=manifest.version, pull_s=pull_s, rebuilt_tokens=rebuilt)

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
        """Bring the counters to now, at the rates planned last."""
        now_s = self._loop.time()
        passed_s = now_s - self._at_s
        self._at_s = now_s
        if passed_s <= 0:
            return
        self._computed += (self._step_rate + self._prefill_rate + len(self._slow)) * passed_s
        if self._step_rate:
            self._steps += self._step_rate * passed_s
            self._share_s += passed_s * self._decode_part / self._num_decoding
        if self._prefill_rate:
            for sequence in islice(self._prefilling, self._prefill_workers):
                sequence.prefill -= self._prefill_rate * passed_s

    def _plan(self) -> None:
        """Move what is done, fill the batch, set the rates, and look again when the next thing is done."""
        if self.hung or self.dead:
            return
        self._step_rate = self._prefill_rate = 0.0
        if self._paused:
            self._cancel_timer()
            return
        while True:
            while (next_one := self._next_prefilled()) is not None and next_one.prefill <= ALMOST:
                self._prefilling.remove(next_one)
                self._prefilled(next_one)
            while self._decoding and self._decoding[0][0] <= self._steps + ALMOST:
                self._finish(heapq.heappop(self._decoding)[2])
            if not self._admit():
                break
            next_one = self._next_prefilled()
            if next_one is None or next_one.prefill > ALMOST:
                break
        batch = self._num_decoding
        if self._measured is not None and next_one is not None:
            batch = 0  # what prefill costs was measured as seconds by which a step takes longer for all
        decode_s = chunk_s = 0.0
        if batch:
            decode_s = self._decode_s(batch, self._shift + batch * self._steps)
        if next_one is not None:
            chunk = min(float(self._world.settings.chunk_tokens), max(1.0, next_one.prefill))
            chunk_s = chunk * self._prefill_s
        step_s, prefill_s = self._cycles(decode_s, chunk_s)
        when_s = self._moved_s()
        if next_one is not None:
            self._prefill_rate = chunk / prefill_s
            when_s = min(when_s, self._at_s + next_one.prefill / self._prefill_rate)
        if batch:
            self._step_rate = 1.0 / step_s
            self._decode_part = decode_s / step_s
            while self._decoding[0][2].target < 0:
                heapq.heappop(self._decoding)
            when_s = min(when_s, self._at_s + (self._decoding[0][0] - self._steps) * step_s)
        if when_s == math.inf:
            self._cancel_timer()
        else:
            self._look_at(when_s)

    # --- what is different where prefill and decode are apart -------------------------------------------------

    def _next_prefilled(self) -> SimSequence | None:
        """Of those that are being prefilled, the one that is done first."""
        return self._prefilling[0] if self._prefilling else None

    def _cycles(self, decode_s: float, chunk_s: float) -> tuple[float, float]:
        """Seconds from one decode step to the next, and from one chunk of prefill to the next: they take turns."""
        return decode_s + chunk_s, decode_s + chunk_s

    def _prefilled(self, sequence: SimSequence) -> None:
        self._begin_decode(sequence)

    def _moved_s(self) -> float:
        """When the next sequence arrives here from elsewhere."""
        return math.inf

    def _drop(self, sequence: SimSequence) -> None:
        """Take out an aborted sequence."""
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        elif sequence.target >= 0:
            self._leave_decode(sequence)

    @property
    def _in_batch(self) -> int:
        return len(self._prefilling) + self._num_decoding

    def _decode_s(self, batch: float, context: float) -> float:
        measured = self._measured
        if measured is not None:
            context += batch * max(0.0, self._decoding[0][0] - self._steps) / 2  # the mean until the next one is done
            return measured.step_s + measured.sequence_s * batch + measured.kv_token_s * context
        return decode_step_s(self._world.model, self._hardware, self._gpus, batch, context)

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
            sequence.cached = min(cached, sequence.request.prompt_tokens)
            self._active_kv += sequence.kv
            self._evict()
            self._queue_prefill(sequence, sequence.request.prompt_tokens - sequence.cached)
            entered = True
        return entered

    def _evict(self) -> None:
        while self._idle and self._active_kv + self._idle_kv > self._capacity:
            session = next(iter(self._idle))
            self._idle_kv -= self._idle.pop(session)

    def _queue_prefill(self, sequence: SimSequence, tokens: int) -> None:
        sequence.prefilled += tokens
        sequence.prefill = tokens + self._overhead_tokens
        sequence.busy_s += sequence.prefill * self._prefill_s
        self._prefilling.append(sequence)

    def _begin_decode(self, sequence: SimSequence) -> None:
        said = sequence.said
        sequence.target = self._steps + sequence.need - said
        sequence.shift = sequence.request.prompt_tokens + said - self._steps
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
        rest = sequence.need - sequence.said
        if rest:
            sequence.spans.append(Span(self.version, rest))
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
        if not request.last:
            self._idle[request.session] = sequence.kv
            self._idle_kv += sequence.kv
            self._evict()
        if not sequence.future.done():
            self.answered += 1
            sequence.future.set_result(
                Completion(
                    tokens=_ZERO_TOKENS[: sequence.need],
                    logprobs=_ZERO_LOGPROBS[: sequence.need],
                    spans=tuple(sequence.spans),
                    finish=Finish.LENGTH if sequence.need == request.sampling.max_tokens else Finish.STOP,
                    engine=self.spec.id,
                    prefill_tokens=sequence.prefilled,
                    cached_tokens=sequence.cached,
                    busy_s=sequence.busy_s,
                    prefill_busy_s=sequence.prefill_busy_s,
                )
            )

    def _restart_all(self, version: WeightVersion) -> int:
        """New weights: close the spans of the old ones, drop idle caches, prefill in-flight work again."""
        self._advance()
        rebuilt = 0
        decoding = [entry[2] for entry in sorted(self._decoding, key=lambda entry: entry[1]) if entry[2].target >= 0]
        for sequence in decoding:
            said = self._leave_decode(sequence)
            if said:
                sequence.spans.append(Span(self.version, said))
        self._decoding.clear()
        prefilling = list(self._prefilling)
        self._prefilling.clear()
        for sequence in decoding + prefilling:
            context = sequence.request.prompt_tokens + sequence.said
            rebuilt += context
            self._queue_prefill(sequence, context)
        self._idle.clear()
        self._idle_kv = 0
        self.version = version
        return rebuilt


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

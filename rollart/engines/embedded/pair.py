"""Prefill and decode apart: two embedded engines, each a process, on two parts of one device, as one `Engine`.

The prefill side (`handover.py`) computes a prompt; this side maps its cache and copies from it, within the device, the
pages that it has not itself, and goes on token by token. All of the prompt but its last token is handed over: that one
is decoded here, so sampling, log-probabilities, version spans and stop strings are this engine's alone, and what it
cannot take over, it computes itself. That is what happens to a prompt that was computed under other weights (a swap
came in between), to one for which there is no room, and to what is in flight when weights change.

Both sides keep a session's cache, each of what it has seen: the prefill side computes the answers of a session anew,
as it has only their tokens. Weights are made ready on both sides before they are put in on either, so a version that is
not whole changes neither. Where one side is lost, so is the engine: whoever asks hears EngineError.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import replace

from rollart.engines.embedded.handover import Lent, cache_of
from rollart.engines.embedded.threaded import ThreadedEngine
from rollart.errors import BoundaryError, EngineError, RequestError, WeightError
from rollart.model.mapped import MemoryPlace
from rollart.types import (
    Completion,
    EngineWork,
    Finish,
    GenerateRequest,
    StepSums,
    SwapReport,
    WeightManifest,
    WeightVersion,
)


class PrefillWorker(Protocol):
    """The other process, which has a `PrefillSide`."""

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any: ...

    async def stop(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class HandOvers:
    """Counters since the start."""

    prompts: int = 0
    """Of which all but the last token was taken over, copied or here already."""
    dropped: int = 0
    """Computed in vain: other weights, or no room."""
    copied_bytes: int = 0
    copy_s: float = 0.0
    """Of the device, in copying."""


@dataclass(slots=True)
class _Call:
    """A request."""

    number: int
    before: bool = True
    """It does not decode yet."""
    aborted: bool = False
    """Before it decoded."""
    place: "asyncio.Task[bool] | None" = None


class PairedEngine:
    """`engine` decodes. Start and close it on the event loop that uses it."""

    def __init__(self, engine: ThreadedEngine, prefill: PrefillWorker, cache: MemoryPlace, *, max_batch: int) -> None:
        """`cache`: the prefill side's. `max_batch`: of requests that decode."""
        self.engine = engine
        self._prefill = prefill
        self._memory = cache_of(engine)
        self._theirs = self._memory.opened(cache)
        self._calls: dict[str, _Call] = {}
        self._count = 0
        self._places = asyncio.Semaphore(max_batch)
        """To decode. Prompts without one stay where they are: here they would drive each other out of the cache."""
        self._lost: EngineError | None = None
        self._work: EngineWork | None = None
        """What the prefill side has done, as it said last."""
        self._loop = asyncio.get_running_loop()
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="rollart-handover")
        """Waits for copies, which end in order."""
        self._beside: set[asyncio.Task[None]] = set()
        self.handed = HandOvers()

    # --- the port

    async def generate(self, request: GenerateRequest) -> Completion:
        self._refuse()
        if request.id in self._calls:
            raise EngineError(f"request {request.id} is already in flight")
        self._count += 1
        call = self._calls[request.id] = _Call(self._count)
        lent, placed = None, False
        try:
            lent = await self._prefilled(call, request)
            placed = not call.aborted and await self._placed(call)
            if call.aborted:
                return _nothing(self.engine.core.engine_id)
            call.before = False
            return await self._decoded(request, lent)
        finally:
            del self._calls[request.id]
            if placed:
                self._places.release()
            if call.before:
                self._give_back(lent)

    async def abort(self, request_id: str) -> int:
        self._refuse()
        call, number = self._calls.get(request_id), 0
        if call is not None and call.before:
            call.aborted, number = True, call.number
            if call.place is not None:
                call.place.cancel()
        here = await self.engine.abort(request_id)
        there: int = await self._ask("abort", number)
        return here + there

    async def stage(self, version: WeightVersion) -> None:
        self._refuse()
        await asyncio.gather(self.engine.stage(version), self._ask("stage", version))

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        self._refuse()
        await asyncio.gather(self.engine.prepare(manifest), self._ask("prepare", manifest))
        here, there = await self._both(manifest)
        pulled = here.pulled._replace(
            seconds=max(here.pulled.seconds, there.pulled.seconds), bytes=here.pulled.bytes + there.pulled.bytes
        )
        return replaced(here, pulled=pulled, rebuilt_tokens=here.rebuilt_tokens + there.rebuilt_tokens)

    async def _both(self, manifest: WeightManifest) -> tuple[SwapReport, SwapReport]:
        """Put in what is ready, on both sides at once."""
        asked: list[Awaitable[SwapReport]] = [self.engine.swap(manifest), self._ask("swap", manifest)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        failed = [one for one in done if isinstance(one, BaseException)]
        if len(failed) == 1 and isinstance(failed[0], WeightError):
            self._lost = EngineError(f"only one side of the pair took version {manifest.version}: {failed[0]}")
            raise self._lost
        if failed:
            raise next((one for one in failed if isinstance(one, EngineError)), failed[0])
        here, there = [one for one in done if isinstance(one, SwapReport)]
        return here, there

    async def close(self) -> None:
        self._lost = self._lost or EngineError("the engine was closed")
        await self.engine.close()
        self._copies.shutdown(wait=True)
        for task in list(self._beside):
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        await self._prefill.stop()

    # --- one request

    async def _prefilled(self, call: _Call, request: GenerateRequest) -> Lent | None:
        """None where the decode side is to compute it, or to say what is wrong with it."""
        if request.prompt_tokens < 2:
            return None
        whole = replace(request, prompt=(request.tokens(),))
        asked = asyncio.ensure_future(self._ask("compute", call.number, whole))
        try:
            lent: Lent = await asyncio.shield(asked)
        except RequestError:
            return None
        except asyncio.CancelledError:
            self._do_beside(self._given_up(call.number, asked))
            raise
        self._work = lent.work or self._work
        return lent

    async def _placed(self, call: _Call) -> bool:
        """Wait for a place. False where it was aborted instead."""
        place = call.place = asyncio.ensure_future(self._places.acquire())
        try:
            await asyncio.wait([place])
        except asyncio.CancelledError:
            if not place.cancel() and not place.cancelled():
                self._places.release()
            raise
        return not place.cancelled()

    async def _given_up(self, number: int, asked: "asyncio.Future[Lent]") -> None:
        """Nobody waits for it any more, so nobody should compute it."""
        await self._ask("abort", number)
        self._give_back(await asked)

    async def _decoded(self, request: GenerateRequest, lent: Lent | None) -> Completion:
        if lent is None:
            return await self.engine.generate(request)
        taken = False

        def added() -> None:
            nonlocal taken
            taken = self._take_over(request, lent)

        done = await self.engine.generate(request, added)
        return replace(
            done,
            prefill_tokens=lent.computed_tokens + done.prefill_tokens,
            cached_tokens=lent.cached_tokens if taken else done.cached_tokens,
            prefill_busy_s=lent.busy_s,
            work=done.work and _with(done.work, self._work),
        )

    def _take_over(self, request: GenerateRequest, lent: Lent) -> bool:
        """In the engine's thread, between two steps: copy what this side has not. Whether it has all then."""
        core, device = self.engine.core, self._theirs.device
        seq = core.live.get(request.id)  # None: it was refused
        assert seq is None or seq.request is request
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if stream is not None else []
        began_s, pages = time.perf_counter(), 0
        if seq is not None and lent.pages and lent.version == core.version:
            if events:
                events[0].record(stream)
            with torch.inference_mode():
                pages = self._memory.take_over(seq, self._theirs, lent.pages)
            if events:
                events[1].record(stream)
        took_s = time.perf_counter() - began_s
        taken = seq is not None and seq.given
        self.handed.prompts += taken
        self.handed.dropped += not taken
        self.handed.copied_bytes += pages * self._memory.page_bytes

        def copied() -> None:
            if pages and events:
                events[1].synchronize()
                self.handed.copy_s += events[0].elapsed_time(events[1]) / 1e3
            elif pages:
                self.handed.copy_s += took_s
            with contextlib.suppress(RuntimeError):  # a loop that is gone gives nothing back
                self._loop.call_soon_threadsafe(self._give_back, lent)

        self._copies.submit(copied)
        return taken

    # --- the other side

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._prefill.call(EngineError, method, *arguments)
        except EngineError as error:
            self._lost = self._lost or EngineError(f"the prefill side: {error}")
            raise self._lost from error

    def _give_back(self, lent: Lent | None) -> None:
        if lent is not None:
            self._do_beside(self._ask("give_back", lent.number))

    def _do_beside(self, work: Coroutine[Any, Any, None]) -> None:
        async def done() -> None:
            with contextlib.suppress(BoundaryError):  # whoever asks next hears it
                await work

        task = asyncio.ensure_future(done())
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _refuse(self) -> None:
        if self._lost is not None:
            raise self._lost


def _with(decode: EngineWork, prefill: EngineWork | None) -> EngineWork:
    """Prompts that were computed on both sides, as one engine's."""
    if prefill is None:
        return decode
    both = StepSums(*(here + there for here, there in zip(decode.prefill, prefill.prefill, strict=True)))
    return decode._replace(prefill=both)


def _nothing(engine_id: str) -> Completion:
    return Completion(
        tokens=np.zeros(0, dtype=np.int32),
        logprobs=np.zeros(0, dtype=np.float32),
        spans=(),
        finish=Finish.ABORT,
        engine=engine_id,
    )

"""The asyncio face of the embedded engine: `rollart.ports.Engine` over one thread that steps the core.

The thread owns the core. Calls reach it as closures through a queue, which it empties between two steps, so adding,
aborting and swapping never meet a step half done; answers go back to the caller's event loop. Weights are fetched and
made ready beside the running steps, in a thread of their own, as soon as a version is staged; the swap puts them in
between two steps. One version at most is ready; what a swap replaced is freed after it.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rollart.engines.embedded.backend import Ready
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.errors import BoundaryError, EngineError, WeightError, boundary
from rollart.model.network import stay_on
from rollart.types import Completion, GenerateRequest, Pulled, SwapReport, WeightManifest, WeightVersion

Fetch = Callable[[WeightManifest], Mapping[str, Tensor]]
"""Gets a version's tensors, by name, from wherever the manifest says they are. Raises WeightError."""
Stage = Callable[[WeightVersion], "Future[WeightManifest | None]"]
"""Begins to fetch a coming version, and returns at once. Done when it is here, with its manifest; None where it is not
whole, or not awaited any more."""
Pulls = Callable[[WeightVersion], Pulled]
"""What went into fetching a version before its swap."""

Result = TypeVar("Result")


class Made(NamedTuple):
    """A version that is ready."""

    manifest: WeightManifest
    ready: Ready
    took_s: float
    """To fetch it, and to make it ready."""


class ThreadedEngine:
    """Runs an `EmbeddedEngine` in a thread of its own. Start and close it on the event loop that uses it."""

    def __init__(
        self,
        core: EmbeddedEngine,
        *,
        fetch: Fetch,
        stage: Stage | None = None,
        pulled: Pulls | None = None,
        adopt: bool = False,
    ) -> None:
        """`adopt`: what is fetched may be served from where it is."""
        self.core = core
        self.fetch = fetch
        self._stage = stage
        self._pulled = pulled
        self._adopt = adopt
        self.made: Made | None = None
        """The version that is ready to be put in."""
        self._making = asyncio.Lock()
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="rollart-ready")
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, asyncio.Future[Completion]] = {}
        self._pending: set[asyncio.Future[Any]] = set()
        """Other calls. Both are touched on the event loop only."""
        self._failure: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="rollart-engine", daemon=True)
        self._thread.start()

    # --- the port

    async def generate(self, request: GenerateRequest, added: Callable[[], None] | None = None) -> Completion:
        """`added` is called in the engine's thread when the request was taken, before its first step, or refused."""
        if self._failure is not None:
            raise self._failure
        if request.id in self._requests:
            raise EngineError(f"request {request.id} is already in flight")
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._requests[request.id] = future

        def add() -> None:
            try:
                self.core.add(request)
            except BoundaryError as error:
                self._answer(_settle, future, error)
            if added is not None:
                added()

        self._calls.put(add)
        try:
            return await future
        except asyncio.CancelledError:
            # Nobody waits for it any more, so nobody should compute it.
            self._calls.put(lambda: self.core.abort(request.id))
            raise
        finally:
            self._requests.pop(request.id, None)

    async def abort(self, request_id: str) -> int:
        if self._failure is not None:
            raise self._failure
        self._calls.put(lambda: self.core.abort(request_id))
        return self.core.stats.steps

    async def stage(self, version: WeightVersion) -> None:
        if self._stage is not None:
            with boundary(WeightError, "engine.stage"):
                whole = await asyncio.wrap_future(self._stage(version))
                if whole is not None:
                    with contextlib.suppress(WeightError):  # what is wrong with it is the swap's to find
                        await self._ready_of(whole)

    async def prepare(self, manifest: WeightManifest) -> None:
        """A swap to it has only to put it in. Raises WeightError."""
        with boundary(WeightError, "engine.prepare"):
            await self._ready_of(manifest)

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        with boundary(WeightError, "engine.swap"):
            made = await self._ready_of(manifest)
        self.made = None
        report = await self.call(lambda: self._put_in(made))
        came = self._pulled(manifest.version) if self._pulled is not None else Pulled()
        return replace(report, pulled=came._replace(seconds=made.took_s + came.seconds))

    async def _ready_of(self, manifest: WeightManifest) -> Made:
        """These weights, ready: those that were made so when they were staged, if they are the same."""
        async with self._making:
            if self.made is None or self.made.manifest != manifest:
                self.made = None
                self.made = await self._loop.run_in_executor(self._maker, self._make, manifest)
            return self.made

    def _make(self, manifest: WeightManifest) -> Made:
        """In the thread for that."""
        began_s = time.perf_counter()
        ready = self.core.prepare(self.fetch(manifest), adopt=self._adopt)
        return Made(manifest, ready, time.perf_counter() - began_s)

    def _put_in(self, made: Made) -> SwapReport:
        """In the engine's thread. To free what was replaced takes time: nobody waits for it."""
        try:
            return self.core.put_in(made.manifest.version, made.ready)
        finally:
            self._maker.submit(made.ready.let_go)

    async def close(self) -> None:
        """Stop the thread after the step it is in; whoever still waits gets an EngineError."""
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)
        self.made = None
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._fail(EngineError("the engine was closed"))

    # --- between event loop and thread

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function of the core between two steps."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[Result] = self._loop.create_future()

        def call() -> None:
            try:
                result = function()
            except BoundaryError as error:
                self._answer(_settle, future, error)
            else:
                self._answer(_settle, future, result)

        self._pending.add(future)
        self._calls.put(call)
        try:
            return await future
        finally:
            self._pending.discard(future)

    def _answer(self, function: Callable[..., None], *arguments: object) -> None:
        """Run a function on the event loop; a loop that is gone waits for nothing."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _settle_all(self, outcomes: list[tuple[str, Completion]]) -> None:
        for request_id, outcome in outcomes:
            if request_id in self._requests:
                _settle(self._requests[request_id], outcome)

    def _fail(self, error: EngineError) -> None:
        """The thread is gone: now and later, whoever asks hears why."""
        self._failure = self._failure or error
        for future in [*self._requests.values(), *self._pending]:
            _settle(future, self._failure)

    # --- the thread

    def _run(self) -> None:
        try:
            stay_on(self.core.device)
            while self._take_calls():
                ended = self.core.step()
                if ended:
                    self._answer(self._settle_all, ended)
        except Exception as error:  # the boundary of the thread: whatever it is, those who wait hear it
            self._answer(self._fail, EngineError(f"the engine's thread died: {type(error).__name__}: {error}"))

    def _take_calls(self) -> bool:
        """Do what was asked since the last step; waits while there is nothing to step. False when it is over."""
        while True:
            try:
                call = self._calls.get(block=self.core.stalled or not self.core.busy)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            self.core.stalled = False


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    if future.done():
        return
    if isinstance(outcome, BoundaryError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

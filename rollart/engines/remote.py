"""`rollart.ports.Engine` over an inference server: what vLLM and SGLang have in common.

A completion is made of segments, each sampled under one version. A swap cuts the segments in flight short, keeping the
tokens they have, lets the server load the new weights from their folder, has it prove that it serves them, and sends
prompt + tokens again. So spans are true: no segment ever runs over a swap.

Invariants: nothing is in flight in the server while its weights change; after a swap its log-probabilities of the
manifest's probe are the trainer's; a swap that fails leaves the version before it serving, or the engine lost.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollart.engines.embedded.segments import EngineSeconds, Piece, RequestProgress, Segment, segment_seed, wrong_in
from rollart.engines.proof import PRECISIONS, Proven, judge
from rollart.engines.stops import StopFinder
from rollart.errors import AnswerError, BoundaryError, EngineError, RequestError, WeightError, boundary
from rollart.types import (
    Completion,
    Finish,
    GenerateRequest,
    Probe,
    SwapReport,
    WeightManifest,
    WeightVersion,
)

QUIET_S = 0.1
"""What a halted server has not ended by then, and has sent no token of, it does not know yet."""
GRACE_S = 2.0
"""A segment that a halted server has not ended by then is cut off from here; what it has stays."""


class Server(Protocol):
    """One server's own interface. Raises EngineError where the server is lost."""

    def stream(self, segment: Segment) -> AsyncGenerator[Piece, None]:
        """Closing it aborts the segment. Raises RequestError for what cannot be served."""

    async def abort(self, segment_id: str) -> None: ...

    async def halt(self) -> None:
        """End everything in flight with what it has, and start nothing until `resume`."""

    async def resume(self) -> None: ...

    async def load(self, folder: Path, version: WeightVersion) -> None:
        """Take the weights of this Hugging Face directory, and forget every cache. Raises WeightError."""

    async def score(self, tokens: list[int]) -> list[list[float]]:
        """Log-probability of each token but the first, temperature 1: a row from each process behind it."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """What an engine must know of the model that its server serves."""

    engine_id: str
    model: Path
    """The initial weights."""
    max_context: int
    vocab_size: int
    eos: frozenset[int]
    dtype: str = "float32"


class RemoteEngine:
    """One server as an engine. `fetch` checks a version's digests; `folder` says where its files are."""

    def __init__(
        self,
        server: Server,
        settings: RemoteSettings,
        *,
        fetch: Callable[[WeightManifest], object],
        folder: Callable[[WeightVersion], Path],
        stops: StopFinder | None = None,
    ) -> None:
        self._server = server
        self._settings = settings
        self._id = settings.engine_id
        self._fetch = fetch
        self._folder = folder
        self._stops = stops
        self._eos = tuple(sorted(settings.eos))
        self.version: WeightVersion = 0
        self._loaded = settings.model
        self._probe: Probe | None = None
        """Of the version served; None while that is the initial one."""
        self._proven: list[Proven | None] = []
        """What is known of each process behind the server since the last swap."""
        self._calls: dict[str, RequestProgress] = {}
        self._open = asyncio.Event()
        """Closed while weights change: no segment starts."""
        self._open.set()
        self._swapping = asyncio.Lock()
        self._share = EngineSeconds()
        self._pieces = 0
        """Received from the server since the start: a server that computes sends some."""
        self._failure: EngineError | None = None

    # --- the port

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check(request)
        call = self._calls[request.id] = RequestProgress(request=request, prompt=request.tokens().tolist())
        try:
            while True:
                while not self._open.is_set():  # another swap may begin between its opening and our turn
                    await self._open.wait()
                if self._failure is not None:
                    raise self._failure
                finish = Finish.ABORT if call.aborted else await self._segment(call)
                if finish is not None:
                    return call.completion(finish, self._id)
        finally:
            del self._calls[request.id]

    async def abort(self, request_id: str) -> int:
        call = self._calls.get(request_id)
        if call is not None:
            call.aborted = True
            if call.task is not None:
                call.task.cancel()
                await self._server.abort(call.segment_id)
        if self._failure is not None:
            raise self._failure
        return self._pieces

    async def stage(self, version: WeightVersion) -> None:
        """The server reads the files itself when it swaps; there is nothing to fetch ahead."""

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        async with self._swapping:
            started = time.perf_counter()
            if manifest.probe is None:
                raise WeightError(
                    f"{self._id}: version {manifest.version} came without a probe, so nothing can show that the server "
                    "serves it; publish it with one (`rollart.model.network.probe`)"
                )
            with boundary(WeightError, f"{self._id} swap to {manifest.version}"):
                await asyncio.to_thread(self._fetch, manifest)
            pull_s = time.perf_counter() - started
            self._open.clear()
            try:
                rebuilt = await self._halt()
                await self._change(manifest, manifest.probe)
            except EngineError as error:
                self._failure = error
                raise
            finally:
                self._open.set()
        return SwapReport(version=manifest.version, pull_s=pull_s, rebuilt_tokens=rebuilt)

    async def close(self) -> None:
        self._failure = self._failure or EngineError(f"{self._id}: the engine was closed")
        for call in self._calls.values():
            if call.task is not None:
                call.task.cancel()
        await self._server.close()

    # --- segments

    def _check(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        if self._failure is not None:
            raise self._failure
        if request.id in self._calls:
            raise EngineError(f"{self._id}: request {request.id} is already in flight")
        if self.version < request.min_version:
            raise EngineError(
                f"{self._id}: request {request.id} needs weights of version {request.min_version} or newer, "
                f"this engine serves {self.version}"
            )
        if not 0 < request.prompt_tokens < self._settings.max_context:
            raise RequestError(
                f"{self._id}: a prompt of {request.prompt_tokens} tokens cannot fit: prompt and answer together have "
                f"{self._settings.max_context} tokens"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0.0 or not 0.0 < sampling.top_p <= 1.0:
            raise RequestError(f"{self._id}: request {request.id} cannot be sampled with {sampling}")
        if sampling.stop and self._stops is None:
            raise RequestError(f"{self._id}: stop strings need a tokenizer, this engine has none")
        tokens = request.tokens()
        if len(tokens) != request.prompt_tokens or tokens.min() < 0 or tokens.max() >= self._settings.vocab_size:
            raise RequestError(f"{self._id}: the prompt of {request.id} is not {request.prompt_tokens} valid token ids")

    async def _segment(self, call: RequestProgress) -> Finish | None:
        """Sample under the present version; None where a swap cut it short and the rest is to come."""
        sampling = call.request.sampling
        limit = min(len(call.prompt) + sampling.max_tokens, self._settings.max_context)
        segment = Segment(
            id=call.next_id(),
            prompt=[*call.prompt, *call.tokens],
            max_tokens=limit - len(call.prompt) - len(call.tokens),
            sampling=sampling,
            seed=None if sampling.seed is None else segment_seed(sampling.seed, call.segment_id),
            eos=self._eos,
            version=self.version,
        )
        call.cut = False
        entered = self._share.enter()
        task = call.task = asyncio.create_task(self._read(call, segment))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()  # nobody waits for it any more, so nobody should compute it
            await asyncio.wait([task])
            raise
        finally:
            call.task = None
            call.busy_s += self._share.leave(entered)
            call.close_span(segment.version)
        if not task.cancelled():
            finish = task.result()
            if finish is not None and finish is not Finish.ABORT:
                return finish
        if call.aborted:
            return Finish.ABORT
        if not call.cut:
            raise EngineError(f"{self._id}: the server ended request {call.request.id} by itself")
        return None

    async def _read(self, call: RequestProgress, segment: Segment) -> Finish | None:
        """Take what the server streams, until it or a stop string ends it."""
        finish: Finish | None = None
        cached = 0
        try:
            async with contextlib.aclosing(self._server.stream(segment)) as pieces:
                async for piece in pieces:
                    self._pieces += 1
                    cached = cached if piece.cached_tokens is None else piece.cached_tokens
                    if wrong := wrong_in(piece, self._settings.vocab_size):
                        raise AnswerError(f"{self._id}: the server sent {wrong} in request {call.request.id}")
                    for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
                        call.tokens.append(token)
                        call.logprobs.append(logprob)
                        if self._stopped(call):
                            return Finish.STOP
                    finish = finish or piece.finish
            return finish
        finally:
            call.cached_tokens += cached
            call.prefill_tokens += len(segment.prompt) - cached

    def _stopped(self, call: RequestProgress) -> bool:
        """Found here and not by the server: a stop string may begin in one segment and end in the next."""
        stop = call.request.sampling.stop
        return bool(stop) and self._stops is not None and self._stops.ends(call.tokens, stop)

    # --- weights

    async def _halt(self) -> int:
        """End all segments; returns how many tokens must be computed again for them."""
        running = [call for call in self._calls.values() if call.task is not None]
        tasks = [call.task for call in running if call.task is not None]
        for call in running:
            call.cut = True
        await self._server.halt()
        if tasks:
            await asyncio.wait(tasks, timeout=QUIET_S)
            for call in running:
                if call.task is not None and not call.unspanned:
                    call.task.cancel()  # it came after the halt, and waits in the server: nothing is lost with it
            _, late = await asyncio.wait(tasks, timeout=GRACE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        return sum(len(call.prompt) + len(call.tokens) for call in running if call.request.id in self._calls)

    async def _change(self, manifest: WeightManifest, probe: Probe) -> None:
        folder = self._folder(manifest.version)
        try:
            await self._server.load(folder, manifest.version)
            await self._server.resume()
            self._proven = await self._prove(manifest.version, probe)
        except (WeightError, RequestError) as error:
            await self._go_back(str(error))
            raise WeightError(str(error)) from error
        self.version, self._loaded, self._probe = manifest.version, folder, probe

    async def _go_back(self, reason: str) -> None:
        """Serve what was served before. Raises EngineError where that is not to be had."""
        try:
            await self._server.load(self._loaded, self.version)
            await self._server.resume()
            if self._probe is not None:
                await self._prove(self.version, self._probe)
        except BoundaryError as error:
            raise EngineError(
                f"{self._id}: neither new weights ({reason}) nor those of version {self.version} could be loaded: "
                f"{error}"
            ) from error

    async def _prove(self, version: WeightVersion, probe: Probe) -> "list[Proven | None]":
        """The server's log-probabilities of the probe must be those that the trainer computed, and move as they do."""
        parts = await asyncio.gather(*(self._server.score(tokens) for tokens in probe.sequences()))
        answers = [[value for part in parts for value in part[process]] for process in range(len(parts[0]))]
        before = self._proven or [None] * len(answers)
        return [self._judged(version, probe, *pair) for pair in zip(answers, before, strict=True)]

    def _judged(self, version: WeightVersion, probe: Probe, answer: list[float], before: Proven | None) -> Proven:
        precision = PRECISIONS[self._settings.dtype]
        verdict = judge(version, answer, probe.logprobs, before, precision)
        if verdict.wrong:
            raise WeightError(
                f"{self._id}: loaded version {version}, but its log-probabilities are {verdict.off:.3g} from the "
                f"trainer's (root mean square; allowed: {precision.limit:g}), so it does not serve these weights. "
                "Servers are known to reload some kinds of model wrongly, such as tied embeddings and mixtures of "
                "experts: use another kind, or embedded engines"
            )
        if verdict.stuck:
            raise EngineError(
                f"{self._id}: asked to load version {version}, it does not follow: since version "
                f"{verdict.state.sure} its log-probabilities have not moved as the trainer's did, so what it samples "
                "is of older weights than it says"
            )
        return verdict.state

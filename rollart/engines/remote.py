"""`rollart.ports.Engine` over an inference server: what vLLM and SGLang have in common.

A completion is made of segments. A coming version is made ready in the server while it serves. A swap cuts the segments
in flight short, keeping the tokens they have, lets the server change to the new weights, and sends prompt + tokens
again. With `keep_kv` segments are not cut: the server stops between two steps, says how many tokens each has, and goes
on with the cache it has. Both ways each token's version is known by its place. The server proves that it serves the new
weights by a part of the manifest's probe at once, and by all of it beside its work; until it has, no answer leaves.

Invariants: nothing is computed in the server while its weights change; after a swap its log-probabilities of the
manifest's probe are the trainer's, or the engine is lost; a swap that fails leaves the version before it serving, and
takes back what was sampled since, or the engine is lost.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollart.engines.embedded.segments import EngineSeconds, Piece, RequestProgress, Segment, segment_seed, wrong_in
from rollart.engines.proof import PRECISIONS, Proven, judge
from rollart.engines.staged import StagedFiles
from rollart.engines.stops import StopFinder
from rollart.errors import AnswerError, BoundaryError, EngineError, RequestError, StoreFull, WeightError, boundary
from rollart.types import (
    Completion,
    Finish,
    GenerateRequest,
    Probe,
    Pulled,
    SwapReport,
    WeightManifest,
    WeightVersion,
)

QUIET_S = 0.1
"""What a halted server has not ended by then, and has sent no token of, it does not know yet."""
AT_ONCE = 2
"""Sequences of the probe that are scored before a swap is over: enough to tell other weights from these."""
GRACE_S = 2.0
"""A segment that a halted server has not ended by then is cut off from here; what it has stays."""


class InferenceServer(Protocol):
    """One server's own interface. Raises EngineError where the server is lost."""

    def stream(self, segment: Segment) -> AsyncGenerator[Piece, None]:
        """Closing it aborts the segment. Raises RequestError for what cannot be served."""

    async def abort(self, segment_id: str) -> None: ...

    async def halt(self) -> None:
        """End everything in flight with what it has, and start nothing until `resume`."""

    async def resume(self) -> None: ...

    async def hold(self) -> dict[str, int]:
        """Stop between two steps, with everything in flight as it is, until `resume`; the tokens that each segment
        which was begun has by then, by its id."""

    async def stage(self, files: Sequence[Path], version: WeightVersion) -> None:
        """Make weights ready while serving. The files may change once they are loaded. Raises WeightError."""

    async def load(self, version: WeightVersion) -> None:
        """Serve what was staged, and forget every cache of what was served before. Raises WeightError."""

    async def score(self, tokens: list[int]) -> list[list[float]]:
        """Log-probability of each token but the first, temperature 1: a row from each process behind it."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """What an engine must know of the model that its server serves."""

    engine_id: str
    max_context: int
    vocab_size: int
    eos: frozenset[int]
    dtype: str = "float32"
    keep_kv: bool = False


class RemoteEngine:
    """One server as an engine. `files` says what it loads versions from."""

    def __init__(
        self, server: InferenceServer, settings: RemoteSettings, files: StagedFiles, *, stops: StopFinder | None = None
    ) -> None:
        self.server = server
        self._settings = settings
        self._id = settings.engine_id
        self.files = files
        self.stops = stops
        self._eos = tuple(sorted(settings.eos))
        self.version: WeightVersion = 0
        self._served: WeightManifest | None = None
        """Of the version served; None while that is the initial one."""
        self._staging: asyncio.Task[None] | None = None
        """Makes a coming version ready in the server."""
        self._awaited: WeightVersion | None = None
        """The version that the task above is at."""
        self._staged: WeightManifest | None = None
        """Of the version that is ready there, or that the task above has found and is at."""
        self._fetched_s = 0.0
        """What finding its files took."""
        self._proven: list[Proven | None] = []
        """What is known of each process behind the server since the last swap."""
        self.calls: dict[str, RequestProgress] = {}
        self._open = asyncio.Event()
        """Closed while weights change: no segment starts."""
        self._open.set()
        self._settled = asyncio.Event()
        """Closed until new weights are proven: no answer leaves."""
        self._settled.set()
        self._unproven: WeightVersion | None = None
        self._proving: asyncio.Task[None] | None = None
        """Scores the rest of the probe beside the work."""
        self._swapping = asyncio.Lock()
        self._share = EngineSeconds()
        self._pieces = 0
        """Received from the server since the start: a server that computes sends some."""
        self._failure: EngineError | None = None

    # --- the port

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check(request)
        call = self.calls[request.id] = RequestProgress(request=request, prompt=request.tokens().tolist())
        try:
            while True:
                while not self._open.is_set():  # another swap may begin between its opening and our turn
                    await self._open.wait()
                if self._failure is not None:
                    raise self._failure
                finish = Finish.ABORT if call.aborted else await self._segment(call)
                sampled = len(call.tokens)
                while not self._settled.is_set():
                    await self._settled.wait()
                if self._failure is not None and call.spans and call.spans[-1].version == self._unproven:
                    raise self._failure
                if finish is not None and len(call.tokens) == sampled:
                    return call.completion(finish, self._id)
        finally:
            del self.calls[request.id]

    async def abort(self, request_id: str) -> int:
        call = self.calls.get(request_id)
        if call is not None:
            call.aborted = True
            if call.task is not None:
                call.task.cancel()
                await self.server.abort(call.segment_id)
        if self._failure is not None:
            raise self._failure
        return self._pieces

    async def stage(self, version: WeightVersion) -> None:
        """Returns when the server, too, needs only to change to it."""
        if self._staging is None or self._awaited != version:
            await self._end_staging()
            self._awaited = version
            self._staging = asyncio.create_task(self._prepare(version))
        staging = self._staging
        await asyncio.wait([staging])
        if not staging.cancelled() and (full := staging.exception()) is not None:
            self._awaited = None  # so that it is begun again
            raise full

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        async with self._swapping:
            if manifest.probe is None:
                raise WeightError(
                    f"{self._id}: version {manifest.version} came without a probe, so nothing can show that the server "
                    "serves it; publish it with one (`rollart.model.network.probe`)"
                )
            with boundary(WeightError, f"{self._id} swap to {manifest.version}"):
                came = await self._make_ready(manifest)
            await self.proven()
            self._open.clear()
            self._settled.clear()
            try:
                rebuilt = await self._change(manifest, manifest.probe)
            except EngineError as error:
                self._failure = error
                self._settled.set()
                raise
            except WeightError:
                self._settled.set()
                raise
            finally:
                self._open.set()
        return SwapReport(version=manifest.version, pulled=came, rebuilt_tokens=rebuilt)

    async def proven(self) -> None:
        """Wait until the server has shown all that it must of the weights it was last given. Raises EngineError where
        it has not."""
        if self._proving is not None:
            await asyncio.wait([self._proving])
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        self._failure = self._failure or EngineError(f"{self._id}: the engine was closed")
        for call in self.calls.values():
            if call.task is not None:
                call.task.cancel()
        await self._end_staging()
        if self._proving is not None:
            self._proving.cancel()
            await asyncio.wait([self._proving])
        await self.server.close()
        self.files.close()

    # --- segments

    def _check(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        if self._failure is not None:
            raise self._failure
        if request.id in self.calls:
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
        if sampling.stop and self.stops is None:
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
            async with contextlib.aclosing(self.server.stream(segment)) as pieces:
                async for piece in pieces:
                    self._pieces += 1
                    cached = cached if piece.cached_tokens is None else piece.cached_tokens
                    if wrong := wrong_in(piece, self._settings.vocab_size):
                        raise AnswerError(f"{self._id}: the server sent {wrong} in request {call.request.id}")
                    for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
                        call.tokens.append(token)
                        call.logprobs.append(logprob)
                        if self.stopped(call):
                            return Finish.STOP
                    finish = finish or piece.finish
            return finish
        finally:
            call.cached_tokens += cached
            call.prefill_tokens += len(segment.prompt) - cached

    def stopped(self, call: RequestProgress) -> bool:
        """Found here and not by the server: a stop string may begin in one segment and end in the next."""
        stop = call.request.sampling.stop
        return bool(stop) and self.stops is not None and self.stops.ends(call.tokens, stop)

    # --- weights

    async def _prepare(self, version: WeightVersion) -> None:
        """Raises StoreFull."""
        try:
            await asyncio.shield(asyncio.wrap_future(self.files.begin(version)))
            manifest = await asyncio.to_thread(self.files.manifest, version)
            if manifest is not None:  # or it is not awaited any more
                await self._stage_in_server(manifest)
        except StoreFull:
            raise
        except BoundaryError:
            pass  # the swap stages again, and says what is wrong

    async def _stage_in_server(self, manifest: WeightManifest) -> None:
        self._staged = manifest
        try:
            began = time.perf_counter()
            files = await asyncio.to_thread(self.files.of, manifest)
            self._fetched_s = time.perf_counter() - began
            await self.server.stage(files, manifest.version)
        except BaseException:
            self._staged = None
            raise

    async def _make_ready(self, manifest: WeightManifest) -> Pulled:
        """The server needs only to change to it. Returns what bringing it to this host took."""
        if self._staging is not None and self._staged == manifest:
            await asyncio.wait([self._staging])
        await self._end_staging()
        if self._staged != manifest:
            await self._stage_in_server(manifest)
        came = self.files.pulled(manifest.version)
        return came._replace(seconds=came.seconds + self._fetched_s)

    async def _end_staging(self) -> None:
        if self._staging is not None:
            self._staging.cancel()
            await asyncio.wait([self._staging])
            self._staging = None

    async def _halt(self) -> int:
        """End all segments; returns how many tokens must be computed again for them."""
        running = [call for call in self.calls.values() if call.task is not None]
        for call in running:
            call.cut = True
        await self.server.halt()
        await self._ended(running)
        return sum(len(call.prompt) + len(call.tokens) for call in running if call.request.id in self.calls)

    async def _ended(self, cut: Sequence[RequestProgress]) -> None:
        """Wait until these segments, which the server was told to end, are over."""
        tasks = [call.task for call in cut if call.task is not None]
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=QUIET_S)
        for call in cut:
            if call.task is not None and len(call.tokens) == call.segment_start:
                call.task.cancel()  # it waits in the server, and has no token: nothing is lost with it
        _, late = await asyncio.wait(tasks, timeout=GRACE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _hold(self, version: WeightVersion) -> int:
        """Stop between two steps; what is in flight will go on under `version`. Nothing is computed again for it."""
        running = [call for call in self.calls.values() if call.task is not None]
        sampled = await self.server.hold()
        begun = [call for call in running if call.segment_id in sampled]
        for call in begun:
            call.turn_at(sampled[call.segment_id], version)
        # One that the server does not know has ended there, or has not begun.
        others = [call for call in running if call.segment_id not in sampled and call.task is not None]
        for call in others:
            call.cut = True
            await self.server.abort(call.segment_id)
        await self._ended(others)
        return 0

    async def _change(self, manifest: WeightManifest, probe: Probe) -> int:
        """Sampling goes on as soon as the weights are in; what is sampled stays here until they are proven. Returns how
        many tokens are computed again."""
        before = self.version
        rebuilt = await (self._hold(manifest.version) if self._settings.keep_kv else self._halt())
        self.version = self._unproven = manifest.version
        self._staged = None
        try:
            await self.server.load(manifest.version)
            await self.server.resume()
            self._open.set()
            part = await self._answers(probe.sequences()[:AT_ONCE])
            for answer in part:
                self._judged(manifest.version, probe.logprobs[: len(answer)], answer, None)
        except (WeightError, RequestError) as error:
            self._open.clear()
            await self._go_back(before, str(error))
            raise WeightError(str(error)) from error
        self._served = manifest
        self._proving = asyncio.create_task(self._prove_all(manifest.version, probe, part))
        return rebuilt

    async def _prove_all(self, version: WeightVersion, probe: Probe, part: list[list[float]]) -> None:
        """Let answers leave, or end everything: nobody knows what was sampled."""
        try:
            rest = await self._answers(probe.sequences()[AT_ONCE:])
            answers = [[*first, *later] for first, later in zip(part, rest, strict=True)]
            before = self._proven or [None] * len(answers)
            self._proven = [self._judged(version, probe.logprobs, *pair) for pair in zip(answers, before, strict=True)]
            self._unproven = None
        except BoundaryError as error:
            self._failure = self._failure or EngineError(str(error))
            for call in self.calls.values():
                if call.task is not None:
                    call.cut = True
                    call.task.cancel()
        finally:
            self._settled.set()

    async def _go_back(self, before: WeightVersion, reason: str) -> None:
        """Serve what was served before, and take back what was sampled since. Raises EngineError where that is not to
        be had."""
        wrong, self.version = self.version, before
        try:
            await self._halt()
            await asyncio.sleep(0)  # those whose segments ended close their spans
            for call in self.calls.values():
                call.take_back(wrong)
            served = self._served
            files = await asyncio.to_thread(self.files.of, served) if served is not None else self.files.initial()
            await self.server.stage(files, before)
            await self.server.load(before)
            await self.server.resume()
            if served is not None and served.probe is not None:
                for answer in await self._answers(served.probe.sequences()):
                    self._judged(before, served.probe.logprobs, answer, None)
            self._unproven = None
        except BoundaryError as error:
            raise EngineError(
                f"{self._id}: neither new weights ({reason}) nor those of version {before} could be loaded: {error}"
            ) from error

    async def _answers(self, sequences: list[list[int]]) -> list[list[float]]:
        """What each process behind the server says of these, end to end."""
        parts = await asyncio.gather(*(self.server.score(tokens) for tokens in sequences))
        return [[value for part in parts for value in part[process]] for process in range(len(parts[0]))]

    def _judged(
        self, version: WeightVersion, expected: Sequence[float], answer: list[float], before: Proven | None
    ) -> Proven:
        """The server's log-probabilities must be those that the trainer computed, and move as they do."""
        precision = PRECISIONS[self._settings.dtype]
        verdict = judge(version, answer, expected, before, precision)
        if verdict.wrong:
            raise WeightError(
                f"{self._id}: loaded version {version}, but its log-probabilities are {verdict.off:.3g} from the "
                f"trainer's (root mean square; allowed: {precision.limit:g}), so it does not serve these weights. "
                "A server may load some kinds of model wrongly: use another kind, or embedded engines"
            )
        if verdict.stuck:
            raise EngineError(
                f"{self._id}: asked to load version {version}, it does not follow: since version "
                f"{verdict.state.sure} its log-probabilities have not moved as the trainer's did, so what it samples "
                "is of older weights than it says"
            )
        return verdict.state

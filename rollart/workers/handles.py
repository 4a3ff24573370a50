"""Engine, trainer and shard as seen from the coordinator, over any worker that can be called by method name.

Each kind of cluster brings its own `Worker`; what crosses, and how a worker's error becomes the port's, is the same.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from rollart.errors import (
    AnswerError,
    BoundaryError,
    CannotHost,
    ClusterError,
    EngineError,
    EnvCrashed,
    EnvError,
    EnvOverLimit,
    RequestError,
    StartAgain,
    StoreFull,
    TrainerError,
    WeightError,
)
from rollart.events.log import packed, unpacked
from rollart.ports import Answer, Call, Events, Shard, ShardMessage
from rollart.types import (
    Batch,
    Completion,
    GenerateRequest,
    StepResult,
    SwapReport,
    WeightManifest,
    WeightVersion,
)
from rollart.workers.wire import allow

allow(Call, Answer)

CLOSE_S = 10.0
"""A shard has so long to end what it started: what is not a process of this machine would stay."""

_ERRORS: dict[str, type[BoundaryError]] = {
    error.__name__: error
    for error in (
        *(EngineError, RequestError, AnswerError, WeightError, StoreFull, TrainerError, StartAgain),
        *(EnvError, EnvCrashed, EnvOverLimit, CannotHost),
    )
}


class Worker(Protocol):
    """One engine, trainer or set of environments, wherever it runs."""

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        """One call of the worker's port; what goes wrong is raised as the port's error."""


def as_raised(worker: str, kind: str, text: str, otherwise: type[BoundaryError]) -> BoundaryError:
    """What a call raised inside a worker, by its class name, as an error of ours."""
    return _ERRORS.get(kind, otherwise)(f"{worker}: {text}")


class WorkerEngine:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def generate(self, request: GenerateRequest) -> Completion:
        whole = replace(request, prompt=(request.tokens(),))
        completion: Completion = await self._worker.call(EngineError, "generate", whole)
        return completion

    async def abort(self, request_id: str) -> int:
        progress: int = await self._worker.call(EngineError, "abort", request_id)
        return progress

    async def stage(self, version: WeightVersion) -> None:
        await self._worker.call(EngineError, "stage", version)

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        report: SwapReport = await self._worker.call(EngineError, "swap", manifest)
        return report


class WorkerShard:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def tell(self, messages: Sequence[ShardMessage]) -> None:
        await self._worker.call(ClusterError, "tell", list(messages))

    async def news(self) -> list[ShardMessage]:
        said: list[Any] = await self._worker.call(ClusterError, "news")
        return [Events(unpacked(one)) if isinstance(one, bytes) else one for one in said]


async def close_shard(worker: Worker) -> None:
    """Let it end what it started, and write what it keeps."""
    with contextlib.suppress(ClusterError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await worker.call(ClusterError, "close")


class ShardService:
    """A shard, in its own process: events cross packed by their own codec."""

    def __init__(self, shard: Shard, close: Callable[[], Awaitable[None]]) -> None:
        self._shard = shard
        self.close = close
        """Ends what it started."""

    async def tell(self, messages: list[ShardMessage]) -> None:
        await self._shard.tell(messages)

    async def news(self) -> list[Any]:
        return [packed(one.events) if isinstance(one, Events) else one for one in await self._shard.news()]


class WorkerTrainer:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def train_step(self, batch: Batch) -> StepResult:
        result: StepResult = await self._worker.call(TrainerError, "train_step", batch)
        return result

    async def publish(self, version: WeightVersion) -> WeightManifest:
        manifest: WeightManifest = await self._worker.call(TrainerError, "publish", version)
        return manifest

    async def save(self) -> str:
        reference: str = await self._worker.call(TrainerError, "save")
        return reference

    async def restore(self, reference: str) -> WeightVersion:
        version: WeightVersion = await self._worker.call(TrainerError, "restore", reference)
        return version

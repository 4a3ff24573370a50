"""The same workers inside the coordinator's own process: for debuggers, and for machines without process isolation.

Engine and trainer have threads of their own; a worker that is built blocks the event loop while it loads. A worker
that crashes the interpreter takes the job with it: that is what the other clusters are for.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from rollart.errors import ClusterError, boundary
from rollart.ports import Engine, Trainer
from rollart.types import EngineSpec
from rollart.workers.setup import WorkerSetup

Build = Callable[[WorkerSetup], Awaitable[Any]]
"""Makes a worker from its set-up: `rollart.launch.worker.build`."""


class InlineCluster:
    def __init__(self, build: Build, setup: WorkerSetup) -> None:
        self._build = build
        self._setup = setup
        self.workers: dict[str, object] = {}
        """By name: the engines' ids, and `trainer`."""

    async def engine(self, spec: EngineSpec) -> Engine:
        engine: Engine = await self._start(self._setup.engine(spec))
        return engine

    async def trainer(self) -> Trainer:
        trainer: Trainer = await self._start(self._setup)
        return trainer

    async def close(self) -> None:
        for name in list(self.workers):
            await self._stop(name)

    async def _start(self, setup: WorkerSetup) -> Any:
        await self._stop(setup.name)
        with boundary(ClusterError, f"{setup.name} could not start"):
            worker = await self._build(setup)
        self.workers[setup.name] = worker
        return worker

    async def _stop(self, name: str) -> None:
        close = getattr(self.workers.pop(name, None), "close", None)
        if close is not None:
            ended = close()
            if inspect.isawaitable(ended):
                await ended

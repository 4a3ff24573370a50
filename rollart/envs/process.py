"""An EnvHost with one OS process per slot: what an environment does there harms nobody else.

A worker runs one environment at a time and is reused. It is killed, with all it started, when its environment is
closed while it works, when the open or step that waits for it is cancelled, or when it breaks the protocol.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.errors import ClusterError, EnvError
from rollart.tasks.api import as_observation
from rollart.types import Endpoint, Observation, Program, Task, TrajectoryId
from rollart.workers.launch import Lost, Process
from rollart.workers.link import WorkerFailed, WorkerGone
from rollart.workers.pool import ProcessPool

CLOSE_GRACE_S = 5.0
"""How long an environment may take to close itself before its process is killed."""


class ProcessEnvHost:
    """Opens environments in worker processes. `uses` says where each domain's task set is."""

    def __init__(
        self,
        uses: Mapping[str, str],
        *,
        slots: int,
        log_dir: Path,
        seed: int = 0,
        variables: Sequence[str] = (),
        lost: Lost | None = None,
    ) -> None:
        """`variables`: of our environment, those that workers get beside what every program needs."""
        self._uses = dict(uses)
        worker = "rollart.envs.worker:EnvWorker"
        self.pool = ProcessPool(
            "env", worker, self._uses, seed, size=slots, log_dir=log_dir, variables=variables, lost=lost
        )

    async def open(self, task: Task, trajectory: TrajectoryId) -> "ProcessEnv":
        """Wait for a slot and start one environment. Raises EnvError."""
        if task.domain not in self._uses:
            raise EnvError(f"no task set is known for the domain {task.domain}")
        try:
            return await self._open(task)
        except EnvError as error:
            if not isinstance(error.__cause__, WorkerGone):
                raise
            # an idle worker may have died since its last user: not the fault of this environment
            return await self._open(task)

    async def _open(self, task: Task) -> "ProcessEnv":
        try:
            process = await self.pool.acquire()
        except ClusterError as error:
            raise EnvError(f"open: {error}") from error
        env = ProcessEnv(self.pool, process)
        try:
            await env.call("open", task)
        except BaseException:
            env.drop()
            raise
        return env

    async def close(self) -> None:
        """Kill all workers."""
        await self.pool.close()


class ProcessEnv:
    """One environment in a worker. Holds its slot until it is closed."""

    def __init__(self, pool: ProcessPool, process: Process) -> None:
        self._pool = pool
        self._process: Process | None = process

    async def reset(self) -> Observation:
        return await self._observe("reset")

    async def step(self, action: str) -> Observation:
        return await self._observe("step", action)

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        return await self._observe("play", program, endpoint)

    async def close(self) -> None:
        """Ask it to close, then give the slot back. A worker that is busy or too slow is killed."""
        try:
            if self._process is not None and self._process.ready:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_GRACE_S):
                        await self.call("close")
        finally:
            self.drop()

    def drop(self) -> None:
        """Give the slot back now."""
        process, self._process = self._process, None
        if process is not None:
            self._pool.release(process)

    async def call(self, method: str, *arguments: Any) -> Any:
        """One request to the worker. Raises EnvError."""
        process = self._process
        if process is None or not process.ready:
            raise EnvError(f"{method}: this environment is closed, or its worker has died")
        try:
            return await process.ask(method, *arguments)
        except (WorkerFailed, WorkerGone) as error:
            raise EnvError(f"{method}: {error}") from error
        except asyncio.CancelledError:
            process.kill()
            raise

    async def _observe(self, method: str, *arguments: Any) -> Observation:
        value = await self.call(method, *arguments)
        try:
            return as_observation(value)  # again: user code may have spoken for the worker
        except ValueError as error:
            raise EnvError(f"{method}: {error}") from error

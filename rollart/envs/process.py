"""An EnvHost with one OS process per slot: what an environment does there harms nobody else.

A worker runs one environment at a time and is reused; in a box it runs one environment, and ends with it. It is
killed, with all it started, when its environment is closed while it works, when the open or step that waits for it is
cancelled, or when it breaks the protocol.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.errors import ClusterError, EnvCrashed, EnvError, EnvOverLimit
from rollart.tasks.api import as_observation
from rollart.types import Endpoint, Observation, Program, Task, TrajectoryId
from rollart.workers.box import MakeBox
from rollart.workers.launch import Lost, Process
from rollart.workers.link import WorkerFailed, WorkerGone
from rollart.workers.pool import ProcessPool

CLOSE_GRACE_S = 5.0
"""How long an environment may take to close itself before its process is killed."""
RECENT_KEYS = 4
"""How many of the newest preparations are made in a worker that is started ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxed:
    """How environments are put into boxes, each into one of its own."""

    box: MakeBox
    wall_s: float
    """Longest life of an environment."""
    warm: int = 0
    """Workers started ahead."""


class ProcessEnvHost:
    """Opens environments in worker processes. `uses` says where each domain's task set is, `args` what it is made
    with."""

    def __init__(
        self,
        uses: Mapping[str, str],
        *,
        slots: int | asyncio.Semaphore,
        log_dir: Path,
        args: Mapping[str, Mapping[str, object]] | None = None,
        seed: int = 0,
        variables: Sequence[str] = (),
        lost: Lost | None = None,
        name: str = "env",
        boxed: Boxed | None = None,
    ) -> None:
        """`slots`: a semaphore is shared with other hosts. `variables`: of our environment, those that workers get
        beside what every program needs. `name`: what workers and their logs are called. `boxed`: in boxes."""
        self._uses = dict(uses)
        self._wall_s = boxed.wall_s if boxed else None
        self._keys: dict[tuple[str, str], None] = {}
        self.pool = ProcessPool(
            name,
            "rollart.envs.worker:EnvWorker",
            self._uses,
            seed,
            dict(args or {}),
            size=slots,
            log_dir=log_dir,
            variables=variables,
            lost=lost,
            box=boxed.box if boxed else None,
            warm=boxed.warm if boxed else 0,
            prepare=self._prepare,
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
        env = ProcessEnv(self.pool, process, self._wall_s)
        try:
            key = await env.call("open", task)
        except BaseException:
            env.drop()
            raise
        if isinstance(key, str) and key:
            self._keys.pop((task.domain, key), None)
            self._keys[task.domain, key] = None
            while len(self._keys) > RECENT_KEYS:
                del self._keys[next(iter(self._keys))]
        return env

    async def _prepare(self, process: Process) -> None:
        """In a worker that was started ahead: load the task sets, and what the newest environments had in common."""
        try:
            await process.ask("prepare", list(self._uses), [list(pair) for pair in self._keys])
        except (WorkerFailed, WorkerGone) as error:
            raise ClusterError(f"prepare: {error}") from error

    async def close(self) -> None:
        """Kill all workers."""
        await self.pool.close()


class ProcessEnv:
    """One environment in a worker. Holds its slot until it is closed."""

    def __init__(self, pool: ProcessPool, process: Process, wall_s: float | None = None) -> None:
        """`wall_s`: it is killed when it has been open for so long."""
        self._pool = pool
        self._process: Process | None = process
        self._over = ""
        """The limit for which it was killed."""
        self._timer: asyncio.TimerHandle | None = None
        if wall_s is not None:
            self._timer = asyncio.get_running_loop().call_later(wall_s, self._out_of_time, wall_s)

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
        if self._timer is not None:
            self._timer.cancel()
        if process is not None:
            self._pool.release(process)

    def _out_of_time(self, wall_s: float) -> None:
        self._over = f"it was open for longer than sandbox.wall_s {wall_s:g}, and was killed"
        if self._process is not None:
            self._process.kill()

    async def call(self, method: str, *arguments: Any) -> Any:
        """One request to the worker. Raises EnvError."""
        process = self._process
        if self._over:
            raise EnvOverLimit(f"{method}: {self._over}")
        if process is None or not process.ready:
            raise EnvError(f"{method}: this environment is closed, or its worker has died")
        try:
            return await process.ask(method, *arguments)
        except WorkerFailed as error:
            raise EnvError(f"{method}: {error}") from error
        except WorkerGone as error:
            over = bool(self._over) or process.over_limit
            raise (EnvOverLimit if over else EnvCrashed)(f"{method}: {self._over or error}") from error
        except asyncio.CancelledError:
            process.kill()
            raise

    async def _observe(self, method: str, *arguments: Any) -> Observation:
        value = await self.call(method, *arguments)
        try:
            return as_observation(value)  # again: user code may have spoken for the worker
        except ValueError as error:
            raise EnvError(f"{method}: {error}") from error

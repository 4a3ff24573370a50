"""Processes that run user code: started when needed or ahead, used once or again while healthy, else killed.

A process that is given back while a call is under way, or that died, is killed with everything it started, and the next
user gets a new one. Its output goes to a file of bounded size, and of our environment it sees what programs need and
what the job names. In a box it is used once. Used by the process environment host and by local rewards.
"""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollart.errors import ClusterError
from rollart.workers.box import MakeBox
from rollart.workers.launch import Lost, Process
from rollart.workers.variables import for_children

WARM_S = 60.0
"""Processes that were started ahead end when none was asked for in this time."""

Prepare = Callable[[Process], Awaitable[None]]
"""What is done in a process that was started ahead, before it is asked for."""


class ProcessPool:
    """At most this many processes in use at a time, all made by the same function from the same arguments."""

    def __init__(
        self,
        name: str,
        target: str,
        *arguments: Any,
        size: int | asyncio.Semaphore,
        log_dir: Path,
        variables: Sequence[str] = (),
        lost: Lost | None = None,
        box: MakeBox | None = None,
        warm: int = 0,
        prepare: Prepare | None = None,
        idle_s: float | None = None,
    ) -> None:
        """`size`: how many are in use at a time; a semaphore is shared with others. `variables`: of our environment,
        those that user code gets beside what every program needs. `box`: where each is put; it is then used once.
        `warm`: how many are kept started ahead, beside those. `idle_s`: one that nobody used for so long ends."""
        environment = {"OMP_NUM_THREADS": "1"} | for_children(os.environ, variables)
        self._process = partial(Process, target=target, log_dir=log_dir, environment=environment, lost=lost)
        self._name = name
        self._arguments = arguments
        self._slots = asyncio.Semaphore(size) if isinstance(size, int) else size
        self._box = box
        self._warm = warm
        self._prepare = prepare
        self._ahead: deque[asyncio.Task[Process]] = deque()
        """Started, or being started, for nobody yet; the oldest first."""
        self._cooling: asyncio.TimerHandle | None = None
        self._idle: list[Process] = []
        self._idle_s = idle_s
        self._ending: dict[Process, asyncio.TimerHandle] = {}
        """Of idle ones: when each ends."""
        self._all: dict[int, Process] = {}
        self._closed = False

    async def acquire(self) -> Process:
        """Wait for a slot and give a process that is ready. Raises ClusterError where none can be started."""
        await self._slots.acquire()
        try:
            while self._idle:
                process = self._idle.pop()
                self._stays(process)
                if process.ready and process.pid is not None:
                    return process
                self._forget(process)
            return await self._first_ahead() if self._warm else await self._start()
        except BaseException:
            self._slots.release()
            raise

    def release(self, process: Process) -> None:
        """Give it back. It is killed unless it waits for its next call, and may have one."""
        if process.ready and not self._closed and self._box is None:
            process.trim_log()
            self._idle.append(process)
            if self._idle_s is not None:
                loop = asyncio.get_running_loop()
                self._ending[process] = loop.call_later(self._idle_s, self._end_idle, process)
        else:
            self._forget(process)
        self._slots.release()

    async def close(self) -> None:
        """Kill all processes, and wait until they are gone."""
        self._closed = True
        self._cool()
        for process in list(self._ending):
            self._stays(process)
        processes, self._all = list(self._all.values()), {}
        await asyncio.gather(*(process.stop() for process in processes))

    @property
    def pids(self) -> list[int]:
        """The processes now running."""
        return sorted(process.pid for process in self._all.values() if process.pid is not None)

    @property
    def num_ahead(self) -> int:
        """Started, or being started, for nobody yet."""
        return len(self._ahead)

    async def _first_ahead(self) -> Process:
        """The oldest of those that were started ahead, and others in its place for those that come after."""
        loop = asyncio.get_running_loop()
        if self._cooling is not None:
            self._cooling.cancel()
        self._cooling = loop.call_later(WARM_S, self._cool)
        while True:
            while len(self._ahead) <= self._warm and not self._closed:
                self._ahead.append(loop.create_task(self._start_ahead()))
            if self._closed:
                raise ClusterError(f"{self._name}: closed")
            first = self._ahead.popleft()
            if first.done() and (first.cancelled() or first.exception() is not None):
                continue  # what kept it from starting may be over
            try:
                process = await first  # cancelled with us: what was taken out is nobody else's
            except asyncio.CancelledError:
                if first.done() and not first.cancelled() and first.exception() is None:
                    self._forget(first.result())
                raise
            if process.ready and process.pid is not None:
                return process
            self._forget(process)

    async def _start_ahead(self) -> Process:
        process = await self._start()
        if self._prepare is not None:
            try:
                await self._prepare(process)
            except BaseException:
                self._forget(process)
                raise
        return process

    def _cool(self) -> None:
        """End those that nobody asked for."""
        if self._cooling is not None:
            self._cooling.cancel()
            self._cooling = None
        ahead, self._ahead = self._ahead, deque()
        for task in ahead:
            task.cancel()
            task.add_done_callback(self._drop)

    def _drop(self, task: "asyncio.Task[Process]") -> None:
        if not task.cancelled() and task.exception() is None:
            self._forget(task.result())

    def _end_idle(self, process: Process) -> None:
        self._stays(process)
        self._idle.remove(process)
        self._forget(process)

    def _stays(self, process: Process) -> None:
        if (ending := self._ending.pop(process, None)) is not None:
            ending.cancel()

    async def _start(self) -> Process:
        if self._closed:
            raise ClusterError(f"{self._name}: closed")
        number = next(number for number in range(len(self._all) + 1) if number not in self._all)
        name = f"{self._name}-{number}"
        process = self._all[number] = self._process(name, box=self._box(name) if self._box else None)
        try:
            await process.start(*self._arguments)
        except BaseException:
            self._forget(process)
            raise
        return process

    def _forget(self, process: Process) -> None:
        process.kill()
        self._all = {number: other for number, other in self._all.items() if other is not process}

"""Processes that run user code: started when needed, reused while healthy, else killed.

A process that is given back while a call is under way, or that died, is killed with everything it started, and the next
user gets a new one. Its output goes to a file of bounded size, and of our environment it sees what programs need and
what the job names. Used by the process environment host and by local rewards.
"""

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollart.errors import ClusterError
from rollart.workers.launch import Lost, Process
from rollart.workers.variables import for_children


class ProcessPool:
    """At most `size` processes at a time, all made by the same function from the same arguments."""

    def __init__(
        self,
        name: str,
        target: str,
        *arguments: Any,
        size: int,
        log_dir: Path,
        variables: Sequence[str] = (),
        lost: Lost | None = None,
    ) -> None:
        """`variables`: of our environment, those that user code gets beside what every program needs."""
        environment = {"OMP_NUM_THREADS": "1"} | for_children(os.environ, variables)
        self._process = partial(Process, target=target, log_dir=log_dir, environment=environment, lost=lost)
        self._name = name
        self._arguments = arguments
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Process] = []
        self._all: dict[int, Process] = {}
        self._closed = False

    async def acquire(self) -> Process:
        """Wait for a slot and give a process that is ready. Raises ClusterError where none can be started."""
        await self._slots.acquire()
        try:
            while self._idle:
                process = self._idle.pop()
                if process.ready and process.pid is not None:
                    return process
                self._forget(process)
            return await self._start()
        except BaseException:
            self._slots.release()
            raise

    def release(self, process: Process) -> None:
        """Give it back. It is killed unless it waits for its next call."""
        if process.ready and not self._closed:
            process.trim_log()
            self._idle.append(process)
        else:
            self._forget(process)
        self._slots.release()

    async def close(self) -> None:
        """Kill all processes, and wait until they are gone."""
        self._closed = True
        processes, self._all = list(self._all.values()), {}
        await asyncio.gather(*(process.stop() for process in processes))

    @property
    def pids(self) -> list[int]:
        """The processes now running."""
        return sorted(process.pid for process in self._all.values() if process.pid is not None)

    async def _start(self) -> Process:
        if self._closed:
            raise ClusterError(f"{self._name}: closed")
        number = next(number for number in range(len(self._all) + 1) if number not in self._all)
        process = self._all[number] = self._process(f"{self._name}-{number}")
        try:
            await process.start(*self._arguments)
        except BaseException:
            self._forget(process)
            raise
        return process

    def _forget(self, process: Process) -> None:
        process.kill()
        self._all = {number: other for number, other in self._all.items() if other is not process}

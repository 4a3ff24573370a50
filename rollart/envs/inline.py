"""An EnvHost in this process: no set-up, no isolation. For environments that are cheap and trusted.

Async environments run on the event loop, others in a thread of their own. A thread cannot be killed: one whose
environment hangs is left behind when the environment is closed, and its slot goes on with a new thread.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rollart.errors import EnvError, boundary
from rollart.tasks.api import Environment, TaskSet, as_observation
from rollart.types import Endpoint, Observation, Program, Task, TrajectoryId

CLOSE_GRACE_S = 5.0
"""How long an environment may take to close itself before its thread is left behind."""


class InlineEnvHost:
    """Opens environments here. `task_sets` are those of the job, by domain."""

    def __init__(self, task_sets: Mapping[str, TaskSet], *, slots: int | asyncio.Semaphore) -> None:
        """`slots`: a semaphore is shared with other hosts."""
        self._task_sets = dict(task_sets)
        self._slots = asyncio.Semaphore(slots) if isinstance(slots, int) else slots
        self._idle: list[_Lane] = []

    async def open(self, task: Task, trajectory: TrajectoryId) -> "InlineEnv":
        """Wait for a slot and start one environment. Raises EnvError."""
        task_set = self._task_sets.get(task.domain)
        if task_set is None:
            raise EnvError(f"no task set is known for the domain {task.domain}")
        await self._slots.acquire()
        lane: _Lane | _Direct = _DIRECT if task_set.quick else self._idle.pop() if self._idle else _Lane()
        try:
            with boundary(EnvError, "open"):
                environment = await lane.run(task_set.environment, task)
        except BaseException:
            self.release(lane)
            raise
        return InlineEnv(self, lane, environment)

    def release(self, lane: "_Lane | _Direct") -> None:
        """Give a slot back; a thread that still works is left behind."""
        if isinstance(lane, _Lane):
            if lane.busy:
                lane.end()
            else:
                self._idle.append(lane)
        self._slots.release()

    async def close(self) -> None:
        """Let the threads end."""
        for lane in self._idle:
            lane.end()
        self._idle.clear()


class InlineEnv:
    """One environment in this process. Holds its slot until it is closed."""

    def __init__(self, host: InlineEnvHost, lane: "_Lane | _Direct", environment: Environment) -> None:
        self._host = host
        self._lane: _Lane | _Direct | None = lane
        self._environment = environment

    async def reset(self) -> Observation:
        with boundary(EnvError, "reset"):
            return as_observation(await self._call(self._environment.reset))

    async def step(self, action: str) -> Observation:
        with boundary(EnvError, "step"):
            return as_observation(await self._call(self._environment.step, action))

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        """Refused: a program needs variables of its own, and may hang."""
        raise EnvError("play: a program is not run in this process; set isolation to process")

    async def close(self) -> None:
        """Close it and give the slot back, whatever state it is in."""
        lane = self._lane
        if lane is None:
            return
        try:
            if not lane.busy:
                with boundary(EnvError, "close"), contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_GRACE_S):
                        await self._call(self._environment.close)
        finally:
            if self._lane is not None:
                self._lane = None
                self._host.release(lane)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._lane is None or self._lane.busy:
            raise EnvError("this environment is closed, or still busy with an earlier call")
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        value = await self._lane.run(method, *arguments)
        return await value if inspect.isawaitable(value) else value


class _Direct:
    """Calls on the event loop itself, for environments that answer at once."""

    busy = False

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except SystemExit as error:
            raise EnvError(f"SystemExit: {error}") from error


_DIRECT = _Direct()


class _Lane:
    """A thread that runs one call at a time. A daemon: it never keeps the interpreter from ending."""

    def __init__(self) -> None:
        self.busy = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="rollart-env", daemon=True).start()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Its value. Cancelled, the lane stays busy until the function returns."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self.busy = True

        def finish(value: Any, error: BaseException | None) -> None:
            self.busy = False
            if done.cancelled():
                return
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

        def job() -> None:
            value, error = None, None
            try:
                value = function(*arguments)
            except Exception as raised:
                error = raised if not isinstance(raised, StopIteration) else RuntimeError("StopIteration")
            except BaseException as raised:  # SystemExit of user code ends neither this process nor this thread
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish, value, error)

        self._jobs.put(job)
        return await done

    def end(self) -> None:
        """End the thread when its present call returns, if ever."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

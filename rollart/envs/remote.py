"""An EnvHost whose environments run in workers on other machines, each with several slots.

The nearest worker is the one with most free slots. A worker that is lost takes its environments with it, each an
EnvError of its own trajectory; it is started again in the background, and an open meanwhile goes to another
worker or waits. `service.py` is the other end.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rollart.errors import BoundaryError, CannotHost, EnvError, JobStopped, NoRoom
from rollart.types import Endpoint, Observation, Program, Task, TrajectoryId

RETRY_S = 2.0
"""Between two tries to start a worker that could not start."""


class RemoteWorker(Protocol):
    """An `EnvService` somewhere."""

    @property
    def gone(self) -> bool:
        """A call has found that it is lost."""

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any: ...


Launch = Callable[[int], Awaitable[RemoteWorker]]
"""Starts, or starts again, the worker of this number. Raises ClusterError; NoRoom while no machine has room for it,
CannotHost where the machine that had will never do."""


class _Slot(NamedTuple):
    """Room for one environment, in this worker and not in its successor."""

    place: "_WorkerPlace"
    worker: RemoteWorker


@dataclass(slots=True, eq=False)
class _WorkerPlace:
    """The place of one worker after another."""

    number: int
    size: int
    worker: RemoteWorker | None = None
    free: int = 0
    refused: bool = False
    """The last machine that it was put on will never do."""

    def take(self) -> _Slot:
        assert self.worker is not None
        assert self.free > 0
        self.free -= 1
        return _Slot(self, self.worker)


class RemoteEnvHost:
    """One worker for each number in `slots`, which says how many it has. All are started at the first open."""

    def __init__(self, launch: Launch, *, slots: Sequence[int]) -> None:
        self._launch = launch
        self._places = [_WorkerPlace(number, size) for number, size in enumerate(slots)]
        self._waiters: deque[asyncio.Future[_Slot]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keys = itertools.count()
        self._started = False

    async def open(self, task: Task, trajectory: TrajectoryId) -> "RemoteEnv":
        """Wait for a slot and start one environment. Raises EnvError; JobStopped where no machine will ever do."""
        while True:
            slot = await self._slot()
            env = RemoteEnv(self, slot, f"{trajectory}~{next(self._keys)}")
            try:
                await slot.worker.call(EnvError, "open", env.key, task, trajectory)
            except EnvError:
                self.release(slot)
                if not slot.worker.gone:
                    raise
                self.lost(slot)  # not the fault of this environment: another worker takes it
                continue
            except BaseException:
                self._spawn(env.end())
                raise
            return env

    async def close(self) -> None:
        """Stop starting workers. Those that run end with their cluster."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def release(self, slot: _Slot) -> None:
        """It is free again, unless its worker is gone: a successor has slots of its own."""
        place = slot.place
        if slot.worker is place.worker:
            place.free += 1
            self._serve(place)

    def lost(self, slot: _Slot) -> None:
        """Its worker is gone: start another."""
        place = slot.place
        if slot.worker is place.worker:
            place.free = 0
            place.worker = None
            self._spawn(self._revive(place))

    async def _slot(self) -> _Slot:
        """A slot that is now ours. First come, first served."""
        if not self._started:
            self._started = True
            for place in self._places:
                self._spawn(self._revive(place))
        best = max(self._places, key=lambda place: place.free)
        if best.free and not self._waiters:
            return best.take()
        waiter: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())  # handed over as we were cancelled
            raise

    def _serve(self, place: _WorkerPlace) -> None:
        while place.free and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(place.take())

    async def _revive(self, place: _WorkerPlace) -> None:
        while True:
            try:
                worker = await self._launch(place.number)
                break
            except NoRoom:
                continue  # it has waited long enough in there
            except BoundaryError as error:
                place.refused = isinstance(error, CannotHost)
                if all(other.refused for other in self._places):
                    self._fail(JobStopped(f"no machine can have environments: {error}"))
                elif not place.refused and all(other.worker is None for other in self._places):
                    self._fail(EnvError(f"open: no environment worker is up: {error}"))
                await asyncio.sleep(RETRY_S)
        place.refused = False
        place.worker = worker
        place.free = place.size
        self._serve(place)

    def _fail(self, error: EnvError | JobStopped) -> None:
        """Nobody can be served now, and not for lack of machines: do not let them wait in silence."""
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RemoteEnv:
    """One environment in a worker. Holds its slot until it is closed."""

    def __init__(self, host: RemoteEnvHost, slot: _Slot, key: str) -> None:
        self.key = key
        self._host = host
        self.slot = slot
        self._closed = False

    async def reset(self) -> Observation:
        return await self._observe("reset")

    async def step(self, action: str) -> Observation:
        return await self._observe("step", action)

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        return await self._observe("play", program, endpoint)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._call("close")
        finally:
            self._host.release(self.slot)

    async def end(self) -> None:
        """Close it when nobody asks how that went."""
        try:
            await self.close()
        except EnvError:
            return

    async def _observe(self, method: str, *arguments: Any) -> Observation:
        if self._closed:
            raise EnvError(f"{method}: this environment is closed")
        observation = await self._call(method, *arguments)
        if not isinstance(observation, Observation):
            raise EnvError(f"{method}: the worker answered with a {type(observation).__name__}")
        return observation

    async def _call(self, method: str, *arguments: Any) -> Any:
        worker = self.slot.worker
        try:
            return await worker.call(EnvError, method, self.key, *arguments)
        except EnvError:
            if worker.gone:
                self._host.lost(self.slot)
            raise

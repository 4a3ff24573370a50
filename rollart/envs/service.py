"""Environments by key, for a caller in another process: what an environment worker runs.

Wraps any host of this machine. A key is closed exactly once, whatever its environment is doing: a call under way is
cancelled, as the host itself would on a cancelled step. `remote.py` is the caller's end.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollart.errors import EnvError
from rollart.ports import Env, EnvHost
from rollart.types import Endpoint, Observation, Program, Task, TrajectoryId
from rollart.workers.forward import Relay


class ClosableHost(EnvHost, Protocol):
    async def close(self) -> None: ...


@dataclass(slots=True)
class _Place:
    env: Env | None = None
    task: "asyncio.Task[Any] | None" = None


class EnvService:
    """`relay`: how sandboxed programs here reach the endpoint, which is on the coordinator's machine. `functions`: by
    what the coordinator calls an agent's function, what it is called here, where its file is elsewhere."""

    def __init__(
        self, host: ClosableHost, relay: Relay | None = None, functions: Mapping[str, str] | None = None
    ) -> None:
        self._host = host
        self._relay = relay
        self._functions = functions or {}
        self._places: dict[str, _Place] = {}

    async def open(self, key: str, task: Task, trajectory: TrajectoryId) -> None:
        place = self._places[key] = _Place()
        try:
            place.env = await self._run(place, self._host.open(task, trajectory))
        except BaseException:
            self._places.pop(key, None)
            raise

    async def reset(self, key: str) -> Observation:
        place, env = self._known(key)
        observation: Observation = await self._run(place, env.reset())
        return observation

    async def step(self, key: str, action: str) -> Observation:
        place, env = self._known(key)
        observation: Observation = await self._run(place, env.step(action))
        return observation

    async def play(self, key: str, program: Program, endpoint: Endpoint) -> Observation:
        place, env = self._known(key)
        program = program._replace(function=self._functions.get(program.function, program.function))
        if self._relay is not None:
            endpoint = endpoint._replace(socket=self._relay.leading_to(endpoint.url))
        observation: Observation = await self._run(place, env.play(program, endpoint))
        return observation

    async def close(self, key: str) -> None:
        """Free it, whatever it is doing. An unknown key is ignored: it never opened, or is closed."""
        place = self._places.pop(key, None)
        if place is None:
            return
        if place.task is not None and not place.task.done():
            place.task.cancel()
            await asyncio.wait([place.task])
        if place.env is not None:
            await place.env.close()

    async def shut(self) -> None:
        """End everything."""
        for key in list(self._places):
            with contextlib.suppress(EnvError):
                await self.close(key)
        await self._host.close()
        if self._relay is not None:
            self._relay.remove()

    def _known(self, key: str) -> tuple[_Place, Env]:
        place = self._places.get(key)
        if place is None or place.env is None:
            raise EnvError("this environment is closed")
        return place, place.env

    async def _run(self, place: _Place, work: Coroutine[Any, Any, Any]) -> Any:
        """In a task of its own, so that `close` can end it without ending whoever waits."""
        task = place.task = asyncio.get_running_loop().create_task(work)
        await asyncio.wait([task])
        if task.cancelled():
            raise EnvError("closed while it was working")
        return task.result()

"""A share of the rollout: engines, and the groups that are played on them. A coordinator without shards has all of it.

What plays is put together here: fleet, proxy, environments with their rewards, and who plays groups.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from rollart.control.attempt import Attempt
from rollart.control.context import JobContext
from rollart.control.env_manager import EnvManager
from rollart.control.fleet import Fleet, Repair
from rollart.control.groups import GroupPlayer, Reports
from rollart.control.proxy import Proxy
from rollart.control.world import RolloutWorld
from rollart.policy.stalls import Part
from rollart.ports import Engine
from rollart.types import EngineSpec, EngineWork, Task, Trajectory, TrajectoryId


class Observer(Protocol):
    """Who learns from what engines do."""

    def engines_changed(self, up: Mapping[str, int], cause: int) -> None:
        """One came or went. `up`: by pool."""

    def worked(self, pool: str, before: EngineWork | None, now: EngineWork) -> None:
        """One says what it has done. `before`: its last report since it was started."""


class Share:
    def __init__(self, context: JobContext, world: RolloutWorld) -> None:
        self._context = context
        self._world = world
        self._engines: Mapping[EngineSpec, Engine] = {}
        self.fleet: Fleet
        """Once it is connected; so the next."""
        self.manager: EnvManager
        self.connected = False

    async def start(self) -> None:
        """All engines at once, those of judges too. Raises ClusterError."""
        cluster, judges = self._world.cluster, self._world.judges
        specs = [*self._world.engines, *(spec for judge in judges for spec in judge.specs)]
        waiting = self._context.waits.on("engine.start", self._context.job.limits.start_s)
        engines = await asyncio.gather(*(waiting.guard(spec.id, cluster.engine(spec)) for spec in specs))
        made = dict(zip(specs, engines, strict=True))
        for judge in judges:
            judge.begin(self._context, cluster, {spec: made.pop(spec) for spec in judge.specs})
        self._engines = made

    def connect(self, observer: Observer, repair: Repair) -> None:
        """What plays, over these engines."""
        context, world = self._context, self._world
        self.fleet = Fleet(context, world.cluster, self._engines, repair, observer.engines_changed)
        context.supervisor.spawn(self.fleet.watch(), background=True)
        self.manager = EnvManager(context, world, self.fleet, Proxy(context, self.fleet, worked=observer.worked))
        self.connected = True
        for spec in world.further_engines:
            self.fleet.expect(spec)

    def player(self, reports: Reports) -> GroupPlayer:
        return GroupPlayer(self._context, self.manager, self.fleet, reports)

    async def episode(
        self, id: TrajectoryId, task: Task, order: Sequence[str], temperature: float | None
    ) -> Trajectory:
        """One of an evaluation. `temperature`: where it is not its task's."""
        settings = next(settings for settings in self._context.job.tasks if settings.name == task.domain)
        if temperature is not None:
            settings = settings.model_copy(update={"temperature": temperature})
        return await self.manager.run(Attempt(id, task, settings, tuple(order), evaluation=True))

    def stalled(self, text: str) -> None:
        """Nothing moves. Who waits here is said by the coordinator's watchdog."""

    def lost(self, engine: str, reason: str) -> None:
        """The cluster saw this engine die, though nobody may be calling it now."""
        if self.connected and engine in self.fleet.slots:
            self.fleet.down(self.fleet.slots[engine], reason)
        for judge in self._world.judges:
            judge.lost(engine, reason)

    def parts(self) -> Sequence[Part]:
        """What it consists of now, for the watchdog."""
        if not self.connected:
            return ()
        engines = [*self.fleet.parts(), *(part for judge in self._world.judges for part in judge.parts())]
        if self._context.job.rollout.stepping != "asynchronous":  # in lockstep all wait for the slowest, by design
            return engines
        return engines + self.manager.movement.parts(self.fleet.engine_of())

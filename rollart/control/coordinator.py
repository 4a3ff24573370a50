"""One life of a job: starts the workers, connects the drivers, and runs them until the work is done or they fail."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from rollart.config.job import Job
from rollart.control.affinity import AffinityDriver
from rollart.control.context import JobContext
from rollart.control.env_manager import EnvManager
from rollart.control.evaluation import Evaluation
from rollart.control.fleet import Fleet, Repair
from rollart.control.groups import GroupPlayer
from rollart.control.learner import Learner
from rollart.control.proxy import Proxy
from rollart.control.rollout import Rollout
from rollart.control.room import Room
from rollart.control.trainer import TrainerDriver
from rollart.control.watchdog import Watchdog
from rollart.control.weights import WeightDriver
from rollart.control.world import World
from rollart.errors import ClusterError, Interrupted, WeightError, boundary
from rollart.events import schema
from rollart.events.log import LogHandle
from rollart.policy.stalls import Part
from rollart.policy.swap import plan
from rollart.ports import Engine, Trainer
from rollart.types import EngineSpec, WeightManifest, WeightVersion


class Coordinator:
    """One incarnation of a job. After a crash, make a new one over the same journal."""

    def __init__(self, job: Job, world: World, log: LogHandle) -> None:
        self._job = job
        self.world = world
        self.log = log
        self._context = JobContext(job, log)
        self.waits = self._context.waits
        self.supervisor = self._context.supervisor
        self.watchdog = Watchdog(self._context, self._parts)
        self._players: tuple[Fleet, EnvManager] | None = None
        """Once the engines are there."""
        self.learner: Learner | None = None
        """Once the trainer is there too."""

    async def run(self) -> None:
        """To the last step. Raises JobStopped, or the error of whatever broke."""
        await self._until_done(self._train())

    async def evaluate(self) -> None:
        """Play the held-out tasks once with the model as it is. There is no trainer."""
        await self._until_done(self._only_evaluate())

    def stop(self) -> None:
        """Stop after the step under way, with a checkpoint to resume from; at once where nothing is trained (yet)."""
        if self.learner is not None:
            self.learner.stop()
        else:
            self.stop_now("stopped by the user, before training began")

    def stop_now(self, reason: str) -> None:
        """Give up at once; the last checkpoint and the batches since are what a resumed job goes on from."""
        self.supervisor.fail(Interrupted(reason))

    def lost(self, engine: str, reason: str) -> None:
        """The cluster saw this engine die, though nobody may be calling it now."""
        if self._players is not None:
            fleet, _ = self._players
            if engine in fleet.slots:
                fleet.down(fleet.slots[engine], reason)
            for judge in self.world.judges:
                judge.lost(engine, reason)

    async def _until_done(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            main = self.supervisor.spawn(work)
            self.supervisor.spawn(self.watchdog.run(), background=True)
            await asyncio.wait([main, self.supervisor.failed], return_when=asyncio.FIRST_COMPLETED)
            if self.supervisor.failed.done():
                self.supervisor.failed.result()
        finally:
            await self.supervisor.close()
            self.waits.close()

    async def _train(self) -> None:
        job, world = self._job, self.world
        began = self.log.emit(schema.Starting(engines=len(world.engines)))
        waiting = self.waits.on("trainer.start", job.limits.start_s)
        with boundary(ClusterError, "start"):
            made: tuple[Trainer, dict[EngineSpec, Engine]] = await asyncio.gather(
                waiting.guard("trainer", world.cluster.trainer()), self._start_engines()
            )
        self.log.emit(schema.Started(engines=[spec.id for spec in world.engines], cause=began))
        room = Room(self._context)
        trainer = TrainerDriver(self._context, world.cluster, world.journal, room, made[0])
        fleet, affinity, manager = self._connect(made[1], self._repair)
        rollout = Rollout(self._context, world, affinity, fleet)
        rollout.players = GroupPlayer(self._context, manager, fleet, rollout)
        swaps = plan(job.rollout.swap, job.rollout.rolling)
        self.learner = Learner(
            job,
            swaps,
            fleet,
            rollout,
            trainer,
            WeightDriver(swaps, trainer, fleet, rollout, world.store, self.supervisor, self.waits, self.log),
            Evaluation(self._context, world.task_sets, affinity, manager),
            world.journal,
            world.recorder,
            room,
            self.supervisor,
            self.waits,
            self.log,
        )
        await self.learner.run(began)

    async def _repair(self, version: WeightVersion) -> WeightManifest:
        assert self.learner is not None, "weights were pushed before there was anyone to push them"
        return await self.learner.weights.repair(version)

    async def _only_evaluate(self) -> None:
        began = self.log.emit(schema.Starting(engines=len(self.world.engines)))
        with boundary(ClusterError, "start"):
            engines = await self._start_engines()
        self.log.emit(schema.Started(engines=[spec.id for spec in engines], cause=began))
        _, affinity, manager = self._connect(engines, _nobody_pushes)
        evaluation = Evaluation(self._context, self.world.task_sets, affinity, manager)
        await self.waits.on("evaluation").guard("the model as it is", evaluation.run("eval0"))
        self.log.emit(schema.Finished(steps=0))

    async def _start_engines(self) -> dict[EngineSpec, Engine]:
        """All at once, those of judges too. Returns the policy's."""
        cluster, judges = self.world.cluster, self.world.judges
        specs = [*self.world.engines, *(spec for judge in judges for spec in judge.specs)]
        waiting = self.waits.on("engine.start", self._job.limits.start_s)
        engines = await asyncio.gather(*(waiting.guard(spec.id, cluster.engine(spec)) for spec in specs))
        made = dict(zip(specs, engines, strict=True))
        for judge in judges:
            judge.begin(self._context, cluster, {spec: made.pop(spec) for spec in judge.specs})
        return made

    def _connect(self, engines: dict[EngineSpec, Engine], repair: Repair) -> tuple[Fleet, AffinityDriver, EnvManager]:
        """What plays: over the engines, with the environments and rewards of this world."""
        context, world = self._context, self.world
        affinity = AffinityDriver(world.affinity, self.log)
        fleet = Fleet(context, world.cluster, engines, repair, affinity.engines_changed)
        self.supervisor.spawn(fleet.watch(), background=True)
        manager = EnvManager(context, world, fleet, Proxy(context, fleet, worked=affinity.worked))
        self._players = fleet, manager
        for spec in world.further_engines:
            fleet.expect(spec)
        return fleet, affinity, manager

    def _parts(self) -> Sequence[Part]:
        """What the job consists of now, for the watchdog."""
        if self._players is None:
            return ()
        fleet, manager = self._players
        engines = [*fleet.parts(), *(part for judge in self.world.judges for part in judge.parts())]
        if self._job.rollout.stepping != "asynchronous":  # in lockstep all wait for the slowest, by design
            return engines
        return engines + manager.movement.parts(fleet.engine_of())


async def _nobody_pushes(version: WeightVersion) -> WeightManifest:
    raise WeightError(f"version {version}: there is no trainer to push it")

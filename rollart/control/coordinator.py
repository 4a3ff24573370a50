"""One life of a job: starts the workers, connects the drivers, and runs them until the work is done or they fail.

The rollout is played here, or by shards (`cluster.coordinators`): nothing else differs.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollart.config.job import Job
from rollart.control.affinity import AffinityDriver
from rollart.control.context import JobContext
from rollart.control.evaluation import Evaluation
from rollart.control.learner import Learner
from rollart.control.rollout import Rollout
from rollart.control.room import Room
from rollart.control.shards import Shards
from rollart.control.share import Share
from rollart.control.trainer import TrainerDriver
from rollart.control.watchdog import Watchdog
from rollart.control.weights import WeightDriver
from rollart.control.world import RolloutWorld, World
from rollart.errors import ClusterError, Interrupted, WeightError, boundary
from rollart.events import schema
from rollart.events.log import LogHandle
from rollart.policy.swap import plan
from rollart.types import WeightManifest, WeightVersion


class Coordinator:
    """One incarnation of a job. After a crash, make a new one over the same journal."""

    def __init__(self, job: Job, world: World, log: LogHandle) -> None:
        self._job = job
        self.world = world
        self.log = log
        self._context = JobContext(job, log)
        self.waits = self._context.waits
        self.supervisor = self._context.supervisor
        self.playing: Share | Shards = (
            Share(self._context, world.rollout)
            if isinstance(world.rollout, RolloutWorld)
            else Shards(self._context, log, world.rollout)
        )
        self.watchdog = Watchdog(self._context, self.playing.parts, stalled=self.playing.stalled)
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

    def lost(self, worker: str, reason: str) -> None:
        """The cluster saw this worker die, though nobody may be calling it now."""
        self.playing.lost(worker, reason)

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
        job, world, playing = self._job, self.world, self.playing
        began = self.log.emit(schema.Starting(engines=len(world.engines)))
        waiting = self.waits.on("trainer.start", job.limits.start_s)
        with boundary(ClusterError, "start"):
            made, _ = await asyncio.gather(waiting.guard("trainer", world.cluster.trainer()), playing.start())
        self.log.emit(schema.Started(engines=[spec.id for spec in world.engines], cause=began))
        room = Room(self._context)
        trainer = TrainerDriver(self._context, world.cluster, world.journal, room, made)
        affinity = AffinityDriver(world.affinity, self.log)
        playing.connect(affinity, self._repair)
        rollout = Rollout(self._context, world, affinity, playing.fleet)
        rollout.players = playing.player(rollout)
        swaps = plan(job.rollout.swap, job.rollout.rolling)
        self.learner = Learner(
            job,
            swaps,
            playing.fleet,
            rollout,
            trainer,
            WeightDriver(swaps, trainer, playing.fleet, rollout, world.store, self.supervisor, self.waits, self.log),
            Evaluation(self._context, world.task_sets, affinity, playing),
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
        world, playing = self.world, self.playing
        began = self.log.emit(schema.Starting(engines=len(world.engines)))
        with boundary(ClusterError, "start"):
            await playing.start()
        self.log.emit(schema.Started(engines=[spec.id for spec in world.engines], cause=began))
        affinity = AffinityDriver(world.affinity, self.log)
        playing.connect(affinity, _nobody_pushes)
        evaluation = Evaluation(self._context, world.task_sets, affinity, playing)
        await self.waits.on("evaluation").guard("the model as it is", evaluation.run("eval0"))
        self.log.emit(schema.Finished(steps=0))


async def _nobody_pushes(version: WeightVersion) -> WeightManifest:
    raise WeightError(f"version {version}: there is no trainer to push it")

"""Runs one job from its journal's last word to its last step. Wires the drivers together; `learn` is the loop.

A fresh job and a resumed one start alike: load the last checkpoint (a fresh job has none), train again on the batches
written since, bring the engines to those weights, go on.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollart.config.job import Job
from rollart.control.affinity import AffinityDriver
from rollart.control.env_manager import Agent, EnvManager, Staleness
from rollart.control.evaluation import Evaluation
from rollart.control.fleet import Fleet
from rollart.control.proxy import Proxy
from rollart.control.rollout import Rollout, StopAsked
from rollart.control.room import Room
from rollart.control.supervisor import TaskSupervisor
from rollart.control.trainer import TrainerDriver
from rollart.control.waits import Waits
from rollart.control.watchdog import Watchdog
from rollart.control.weights import WeightDriver
from rollart.errors import ClusterError, Interrupted, JobStopped, StoreFull, boundary
from rollart.events import schema
from rollart.events.log import LogHandle
from rollart.policy.affinity import Affinity
from rollart.policy.swap import SwapPlan, plan
from rollart.policy.training import set_aside_whole, trained_on
from rollart.ports import (
    Cluster,
    Engine,
    EnvHost,
    Journal,
    Recorder,
    RewardBackend,
    TaskSet,
    Tokenizer,
    Trainer,
    WeightStore,
)
from rollart.types import Batch, Checkpoint, EngineSpec, StepResult, WeightManifest, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything outside the control plane that a job touches, behind ports."""

    cluster: Cluster
    engines: tuple[EngineSpec, ...]
    host: EnvHost
    rewards: RewardBackend
    tokenizer: Tokenizer
    task_sets: Mapping[str, TaskSet]
    store: WeightStore
    journal: Journal
    affinity: Affinity
    agent: Agent | None = None
    further_engines: tuple[EngineSpec, ...] = ()
    """May join while the job runs."""
    recorder: Recorder | None = None
    """Keeps finished trajectories, where somebody wants to read them."""


def committed(checkpoint: Checkpoint) -> schema.Checkpoint:
    """What the log says of a checkpoint."""
    return schema.Checkpoint(
        step=checkpoint.step,
        ready=[group.id for group in checkpoint.ready],
        open=[group.id for group in checkpoint.open],
    )


class Coordinator:
    """One incarnation of a job. After a crash, make a new one over the same journal."""

    def __init__(self, job: Job, world: World, log: LogHandle) -> None:
        self._job = job
        self._world = world
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._plan: SwapPlan = plan(job.rollout.swap, job.rollout.rolling)
        self.waits = Waits()
        self.supervisor = TaskSupervisor()
        self._room = Room(self.waits, log, limit_s=job.limits.store_full_s)
        self.watchdog = Watchdog(self.waits, log, stall_s=job.limits.stall_s, lag_s=job.limits.lag_s)
        self._evaluating = self.waits.on("evaluation")
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        """Done when the user wants the job to stop."""

    async def run(self) -> None:
        """To the last step. Raises JobStopped, or the error of whatever broke."""
        await self._until_done(self._main())

    async def evaluate(self) -> None:
        """Play the held-out tasks once with the model as it is. There is no trainer."""
        await self._until_done(self._only_evaluate())

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

    async def _main(self) -> None:
        resumed = await self._assemble(training=True)
        checkpoint = self._world.journal.latest()
        if checkpoint is not None:
            batches = list(self._world.journal.batches(checkpoint.step))
            results = await self.trainer.resume(checkpoint.trainer, batches)
            self.rollout.restore(checkpoint, batches)
            self._log.emit(
                schema.Resumed(
                    step=self.trainer.version,
                    checkpoint=checkpoint.step,
                    ready=[group.id for group in checkpoint.ready],
                    open=[group.id for group in checkpoint.open],
                    out=self.rollout.health.out,
                    cause=resumed,
                ),
            )
            self.rollout.end_superseded()
            for batch, result in zip(batches, results, strict=True):
                self._record(batch, result)
        if self.trainer.version:
            self.weights.publish(self.trainer.version)
            await self.weights.to(self.trainer.version)
        await self._checkpoint()
        try:
            if self._job.evaluation.first and self.trainer.version == 0:
                await self._evaluate(0)
            if self.trainer.version < self._job.train.steps:
                self.rollout.go_on()
            await self.learn()
        except StopAsked:
            await self._checkpoint()
            self.rollout.end()
            self._log.emit(schema.Interrupted(step=self.trainer.version))

    async def _only_evaluate(self) -> None:
        await self._assemble(training=False)
        await self._evaluating.guard("the model as it is", self.evaluation.run("eval0"))
        self._log.emit(schema.Finished(steps=0))

    def stop(self) -> None:
        """Stop after the step under way, with a checkpoint to resume from; at once where nothing is trained (yet)."""
        if hasattr(self, "weights"):
            self.rollout.stop()
            if not self._stopped.done():
                self._stopped.set_result(None)
        else:
            self.stop_now("stopped by the user, before anything was trained")

    def stop_now(self, reason: str) -> None:
        """Give up at once; the last checkpoint and the batches since are what a resumed job goes on from."""
        self.supervisor.fail(Interrupted(reason))

    def lost(self, engine: str, reason: str) -> None:
        """The cluster saw this engine die, though nobody may be calling it now."""
        if hasattr(self, "fleet") and engine in self.fleet.slots:
            self.fleet.down(self.fleet.slots[engine], reason)

    async def learn(self) -> None:
        """The steps of the job: batch, weights of the step before, train, publish."""
        for step in range(self.trainer.version, self._job.train.steps):
            await self.weights.ready_for(step)
            batch = await self.rollout.batch(step)
            await self._write(f"batch {step}", partial(self._world.journal.write_batch, batch))
            self._log.emit(schema.Written(step=step))
            if self._plan.before_step:
                await self.weights.to(step)
            result = await self._step(batch)
            self.weights.publish(result.version)
            if self.trainer.stuck:
                await self._checkpoint()
                raise JobStopped(self.trainer.stuck)
            if self._plan.after_step:
                await self.weights.to(result.version)
            last = result.version == self._job.train.steps
            if last or result.version % self._job.checkpoint.every == 0:
                await self._checkpoint()
            if last:
                self.rollout.end()
            elif self._job.evaluation.every and result.version % self._job.evaluation.every == 0:
                self.supervisor.spawn(self.evaluation.run(f"eval{result.version}"))
        if self._job.evaluation.every:
            await self.weights.to(self.trainer.version)
            await self._evaluate(self.trainer.version)
        self._log.emit(schema.Finished(steps=self._job.train.steps))

    async def _step(self, batch: Batch) -> StepResult:
        began = self._log.emit(schema.StepStart(step=batch.step, serving=self.fleet.serving))
        began_s = self._loop.time()
        result = await self.trainer.train(batch, began)
        self._record(batch, result)
        self._log.emit(
            schema.StepEnd(
                step=batch.step,
                version=result.version,
                train_s=round(self._loop.time() - began_s, 6),
                metrics=dict(result.metrics),
                cause=began,
            ),
        )
        return result

    def _record(self, batch: Batch, result: StepResult) -> None:
        if self._world.recorder is not None:
            self._world.recorder.trained(trained_on(batch, result.set_aside))
            for group in set_aside_whole(batch, result.set_aside):
                self._world.recorder.ended(group, "failed")

    async def _checkpoint(self) -> None:
        """Trainer, task cursor, buffer and open groups, together. Called between two batches."""
        await self.weights.pushed(self.trainer.version - 1)  # a trainer restored from this checkpoint could not push it
        reference = await self.trainer.save()

        def commit() -> None:
            """Of what there is when there is room for it."""
            checkpoint = self.rollout.snapshot(self.trainer.version, reference)
            self._world.journal.commit(checkpoint)
            self._log.emit(committed(checkpoint))

        await self._write(f"checkpoint {self.trainer.version}", commit)
        with suppress(StoreFull):
            self._log.flush(durable=True)  # a resumed job would say it again

    async def _write(self, what: str, write: Callable[[], None]) -> None:
        """Into the journal; again, where there is no room. What it knows, the events before it know as well."""
        while True:
            try:
                self._log.flush(durable=True)
                write()
            except StoreFull as error:
                await self._room.wait(what, error)
            else:
                self._room.found(what)
                return

    async def _evaluate(self, version: WeightVersion) -> None:
        """Play the held-out tasks to the end. Raises StopAsked when the user stops the job before."""
        task = self.supervisor.spawn(self.evaluation.run(f"eval{version}"))
        done = asyncio.wait([task, self._stopped], return_when=asyncio.FIRST_COMPLETED)
        await self._evaluating.guard(f"version {version}", done)
        if not task.done():
            raise StopAsked

    # --- wiring -----------------------------------------------------------------------------------------------

    async def _assemble(self, *, training: bool) -> int:
        """Start the workers, all at once, and connect the drivers."""
        job, world, limits = self._job, self._world, self._job.limits
        began = self._log.emit(schema.Starting(engines=len(world.engines)))
        starts = self.waits.on("engine.start", limits.start_s)
        trains = self.waits.on("trainer.start", limits.start_s)
        with boundary(ClusterError, "start"):
            trainers: list[Trainer]
            engines: list[Engine]
            trainers, engines = await asyncio.gather(
                asyncio.gather(*(trains.guard("trainer", world.cluster.trainer()) for _ in range(training))),
                asyncio.gather(*(starts.guard(spec.id, world.cluster.engine(spec)) for spec in world.engines)),
            )
        self._log.emit(schema.Started(engines=[spec.id for spec in world.engines], cause=began))
        self.fleet = Fleet(
            dict(zip(world.engines, engines, strict=True)),
            world.cluster,
            self.supervisor,
            self.waits,
            self._log,
            restarts=limits.engine_restarts,
            backoff_s=limits.backoff_s,
            swap_limit_s=limits.swap_s,
            start_limit_s=limits.start_s,
            progress_limit_s=limits.progress_s,
            look_s=min(limits.progress_s, limits.lag_s) / 4,
            repair=self._repair,
        )
        self.supervisor.spawn(self.fleet.watch(), background=True)
        proxy = Proxy(self.fleet, self.supervisor, self.waits, self._log, generate_limit_s=limits.generate_s)
        affinity = AffinityDriver(world.affinity, self.fleet, self._log)
        self.rollout = Rollout(
            job, world.task_sets, affinity, self.fleet, self.supervisor, self.waits, self._log, world.recorder
        )
        manager = EnvManager(
            job,
            world.host,
            proxy,
            world.rewards,
            world.tokenizer,
            Staleness(serving=lambda: self.fleet.serving, stale=self.rollout.stale),
            self.supervisor,
            self.waits,
            self._log,
            world.agent,
            world.recorder,
        )
        self.rollout.manager = manager
        self.watchdog.parts = self.fleet.parts
        if job.rollout.stepping == "asynchronous":  # in lockstep all wait for the slowest, by design
            self.watchdog.parts = lambda: self.fleet.parts() + manager.movement.parts(self.fleet.engine_of())
        for spec in world.further_engines:
            self.fleet.expect(spec)
        self.evaluation = Evaluation(job, world.task_sets, affinity, manager, self._log)
        if trainers:
            self._drive_trainer(trainers[0])
            self.weights = WeightDriver(
                self._plan, self.trainer, self.fleet, self.rollout, world.store, self.supervisor, self.waits, self._log
            )
        return began

    def _drive_trainer(self, trainer: Trainer) -> None:
        limits = self._job.limits
        self.trainer = TrainerDriver(
            trainer,
            self._world.cluster,
            self._world.journal,
            self._room,
            self.waits,
            self._log,
            restarts=limits.trainer_restarts,
            backoff_s=limits.backoff_s,
            step_limit_s=limits.train_s,
            start_limit_s=limits.start_s,
        )

    async def _repair(self, version: WeightVersion) -> WeightManifest:
        return await self.weights.repair(version)

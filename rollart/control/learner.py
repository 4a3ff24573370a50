"""The training of one job: from its journal's last word to its last step. `learn` is the loop.

A fresh job and a resumed one start alike: load the last checkpoint (a fresh job has none), train again on the batches
written since, bring the engines to those weights, go on.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rollart.config.job import Job
from rollart.control.evaluation import Evaluation
from rollart.control.rollout import Rollout, Serves, StopAsked
from rollart.control.room import Room
from rollart.control.supervisor import TaskSupervisor
from rollart.control.trainer import TrainerDriver
from rollart.control.waits import Waits
from rollart.control.weights import WeightDriver
from rollart.errors import JobStopped, StoreFull
from rollart.events import schema
from rollart.events.log import LogHandle
from rollart.policy.swap import SwapPlan
from rollart.policy.training import set_aside_whole, trained_on
from rollart.ports import Journal, Recorder
from rollart.types import Batch, Checkpoint, StepResult, WeightVersion


def committed(checkpoint: Checkpoint) -> schema.Checkpoint:
    """What the log says of a checkpoint."""
    return schema.Checkpoint(
        step=checkpoint.step,
        ready=[group.id for group in checkpoint.ready],
        open=[group.id for group in checkpoint.open],
    )


class Learner:
    def __init__(
        self,
        job: Job,
        plan: SwapPlan,
        fleet: Serves,
        rollout: Rollout,
        trainer: TrainerDriver,
        weights: WeightDriver,
        evaluation: Evaluation,
        journal: Journal,
        recorder: Recorder | None,
        room: Room,
        supervisor: TaskSupervisor,
        waits: Waits,
        log: LogHandle,
    ) -> None:
        self._job = job
        self._plan = plan
        self._fleet = fleet
        self.rollout = rollout
        self.trainer = trainer
        self.weights = weights
        self._evaluation = evaluation
        self._journal = journal
        self._recorder = recorder
        self._room = room
        self._supervisor = supervisor
        self._evaluating = waits.on("evaluation")
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        """Done when the user wants the job to stop."""

    def stop(self) -> None:
        """Stop after the step under way, with a checkpoint to resume from."""
        self.rollout.stop()
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def run(self, cause: int) -> None:
        """To the last step, from wherever the journal ends. `cause`: the event that began this life of the job."""
        checkpoint = self._journal.latest()
        if checkpoint is not None:
            batches = list(self._journal.batches(checkpoint.step))
            results = await self.trainer.resume(checkpoint.trainer, batches)
            self.rollout.restore(checkpoint, batches)
            self._log.emit(
                schema.Resumed(
                    step=self.trainer.version,
                    checkpoint=checkpoint.step,
                    ready=[group.id for group in checkpoint.ready],
                    open=[group.id for group in checkpoint.open],
                    out=self.rollout.health.out,
                    cause=cause,
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

    async def learn(self) -> None:
        """The steps of the job: batch, weights of the step before, train, publish."""
        for step in range(self.trainer.version, self._job.train.steps):
            await self.weights.ready_for(step)
            batch = await self.rollout.batch(step)
            await self._write(f"batch {step}", partial(self._journal.write_batch, batch))
            self._log.emit(schema.Written(step=step))
            if self._plan.before_step:
                await self.weights.batch_taken(step)
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
                self._supervisor.spawn(self._evaluation.run(f"eval{result.version}"))
        if self._job.evaluation.every:
            await self.weights.to(self.trainer.version)
            await self._evaluate(self.trainer.version)
        self._log.emit(schema.Finished(steps=self._job.train.steps))

    async def _step(self, batch: Batch) -> StepResult:
        began = self._log.emit(schema.StepStart(step=batch.step, serving=self._fleet.serving))
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
        if self._recorder is not None:
            self._recorder.trained(trained_on(batch, result.set_aside))
            for group in set_aside_whole(batch, result.set_aside):
                self._recorder.ended(group, "failed")

    async def _checkpoint(self) -> None:
        """Trainer, task cursor, buffer and open groups, together. Called between two batches."""
        await self.weights.pushed(self.trainer.version - 1)  # a trainer restored from this checkpoint could not push it
        reference = await self.trainer.save()

        def commit() -> None:
            """Of what there is when there is room for it."""
            checkpoint = self.rollout.snapshot(self.trainer.version, reference)
            self._journal.commit(checkpoint)
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
        task = self._supervisor.spawn(self._evaluation.run(f"eval{version}"))
        done = asyncio.wait([task, self._stopped], return_when=asyncio.FIRST_COMPLETED)
        await self._evaluating.guard(f"version {version}", done)
        if not task.done():
            raise StopAsked

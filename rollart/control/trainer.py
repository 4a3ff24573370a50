"""Drives the trainer, and brings it back when it is lost.

Every batch is in the journal before its step. A trainer that is lost is started again, loads the last checkpoint, and
is given the batches since then in order, under the same version numbers; then it goes on where it was. So is one that
asks for it (StartAgain), which does not count as a failure. A trainer that finds no room to write is not lost: the
write is tried again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollart.control.context import JobContext
from rollart.control.room import Room
from rollart.errors import (
    BoundaryError,
    ClusterError,
    JobStopped,
    StartAgain,
    StoreFull,
    TrainerError,
    VersionGone,
    boundary,
)
from rollart.events import schema
from rollart.policy.redundancy import backoff_s
from rollart.policy.training import Reaction, in_vain, reaction, set_aside_whole
from rollart.ports import Cluster, Journal, Trainer
from rollart.types import Batch, StepResult, WeightManifest, WeightVersion

T = TypeVar("T")
IDLE_STEPS = 5
"""Steps in a row without a token to train on, after which the user is told."""


class TrainerDriver:
    def __init__(self, context: JobContext, cluster: Cluster, journal: Journal, room: Room, trainer: Trainer) -> None:
        limits = context.job.limits
        self._trainer = trainer
        self._cluster = cluster
        self._journal = journal
        self._room = room
        self._log = context.log
        self._warn = context.warn
        self._limits = limits
        self._working = context.waits.on("trainer", limits.train_s)
        self._starts = context.waits.on("trainer.start", limits.start_s)
        self._lock = asyncio.Lock()
        self._lives = 0
        self._lost_in_a_row = 0
        self._idle_in_a_row = 0
        self._in_vain_in_a_row = 0
        self.stuck = ""
        """Why the job should stop: steps have come to nothing for too long."""
        self.version: WeightVersion = 0
        """Steps done."""
        self._oldest: WeightVersion = 0
        """What can be published: the current version and the one before, if this trainer made it."""

    async def train(self, batch: Batch, cause: int) -> StepResult:
        """One step; `cause` is its event. What became of steps that changed nothing is said in `stuck`."""
        result = await self._train(batch, cause)
        # where data was set aside, it was not for its rewards that nothing was left; `in_vain` tells of that
        idle = not result.set_aside and result.metrics.get("perf/tokens") == 0.0
        self._idle_in_a_row = self._idle_in_a_row + 1 if idle else 0
        if self._idle_in_a_row == IDLE_STEPS:
            self._warn(
                f"steps {batch.step - IDLE_STEPS + 1} to {batch.step} trained on nothing: in every group all members "
                "earned the same. If that is the best reward, the job is done. If not, the policy may have lost the "
                "form of its answers: go back to an earlier checkpoint with a lower train.lr or rollout.staleness, "
                "or with a train.kl_coef"
            )
        why = in_vain(batch, result)
        self._in_vain_in_a_row = self._in_vain_in_a_row + 1 if why else 0
        text = f"the last {self._in_vain_in_a_row} steps changed nothing: {why}"
        match reaction(self._in_vain_in_a_row):
            case Reaction.WARN:
                self._warn(text)
            case Reaction.STOP:
                self.stuck = (
                    f"{text}. The weights are good, and so is the checkpoint: go on from it with a lower train.lr or "
                    "train.grad_clip, or without train.bf16; where data was set aside, set_aside.jsonl has it"
                )
        return result

    async def _train(self, batch: Batch, cause: int) -> StepResult:
        result = await self._call(f"step {batch.step}", lambda trainer: trainer.train_step(batch))
        self.version = result.version
        self._oldest = max(self._oldest, self.version - 1)
        self._lost_in_a_row = 0
        if result.set_aside:
            self._log.emit(
                schema.StepAside(
                    step=batch.step,
                    trajectories=[(str(one.trajectory), one.reason) for one in result.set_aside],
                    groups=set_aside_whole(batch, result.set_aside),
                    cause=cause,
                ),
            )
        return result

    async def publish(self, version: WeightVersion, *, newest: bool = False) -> WeightManifest:
        """Push a version. Raises VersionGone where no trainer holds it any more or, where only the `newest` is of use,
        when there is a newer one."""

        async def push(trainer: Trainer) -> WeightManifest:
            # Asked at each try: a trainer that was rebuilt from a later checkpoint may not hold it any more, and while
            # there was no trainer, or no room, a step may have been made.
            if version < self._oldest:
                raise VersionGone(f"version {version} cannot be pushed again by a trainer at {self.version}")
            if newest and version < self.version:
                raise VersionGone(f"version {version} was not pushed before there was version {self.version}")
            return await trainer.publish(version)

        return await self._call(f"publish {version}", push, "publish" if newest else "")

    async def save(self) -> str:
        return await self._call("save", lambda trainer: trainer.save())

    async def resume(self, reference: str, batches: list[Batch]) -> list[StepResult]:
        """A resumed job: load, then train again on what was written since."""
        results: list[StepResult] = []
        self.version = await self._call("restore", lambda trainer: trainer.restore(reference))
        self._oldest = self.version
        for batch in batches:
            began = self._log.emit(schema.Replay(step=batch.step, groups=[group.id for group in batch.groups]))
            began_s = asyncio.get_running_loop().time()
            result = await self._train(batch, began)
            results.append(result)
            self._log.emit(
                schema.Replayed(
                    step=batch.step,
                    version=result.version,
                    train_s=round(asyncio.get_running_loop().time() - began_s, 6),
                    metrics=dict(result.metrics),
                    cause=began,
                ),
            )
        return results

    async def _call(self, who: str, work: Callable[[Trainer], Awaitable[T]], what: str = "") -> T:
        """Do it; as often as it takes to have a trainer that lives long enough. `what`: what finds no room to be
        written, where another call may go on writing it."""
        what = what or who
        while True:
            async with self._lock:
                life = self._lives
            try:
                with boundary(TrainerError, who):
                    value = await self._working.guard(who, work(self._trainer))
            except StoreFull as error:
                await self._room.wait(what, error)
                continue
            except VersionGone:
                raise
            except BoundaryError as error:
                await self._recover(life, error)
                continue
            if life == self._lives:
                self._room.found(what)
                return value
            # that trainer was given up meanwhile, and its successor lacks what it just did

    async def _recover(self, life: int, error: BoundaryError) -> None:
        async with self._lock:
            if life != self._lives:
                return  # another call noticed first, and the new trainer is ready
            self._lives += 1
            cause = self._log.emit(schema.TrainerDown(reason=str(error)))
            while True:
                if not isinstance(error, StartAgain):
                    await self._count_loss(error)
                try:
                    await self._rebuild(cause)
                    break
                except BoundaryError as another:
                    error = another
            self._log.emit(schema.TrainerUp(version=self.version, cause=cause))

    async def _count_loss(self, error: BoundaryError) -> None:
        """Wait before the next start, longer each time; the last time there is none."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row > self._limits.trainer_restarts:
            raise JobStopped(
                f"the trainer was lost {self._lost_in_a_row} times in a row, the last time: {error}; "
                "the last checkpoint is whole"
            )
        await asyncio.sleep(backoff_s(self._limits.backoff_s, self._lost_in_a_row))

    async def _rebuild(self, cause: int) -> None:
        """A new trainer with the state the old one had after its last finished step."""
        checkpoint = self._journal.latest()
        with boundary(ClusterError, "trainer start"):
            trainer = await self._starts.guard("trainer", self._cluster.trainer())
        with boundary(TrainerError, "restore"):
            reference = checkpoint.trainer if checkpoint else ""
            version = await self._working.guard("restore", trainer.restore(reference))
            for batch in self._journal.batches(version):
                if batch.step >= self.version:
                    break
                self._log.emit(schema.Replay(step=batch.step, groups=[group.id for group in batch.groups], cause=cause))
                await self._working.guard(f"replay {batch.step}", trainer.train_step(batch))
        self._trainer = trainer
        self._oldest = max(version, self.version - 1)

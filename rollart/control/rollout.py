"""Feeds the rollout: admits groups while there is room, has them played, and hands out batches.

Invariants: never more groups alive than slots; every admitted group is open or ready until it ends exactly once:
trained, filtered, stale, failed or surplus. `feed` is called whenever room may have appeared; it never waits.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollart.control.affinity import AffinityDriver
from rollart.control.buffer import SampleBuffer
from rollart.control.context import JobContext
from rollart.control.draw import draw
from rollart.control.health import Health
from rollart.control.waits import Signal
from rollart.control.world import World
from rollart.errors import JobStopped, TaskError
from rollart.events import schema
from rollart.policy.admission import Slots, is_stale
from rollart.policy.mix import Mix, shares
from rollart.policy.redundancy import surplus
from rollart.types import Batch, Checkpoint, Group, OpenGroup, Status, Task, Trajectory, WeightVersion

ATTEMPTS_PER_LIFE = 100
"""Each life of the coordinator numbers its attempts from its own hundred on: no attempt's id is ever used twice."""


class StopAsked(Exception):
    """The user wants the job to stop, with a checkpoint."""


class Serves(Protocol):
    """Who knows the version that all engines serve."""

    @property
    def serving(self) -> WeightVersion: ...


class Players(Protocol):
    """Who plays groups. Each is reported once to the rollout, unless it was taken back before."""

    def play(self, group_id: str, task: Task, order: tuple[str, ...], *, first: int, cause: int) -> None:
        """Begin a group. `first`: the number of its members' first attempts."""

    def stop(self, group_id: str, status: Status, reason: str) -> None:
        """Take a group back."""

    def sweep(self, serving: WeightVersion) -> list[str]:
        """Take back the groups that are too old."""

    async def any_too_old(self, serving: WeightVersion) -> bool:
        """Whether groups are under way that are too old when this version serves."""

    async def drain(self) -> None:
        """Begin no further attempt, and wait until none runs."""

    def reopen(self) -> None:
        """Go on."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group that was admitted, and is played."""

    id: str
    task: Task
    pool: str
    admitted_s: float


class Rollout:
    def __init__(self, context: JobContext, world: World, affinity: AffinityDriver, fleet: Serves) -> None:
        job, rollout, waits = context.job, context.job.rollout, context.waits
        self._job = job
        self._log = context.log
        self._warn = context.warn
        self._supervisor = context.supervisor
        self._recorder = world.recorder
        self._task_sets = world.task_sets
        self._affinity = affinity
        self._fleet = fleet
        self.players: Players
        """Set once: they report to this."""
        self._loop = asyncio.get_running_loop()
        quotas = {task.name: task.quota for task in job.tasks}
        self.mix = Mix(
            shares({task.name: task.weight for task in job.tasks}, quotas, rollout.groups_per_step),
            rollout.groups_per_step,
            rollout.share_tolerance,
            quotas,
        )
        self.health = Health(context, self.mix)
        self.buffer = SampleBuffer(self.mix, bound=rollout.staleness)
        self.open: dict[str, Admitted] = {}
        """Groups that are played, in the order in which they were admitted."""
        self.slots = Slots(job.slots)
        self._live = rollout.recheck == "live"
        self._bound = rollout.staleness
        self._refill_limit = int(rollout.refill_factor * rollout.groups_per_step)
        self._filling = waits.on("a batch")
        self._next_group = 0
        self._incarnation = 0
        self._refills = 0
        self._short = 0
        self._unchecked = True
        """A ready group may be too old: after a swap, a restart, or when an old group became ready."""
        self._begun = False
        self._stopping = False
        self._closed = False
        """Draining: nothing new is admitted."""
        self._sated = False
        """Bound 0 and the batch is formed: what starts now would be too old for the next one."""
        self._swapped_s = self._loop.time()
        self._changed = Signal()
        """A batch may be formed now, or the last attempt has ended."""
        self._reopened: list[OpenGroup] = []
        self._superseded: list[tuple[str, Task]] = []

    # --- admission ------------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Admit groups while there is room."""
        if not self._begun or self._closed or self._sated:
            return
        while self.slots.room > 0 and self._refills < self._refill_limit:
            probed = self.health.to_probe(self._loop.time())
            if probed is None and self.mix.empty:
                return  # until a probe is due
            self._admit_next(probed)

    def _admit_next(self, probed: str | None) -> None:
        """The next group of the mix, or a probe of a task that is out of the mix."""
        name, index = (probed, self.mix.draw(probed)) if probed is not None else self.mix.next()
        group_id = f"g{self._next_group}r{self._incarnation}" if self._incarnation else f"g{self._next_group}"
        self._next_group += 1
        if probed is not None:
            self.health.probing(name, group_id)
        try:
            task = draw(self._task_sets[name], name, index)
        except TaskError as error:
            self.mix.not_drawn(name)
            self._try_again_in(self.health.draw_failed(name, index, group_id, str(error), self._loop.time()))
            self._changed.give()
        else:
            self._admit(group_id, task)

    def _try_again_in(self, wait_s: float | None) -> None:
        """A task is out of the mix, and may be tried again after this time."""

        async def wait(seconds: float) -> None:
            await asyncio.sleep(seconds)
            self.feed()

        if wait_s is not None:
            self._supervisor.spawn(wait(wait_s))

    def _admit(self, group_id: str, task: Task) -> None:
        first = self._incarnation * ATTEMPTS_PER_LIFE
        self.slots.admit(group_id)
        order = self._affinity.admit(task.domain)
        self.open[group_id] = Admitted(group_id, task, order[0], self._loop.time())
        cause = self._log.emit(schema.Admit(group=group_id, task=task.id, serving=self._fleet.serving))
        self.players.play(group_id, task, order, first=first, cause=cause)

    # --- what the players report -----------------------------------------------------------------------------

    def attempted(self, trajectory: Trajectory) -> None:
        self._affinity.measure(trajectory)
        if trajectory.status is Status.FAILED:
            self.health.attempt_failed(trajectory.task.domain, trajectory.reason)

    def complete(self, group_id: str, done: Group | None, rewards: Sequence[float], cause: int) -> None:
        group = self._closed_group(group_id)
        self.health.group_scored(group.task.domain, group_id, rewards, cause, filtered=done is None)
        if done is None:
            self._end(group_id, group.task, "filtered", cause)
        else:
            self.buffer.ready[group_id] = done
            self._log.emit(
                schema.Ready(
                    group=group_id,
                    born=done.born,
                    members=[str(member.id) for member in done.members],
                    gradient=any(done.advantages),
                    cause=cause,
                ),
            )
            self.mix.took_s(group.task.domain, self._loop.time() - group.admitted_s)
            self._unchecked |= is_stale(done.born, self._fleet.serving, self._bound)
        self._changed.give()
        self.feed()

    def given_up(self, group_id: str, how: str, cause: int) -> None:
        group = self._closed_group(group_id)
        self._end(group_id, group.task, how, cause)
        self.feed()

    def idle(self) -> None:
        self._changed.give()

    def _closed_group(self, group_id: str) -> Admitted:
        """It is not played any more."""
        group = self.open.pop(group_id)
        self._affinity.left(group.task.domain, group.pool)
        return group

    def _end(self, group_id: str, task: Task, how: str, cause: int) -> None:
        """A group is over, untrained. Its slot is free at once."""
        self.slots.died(group_id)
        self.mix.died(task.domain, task.index, again=how in ("stale", "surplus"), stale=how == "stale")
        ended = self._log.emit(schema.Group(group=group_id, task=task.id, how=how, cause=cause))
        if self._recorder is not None:
            self._recorder.ended(group_id, how)
        now_s = self._loop.time()
        if how == "failed":  # how many may fail is the breaker's to say
            self._try_again_in(self.health.group_failed(task.domain, group_id, now_s, ended))
        elif how != "filtered":
            self.health.group_ended(task.domain, group_id, now_s)
        else:
            self._refills += 1
            if self._refills == self._refill_limit:
                self._warn(
                    f"{self._refills} groups were filtered for one batch; it will be formed with what is there: "
                    + self.health.why()
                )
        self._changed.give()

    # --- age ------------------------------------------------------------------------------------------------

    def swapped(self, cause: int) -> None:
        """A swap completed: stop what is now too old, free the slots of what was trained, and go on."""
        version_s = self._loop.time() - self._swapped_s
        self._swapped_s += version_s
        self._sated = False
        self._unchecked = True
        if self._live:
            self._sweep(cause)
            self._evict(cause)
        self.slots.swapped()
        self.health.swapped(version_s, self._bound)
        self.feed()
        self._changed.give()

    def _sweep(self, cause: int) -> None:
        """Stop the groups under way that are too old: in an engine, an environment or a reward."""
        for group_id in self.players.sweep(self._fleet.serving):
            self._end(group_id, self._closed_group(group_id).task, "stale", cause)

    def _evict(self, cause: int) -> None:
        """Throw out the ready groups that are too old."""
        self._unchecked = False
        for group in self.buffer.stale_ready(self._fleet.serving):
            del self.buffer.ready[group.id]
            self._end(group.id, group.task, "stale", cause)

    # --- batches --------------------------------------------------------------------------------------------

    async def batch(self, step: int) -> Batch:
        """The next batch, as soon as there is one. Raises JobStopped when there is nothing to learn from."""
        while True:
            if self._stopping:
                raise StopAsked
            if self._job.rollout.recheck != "start" and self._unchecked:
                self._evict(-1)
                self.feed()
            changed = self._changed.next()  # what changes while shards are asked is not missed
            enough = len(self.buffer.ready) >= self._job.rollout.groups_per_step and not await self._waits_for_late(
                step
            )
            groups = self.buffer.form() if enough else None
            if groups is not None:
                self._short = 0
            elif not self.open:
                if self.slots.room == 0 and self.buffer.ready:
                    groups = self.buffer.form(relaxed=True)
                elif self._refills >= self._refill_limit or self.health.hopeless:
                    groups = self._short_batch()
            if groups is not None:
                return self._formed(step, groups)
            await self._filling.guard(f"step {step}", changed)

    async def _waits_for_late(self, step: int) -> bool:
        """Groups are under way that are too old for the version that is swapped in after this batch, the step's."""
        return self._job.rollout.late == "wait" and await self.players.any_too_old(step)

    def _short_batch(self) -> list[Group]:
        groups = self.buffer.form(short=True)
        self._short += 1
        if groups is None or self._short > self._job.rollout.max_short_batches:
            raise JobStopped(self.health.last_words(self._refills, self._short))
        wanted = self._job.rollout.groups_per_step
        if len(groups) < wanted:
            self._warn(f"a batch of {len(groups)} groups instead of {wanted}")
        else:
            self._warn("a batch without regard to the tasks' shares: some task gives no usable group")
        return groups

    def _formed(self, step: int, groups: list[Group]) -> Batch:
        serving = self._fleet.serving
        self._refills = 0
        self.health.batch_formed()
        self.slots.taken([group.id for group in groups])
        cause = self._log.emit(
            schema.Batch(
                step=step,
                serving=serving,
                groups=[group.id for group in groups],
                tasks=[group.task.id for group in groups],
                born=[group.born for group in groups],
                tokens=sum(member.sampled_tokens for group in groups for member in group.members),
            ),
        )
        self._sated = self._bound == 0
        if self._job.rollout.cancels_surplus:
            self._cancel_surplus(cause)
        self.feed()
        return Batch(step=step, serving=serving, groups=tuple(groups))

    def _cancel_surplus(self, cause: int) -> None:
        """The batch is full: stop what no batch can use, the oldest first, which are the slowest."""
        under_way, ready = list(self.open.values()), list(self.buffer.ready.values())
        wanted = self._job.rollout.groups_per_step
        for group in under_way[: surplus(len(under_way), len(ready), bound=self._bound, groups_per_step=wanted)]:
            self.players.stop(group.id, Status.ABORTED, "surplus: the batch is full")
            self._closed_group(group.id)
            self._end(group.id, group.task, "surplus", cause)
        for done in ready if self._bound == 0 else ():
            del self.buffer.ready[done.id]
            self._end(done.id, done.task, "surplus", cause)

    # --- drain ----------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Close admission and wait until no attempt runs."""
        self._closed = True
        await self.players.drain()

    def reopen(self) -> None:
        self._closed = False
        self.players.reopen()
        self.feed()

    # --- checkpoints ----------------------------------------------------------------------------------------

    def snapshot(self, step: int, trainer: str) -> Checkpoint:
        """Everything of the rollout that a resumed job needs, at one instant."""
        return Checkpoint(
            step=step,
            trainer=trainer,
            mix=self.mix.state(),
            breakers=self.health.state(),
            ready=tuple(self.buffer.ready.values()),
            open=(*self._reopened, *(OpenGroup(id=group.id, task=group.task) for group in self.open.values())),
            next_group=self._next_group,
            incarnation=self._incarnation,
        )

    def restore(self, checkpoint: Checkpoint, replayed: Sequence[Batch]) -> None:
        """Go on from a checkpoint and the batches written since. Call `go_on` to start the open groups."""
        self._incarnation = checkpoint.incarnation + 1
        self._next_group = checkpoint.next_group
        self.mix.restore(checkpoint.mix)
        self.health.restore(checkpoint.breakers, self._loop.time())
        trained = [group for batch in replayed for group in batch.groups]
        done_groups = {group.id for group in trained}
        done_tasks = {group.task.id for group in trained}
        for group in trained:
            self.mix.trained_before(group.task.domain, group.task.index)
        for group in checkpoint.ready:
            if group.task.id not in done_tasks:
                self.slots.admit(group.id)
                self.mix.readmitted(group.task.domain)
                self.buffer.ready[group.id] = group
        self._reopened = [group for group in checkpoint.open if group.task.id not in done_tasks]
        alive = [(group.id, group.task) for group in checkpoint.ready] + [
            (group.id, group.task) for group in checkpoint.open
        ]
        self._superseded = [
            (group_id, task) for group_id, task in alive if task.id in done_tasks and group_id not in done_groups
        ]

    def end_superseded(self) -> None:
        """End the groups that went stale after the checkpoint and whose task was then trained on in another group."""
        for group_id, task in self._superseded:
            self._log.emit(schema.Group(group=group_id, task=task.id, how="surplus"))
            if self._recorder is not None:
                self._recorder.ended(group_id, "surplus")

    def go_on(self) -> None:
        """Begin: first with the open groups of the checkpoint, then with new ones."""
        reopened, self._reopened = self._reopened, []
        for group in reopened:
            self.mix.readmitted(group.task.domain)
            self._admit(group.id, group.task)
        self._begun = True
        self.feed()

    def end(self) -> None:
        """The last step is done: nothing more is admitted."""
        self._begun = False

    def stop(self) -> None:
        """Form no further batch. Whoever waits for one gets StopAsked."""
        self._stopping = True
        self._changed.give()

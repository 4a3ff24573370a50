"""Plays groups: their members attempt after attempt, until a group has enough of them, or is over.

Invariants: a group that is played is here until it is reported, once, or taken back; what is too old is stopped, in an
engine, an environment or a reward. No slots, mix or batches here: those are the rollout's, which is told at once.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollart.config.job import advantage_of
from rollart.config.settings import TaskSettings
from rollart.control.attempt import Attempt
from rollart.control.context import JobContext
from rollart.control.env_manager import EnvManager
from rollart.control.fleet import Fleet
from rollart.control.samples import advantages, zero_variance
from rollart.control.waits import Signal
from rollart.events import schema
from rollart.policy.admission import is_stale
from rollart.policy.redundancy import Count, GroupVerdict, backoff_s, judge
from rollart.types import SCORED, Group, Status, Task, Trajectory, TrajectoryId, WeightVersion


@dataclass(slots=True, eq=False)
class Member:
    """One place in a group."""

    next_attempt: int = 0
    """Number of the next attempt; never used twice."""
    tries: int = 0
    attempt: Attempt | None = None
    trajectory: Trajectory | None = None
    """Set when scored."""
    over: bool = False
    """Scored or given up."""


@dataclass(slots=True, eq=False)
class GroupInProgress:
    """A group whose members are under way."""

    id: str
    task: Task
    settings: TaskSettings
    members: list[Member]
    admitted_s: float
    order: tuple[str, ...] = ()
    """The pool its members stay on, then the stand-ins."""
    cause: int = -1

    @property
    def born(self) -> WeightVersion | None:
        """Of its oldest member, under way or scored."""
        oldest: WeightVersion | None = None
        for member in self.members:
            born = member.trajectory.born if member.trajectory else member.attempt.born if member.attempt else None
            if born is not None and (oldest is None or born < oldest):
                oldest = born
        return oldest

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """The members that enter the baseline: the first that were scored, up to `group_size`."""
        found = tuple(member.trajectory for member in self.members if member.trajectory is not None)
        return found[: self.settings.group_size]

    @property
    def rewards(self) -> list[float]:
        """What these earned."""
        return [trajectory.reward for trajectory in self.scored if trajectory.reward is not None]

    def stop(self, status: Status, reason: str) -> None:
        for member in self.members:
            if member.attempt is not None:
                member.attempt.stop(status, reason)


class Reports(Protocol):
    """Who is told what becomes of groups. Returns at once."""

    def attempted(self, trajectory: Trajectory) -> None:
        """An attempt of a member is over."""

    def complete(self, group: str, done: Group | None, rewards: Sequence[float], cause: int) -> None:
        """A group has enough members. `done`: None where there is nothing to learn from it. `cause`: the event that
        led to this."""

    def given_up(self, group: str, how: str, cause: int) -> None:
        """It is `stale` or `failed`."""

    def idle(self) -> None:
        """No attempt runs any more."""


class GroupPlayer:
    def __init__(self, context: JobContext, manager: EnvManager, fleet: Fleet, reports: Reports) -> None:
        job, rollout = context.job, context.job.rollout
        self._log = context.log
        self._supervisor = context.supervisor
        self._manager = manager
        self._fleet = fleet
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._settings = {task.name: task for task in job.tasks}
        self._spare_members = rollout.spare_members
        self._bound = rollout.staleness
        self._advantage = advantage_of(job.train)
        self._filter = rollout.zero_variance == "refill"
        self._attempts = job.limits.attempts
        self._backoff_s = job.limits.backoff_s
        self._draining = context.waits.on("drain")
        self._holding = context.waits.on("admission")
        self.groups: dict[str, GroupInProgress] = {}
        """Under way, in the order in which they were begun."""
        self._running = 0
        """Attempts."""
        self._closed = False
        """Draining: nothing new starts, not even another attempt."""
        self._idle = Signal()
        self._opened = Signal()

    def play(self, group_id: str, task: Task, order: tuple[str, ...], *, first: int, cause: int) -> None:
        """Begin a group. `first`: the number of its members' first attempts."""
        settings = self._settings[task.domain]
        members = [Member(first) for _ in range(settings.group_size + self._spare_members)]
        group = GroupInProgress(group_id, task, settings, members, self._loop.time(), order, cause)
        self.groups[group_id] = group
        for number, member in enumerate(members):
            self._supervisor.spawn(self._play(group, number, member))

    def stop(self, group_id: str, status: Status, reason: str) -> None:
        """Take a group back. Nothing more is said of it."""
        self.groups.pop(group_id).stop(status, reason)

    def sweep(self, serving: WeightVersion) -> list[str]:
        """Stop the groups that are too old, and take them back."""
        found = self._too_old(serving)
        for group_id in found:
            self.stop(group_id, Status.STALE, "too old after a swap")
        return found

    async def any_too_old(self, serving: WeightVersion) -> bool:
        """Whether groups are under way that are too old when this version serves."""
        return bool(self._too_old(serving))

    def _too_old(self, serving: WeightVersion) -> list[str]:
        return [group.id for group in self.groups.values() if is_stale(group.born, serving, self._bound)]

    async def drain(self) -> None:
        """Begin no further attempt, and wait until none runs."""
        self._closed = True
        while self._running:
            await self._draining.guard(f"{self._running} trajectories", self._idle.next())

    def reopen(self) -> None:
        self._closed = False
        self._opened.give()

    async def _play(self, group: GroupInProgress, number: int, member: Member) -> None:
        """One member of a group, attempt after attempt, until it is scored or the group needs it no more."""
        while group.id in self.groups:
            if self._closed:
                await self._holding.guard(group.id, self._opened.next())
                continue
            id = TrajectoryId(group.id, number, member.next_attempt)
            attempt = member.attempt = Attempt(id, group.task, group.settings, group.order, group.cause)
            member.next_attempt += 1
            self._running += 1
            try:
                trajectory = await self._manager.run(attempt)
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.give()
                    self._reports.idle()
            self._reports.attempted(trajectory)
            if group.id not in self.groups:
                if trajectory.reward is not None:
                    self._log.emit(schema.Late(id=attempt.key, cause=attempt.cause))
                return
            verdict = self._ended(group, member, trajectory)
            if verdict is not GroupVerdict.RETRY:
                self._settle(group, verdict, attempt.cause)
                return
            await asyncio.sleep(backoff_s(self._backoff_s, member.tries))

    def _ended(self, group: GroupInProgress, member: Member, trajectory: Trajectory) -> GroupVerdict:
        """Book one attempt's end and say what follows for the group."""
        member.attempt = None
        member.tries += 1
        if trajectory.status in SCORED:
            member.trajectory = trajectory
        count = Count(
            scored=sum(1 for other in group.members if other.trajectory is not None),
            under_way=sum(1 for other in group.members if not other.over and other is not member),
        )
        verdict = judge(
            trajectory.status,
            count,
            group_size=group.settings.group_size,
            min_group_size=group.settings.smallest_group,
            attempts_left=self._attempts - member.tries,
            fresh=not is_stale(group.born, self._fleet.serving, self._bound),
        )
        member.over = verdict is not GroupVerdict.RETRY
        return verdict

    def _settle(self, group: GroupInProgress, verdict: GroupVerdict, cause: int) -> None:
        match verdict:
            case GroupVerdict.READY:
                rewards = group.rewards
                done = self._done(group, rewards)
                self.stop(group.id, Status.ABORTED, "surplus: the group has enough members")
                self._reports.complete(group.id, done, rewards, cause)
            case GroupVerdict.STALE:
                self.stop(group.id, Status.STALE, "a member of the group is too old")
                self._reports.given_up(group.id, "stale", cause)
            case GroupVerdict.FAILED:
                self.stop(group.id, Status.ABORTED, "too few members of the group are left")
                self._reports.given_up(group.id, "failed", cause)
            case _:
                pass

    def _done(self, group: GroupInProgress, rewards: list[float]) -> Group | None:
        """A group that has enough members; None when there is nothing to learn from it."""
        members = group.scored
        assert len(rewards) == len(members), f"{group.id}: a member without a reward"
        if self._filter and zero_variance(rewards):
            return None
        return Group(
            id=group.id,
            task=group.task,
            members=members,
            born=min(trajectory.born for trajectory in members if trajectory.born is not None),
            advantages=advantages(rewards, self._advantage),
            admitted_s=group.admitted_s,
        )

"""Groups between admission and training: completes them, ages them, and forms batches.

Invariant: every admitted group is here exactly once, open or ready, until it ends exactly once: trained, filtered,
stale, failed or surplus. No time passes in here: the rollout driver calls it and acts on what it says.
"""

from dataclasses import dataclass

from rollart.config.settings import TaskSettings
from rollart.control.attempt import Attempt
from rollart.control.samples import advantages, zero_variance
from rollart.policy.admission import is_stale
from rollart.policy.mix import Mix, oldest_first
from rollart.policy.redundancy import Count, GroupVerdict, judge
from rollart.types import SCORED, Group, OpenGroup, Task, Trajectory, WeightVersion


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
    cause: int = -1
    order: tuple[str, ...] = ()
    """The pool its members stay on, then the stand-ins."""

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

    def attempts(self) -> list[Attempt]:
        return [member.attempt for member in self.members if member.attempt is not None]


class SampleBuffer:
    def __init__(self, mix: Mix, *, bound: int, advantage: str, attempts: int, filter_zero_variance: bool) -> None:
        self._mix = mix
        self._bound = bound
        self._advantage = advantage
        self._attempts = attempts
        self._filter = filter_zero_variance
        self.in_progress: dict[str, GroupInProgress] = {}
        self.ready: dict[str, Group] = {}

    def admit(self, group: GroupInProgress) -> None:
        self.in_progress[group.id] = group

    def ended(
        self, group: GroupInProgress, member: Member, trajectory: Trajectory, serving: WeightVersion
    ) -> GroupVerdict:
        """Book one attempt's end and say what follows for the group."""
        member.attempt = None
        member.tries += 1
        scored = trajectory.status in SCORED
        if scored:
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
            fresh=not is_stale(group.born, serving, self._bound),
        )
        member.over = verdict is not GroupVerdict.RETRY
        return verdict

    def complete(self, group: GroupInProgress) -> Group | None:
        """Close a group that has enough members; None when there is nothing to learn from it."""
        members, rewards = group.scored, group.rewards
        assert len(rewards) == len(members), f"{group.id}: a member without a reward"
        del self.in_progress[group.id]
        if self._filter and zero_variance(rewards):
            return None
        done = Group(
            id=group.id,
            task=group.task,
            members=members,
            born=min(trajectory.born for trajectory in members if trajectory.born is not None),
            advantages=advantages(rewards, self._advantage),
            admitted_s=group.admitted_s,
        )
        self.ready[group.id] = done
        return done

    def stale_in_progress(self, serving: WeightVersion) -> list[GroupInProgress]:
        return [group for group in self.in_progress.values() if is_stale(group.born, serving, self._bound)]

    def stale_ready(self, serving: WeightVersion) -> list[Group]:
        return [group for group in self.ready.values() if is_stale(group.born, serving, self._bound)]

    def form(self, *, relaxed: bool = False, short: bool = False) -> list[Group] | None:
        """The groups of the next batch, the oldest of each task first; None: wait for more.

        `relaxed`: nothing better will come, so shares need not hold. `short`: nor need the size.
        """
        by_task: dict[str, list[tuple[int, str]]] = {}
        for group in self.ready.values():
            by_task.setdefault(group.task.domain, []).append((group.born, group.id))
        counts = self._mix.pick(
            {name: len(groups) for name, groups in by_task.items()}, relaxed=relaxed or short, short=short
        )
        if counts is None:
            return None
        chosen = [name for domain, count in counts.items() for name in oldest_first(by_task[domain], count)]
        self._mix.consumed(counts)
        return [self.ready.pop(name) for name in chosen]

    def open_groups(self) -> tuple[OpenGroup, ...]:
        """For a checkpoint: an open group starts again, its members as new attempts."""
        return tuple(OpenGroup(id=group.id, task=group.task) for group in self.in_progress.values())

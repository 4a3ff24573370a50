"""Which task comes next, and which ready groups make a batch. Used by the coordinator and the buffer.

Shares are kept twice: at admission (so no task crowds the slots) and at consumption (so short tasks do not fill
every batch while long ones go stale). Tasks of groups that died of age or surplus come back first.
A task that is out (see `breaker.py`) has no share; the others divide it in proportion to their own.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.types import MixState

STARVING_SHARE = 0.8
"""A task of whose last groups this share went stale is starving."""
STARVING_WINDOW = 20
"""How many ended groups of a task are looked at for that, or two batches' worth: a swap ends many together."""


@dataclass(slots=True)
class _Lane:
    """One task's part of the mix."""

    share: float
    quota: int | None = None
    """Groups in every batch, where the job says so."""
    cursor: int = 0
    """Next index in the task set."""
    returned: deque[int] = field(default_factory=deque)
    """Indices to be given out again, before new ones."""
    alive: int = 0
    """Groups admitted and not ended."""
    consumed: int = 0
    """Groups trained on since the set of tasks in the mix last changed."""
    ended: deque[bool] = field(default_factory=deque)
    """Of the last ended groups: did it go stale?"""
    longest_s: float = 0.0
    """Longest time a group of this task took to be ready."""
    skip: set[int] = field(default_factory=set)
    """Indices that a resumed job has trained on already (looked up, never iterated)."""
    out: bool = False
    """Given out only when asked for by name."""


def shares(weights: Mapping[str, float], quotas: Mapping[str, int | None], groups_per_step: int) -> dict[str, float]:
    """Target share of each task: quotas are fixed, weights divide the rest."""
    fixed = sum(quota or 0 for quota in quotas.values()) / groups_per_step
    total = sum(weight for name, weight in weights.items() if quotas.get(name) is None)
    result: dict[str, float] = {}
    for name, weight in weights.items():
        quota = quotas.get(name)
        result[name] = (1.0 - fixed) * weight / total if quota is None else quota / groups_per_step
    return result


class Mix:
    """Keeps the cursor and the shares of every task."""

    def __init__(
        self,
        target: Mapping[str, float],
        groups_per_step: int,
        tolerance: float,
        quotas: Mapping[str, int | None] | None = None,
    ) -> None:
        """`quotas`: task -> its exact number of groups in each batch."""
        fixed = quotas or {}
        self._window = max(STARVING_WINDOW, 2 * groups_per_step)
        self._lanes = {
            name: _Lane(share=share, quota=fixed.get(name), ended=deque(maxlen=self._window))
            for name, share in target.items()
        }
        self._groups_per_step = groups_per_step
        self._tolerance = tolerance
        self._divide()

    @property
    def empty(self) -> bool:
        """Every task is out."""
        return not self._shares

    def put_out(self, names: Sequence[str]) -> None:
        """These tasks are out of the mix, and no others. What was consumed before is forgotten: a task that comes back
        has its share, and is not owed what the others had meanwhile."""
        for name, lane in self._lanes.items():
            lane.out = name in names
            lane.consumed = 0
        self._divide()

    def _divide(self) -> None:
        """The shares of those that are in. Quotas stay, and weights divide the rest; where only quotas are left, they
        are scaled up, and are shares like any other."""
        lanes = {name: lane for name, lane in self._lanes.items() if not lane.out}
        free = sum(lane.share for lane in lanes.values() if lane.quota is None)
        fixed = sum(lane.share for lane in lanes.values() if lane.quota is not None)
        whole = len(lanes) == len(self._lanes)
        self._quotas = {
            name: lane.quota for name, lane in lanes.items() if lane.quota is not None and (free > 0 or whole)
        }
        self._shares = {
            name: lane.share
            if whole or name in self._quotas
            else lane.share * ((1.0 - fixed) / free if free > 0 else 1.0 / fixed)
            for name, lane in lanes.items()
        }

    def next(self) -> tuple[str, int]:
        """The task to admit now: the one furthest below its share of all groups alive or trained."""
        lanes = {name: self._lanes[name] for name in self._shares}
        total = 1 + sum(lane.alive + lane.consumed for lane in lanes.values())
        name = max(lanes, key=lambda name: self._shares[name] * total - lanes[name].alive - lanes[name].consumed)
        return name, self.draw(name)

    def draw(self, name: str) -> int:
        """The next index of this task, which has one more group alive now."""
        lane = self._lanes[name]
        lane.alive += 1
        if lane.returned:
            return lane.returned.popleft()
        while lane.cursor in lane.skip:
            lane.skip.discard(lane.cursor)
            lane.cursor += 1
        index = lane.cursor
        lane.cursor += 1
        return index

    def not_drawn(self, name: str) -> None:
        """The task of the index that was given out last could not be drawn: the index is passed over."""
        self._lanes[name].alive -= 1

    def died(self, name: str, index: int, *, again: bool, stale: bool = False) -> None:
        """A group ended untrained. `again`: its task goes back to be given out once more."""
        lane = self._lanes[name]
        lane.alive -= 1
        lane.ended.append(stale)
        if again:
            lane.returned.append(index)

    def took_s(self, name: str, seconds: float) -> None:
        """A group of this task was ready after this time."""
        lane = self._lanes[name]
        lane.longest_s = max(lane.longest_s, seconds)

    def consumed(self, counts: Mapping[str, int]) -> None:
        """Task -> groups that went into a batch."""
        for name, count in counts.items():
            lane = self._lanes[name]
            lane.alive -= count
            lane.consumed += count
            lane.ended.extend([False] * count)

    def trained_before(self, name: str, index: int) -> None:
        """A resumed job replays a batch that holds this task: never give it out again."""
        lane = self._lanes[name]
        lane.consumed += 1
        if index in lane.returned:
            lane.returned.remove(index)
        elif index >= lane.cursor:
            lane.skip.add(index)

    def readmitted(self, name: str) -> None:
        """A resumed job goes on with an open or ready group of this task."""
        self._lanes[name].alive += 1

    def pick(self, ready: Mapping[str, int], *, relaxed: bool = False, short: bool = False) -> dict[str, int] | None:
        """How many ready groups of each task the next batch takes, or None: wait for more.

        The batch is the one nearest to the targets, counted over all batches so far. `relaxed`: shares need not
        hold, since nothing better will come. `short`: nor need the size.
        """
        size = self._groups_per_step
        if short:
            size = min(size, sum(ready.values()))
            if size == 0:
                return None
        total = size + sum(lane.consumed for lane in self._lanes.values())
        slack = max(1.0, self._tolerance * size)
        least: dict[str, int] = {}
        most: dict[str, int] = {}
        take: dict[str, int] = {}
        for name, lane in self._lanes.items():
            quota = self._quotas.get(name)
            if quota is not None and not relaxed:
                least[name] = most[name] = take[name] = quota
                if ready.get(name, 0) < quota:
                    return None
                continue
            due = self._due(name, total)
            least[name] = 0 if relaxed or lane.out else min(size, max(0, _ceil(due - slack)))
            most[name] = ready.get(name, 0)
            if not relaxed:
                most[name] = min(most[name], max(least[name], int(due + slack + 1e-9)))
            if most[name] < least[name]:
                return None
            take[name] = min(most[name], max(least[name], int(due + 1e-9)))
        if sum(most.values()) < size:
            return None
        while sum(take.values()) < size:
            able = [name for name in take if take[name] < most[name]]
            take[max(able, key=lambda name: self._due(name, total) - take[name])] += 1
        while sum(take.values()) > size:
            able = [name for name in take if take[name] > least[name]] or [name for name in take if take[name]]
            take[min(able, key=lambda name: self._due(name, total) - take[name])] -= 1
        return {name: count for name, count in take.items() if count}

    def _due(self, name: str, total: int) -> float:
        """Groups this task is owed when `total` will have been trained on. What is ready of one that is out is used up
        as if it were in."""
        lane = self._lanes[name]
        return self._shares.get(name, lane.share) * total - lane.consumed

    def starving(self, version_s: float) -> list[tuple[str, int]]:
        """Tasks that nearly always go stale, with the bound each would need, given the seconds between versions."""
        found = []
        for name, lane in self._lanes.items():
            if len(lane.ended) == self._window and sum(lane.ended) >= STARVING_SHARE * self._window:
                found.append((name, _ceil(lane.longest_s / version_s) if version_s > 0 else 1))
        return found

    def state(self) -> dict[str, MixState]:
        """For a checkpoint: where each task stands. The buffer keeps living groups, the breaker who is out."""
        return {
            name: MixState(lane.cursor, tuple(lane.returned), lane.consumed, tuple(sorted(lane.skip)))
            for name, lane in self._lanes.items()
        }

    def restore(self, state: Mapping[str, MixState]) -> None:
        for name, saved in state.items():
            lane = self._lanes[name]
            lane.cursor, lane.consumed = saved.cursor, saved.consumed
            lane.returned, lane.skip = deque(saved.returned), set(saved.skip)


def oldest_first(born: Sequence[tuple[int, str]], count: int) -> list[str]:
    """The ids of the `count` oldest, given (born, id) in order of arrival."""
    return [name for _, name in sorted(born, key=lambda item: item[0])[:count]]


def _ceil(value: float) -> int:
    return -int(-value // 1) if abs(value - round(value)) > 1e-9 else round(value)

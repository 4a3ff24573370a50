"""What becomes of a group when one of its members ends, and of those that are left when a batch is formed. Used by
the buffer and the rollout driver."""

from enum import Enum
from typing import NamedTuple

from rollart.types import Status


class GroupVerdict(Enum):
    WAIT = "wait"
    """Other members are still under way."""
    RETRY = "retry"
    """Start this member again, as a new attempt."""
    READY = "ready"
    """Enough members are scored; cancel the rest."""
    STALE = "stale"
    """One member is too old, and a group is as old as its oldest."""
    FAILED = "failed"
    """Too few members can still be scored."""


class Count(NamedTuple):
    """A group's members after the one that just ended was counted."""

    scored: int
    under_way: int
    """Running or waiting to be retried, without the one that just ended."""


def judge(
    status: Status, count: Count, *, group_size: int, min_group_size: int, attempts_left: int, fresh: bool
) -> GroupVerdict:
    """Decide after one member ended with `status`.

    A failed member is tried again only while the group is fresh and needs it: with spare members under way,
    one failure costs nothing.
    """
    if status is Status.STALE:
        return GroupVerdict.STALE
    if count.scored >= group_size:
        return GroupVerdict.READY
    if status is Status.FAILED and fresh and attempts_left > 0 and count.scored + count.under_way < group_size:
        return GroupVerdict.RETRY
    if count.under_way:
        return GroupVerdict.WAIT
    return GroupVerdict.READY if count.scored >= min_group_size else GroupVerdict.FAILED


def surplus(under_way: int, ready: int, *, bound: int, groups_per_step: int) -> int:
    """How many of the groups under way are beyond what the batches that the bound allows can still hold."""
    return min(under_way, max(0, under_way + ready - bound * groups_per_step))


def backoff_s(base_s: float, tries: int, cap_s: float = 60.0) -> float:
    """Seconds to wait before try number `tries + 1`: doubled each time, never more than the cap."""
    return float(min(cap_s, base_s * 2.0 ** max(0, tries - 1)))

"""What follows from a train step: which groups it left out whole, and when training has come to nothing."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from rollart.types import Batch, Group, SetAside, StepResult

WARN_AFTER = 3
STOP_AFTER = 10
"""Steps in a row that changed nothing, though there was something to train on."""


class Reaction(Enum):
    FINE = "fine"
    WARN = "warn"
    STOP = "stop"


def set_aside_whole(batch: Batch, set_aside: Sequence[SetAside]) -> list[str]:
    """The groups of which no member was trained on: they have failed. One that lost some is still trained on."""
    names = {one.trajectory for one in set_aside}
    return [group.id for group in batch.groups if all(member.id in names for member in group.members)]


def trained_on(batch: Batch, set_aside: Sequence[SetAside]) -> Batch:
    """The batch without what was set aside."""
    names = {one.trajectory for one in set_aside}
    groups: list[Group] = []
    for group in batch.groups if names else ():
        kept = [pair for pair in zip(group.members, group.advantages, strict=True) if pair[0].id not in names]
        if kept:
            members, advantages = zip(*kept, strict=True)
            groups.append(replace(group, members=members, advantages=advantages))
    return replace(batch, groups=tuple(groups)) if names else batch


def in_vain(batch: Batch, result: StepResult) -> str:
    """Why a step that had something to train on changed nothing; empty where it did."""
    if result.set_aside and len(set_aside_whole(batch, result.set_aside)) == len(batch.groups):
        return f"all of their data was set aside, the last for: {result.set_aside[-1].reason}"
    if result.metrics.get("actor/skipped_updates") and not result.metrics.get("actor/updates"):
        return "their gradients were not finite, so the updates were skipped"
    return ""


def reaction(in_vain_in_a_row: int) -> Reaction:
    if in_vain_in_a_row >= STOP_AFTER:
        return Reaction.STOP
    return Reaction.WARN if in_vain_in_a_row == WARN_AFTER else Reaction.FINE

"""When new weights enter the engines, and how many engines at a time. Used by the coordinator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rollart.types import WeightVersion

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """One swap setting, taken apart."""

    before_step: bool
    """Swap to the weights of the previous step once a batch is there, before training on it."""
    after_step: bool
    """Swap to the weights of a step as soon as it is done, before the next batch."""
    when_published: bool
    """Swap whenever a version is published, in the middle of whatever goes on."""
    drains: bool
    """Let in-flight trajectories end on the old weights first, with admission closed."""
    rolling: int
    """Engines at a time; 0 means all."""


def plan(swap: str, rolling: int = 0) -> SwapPlan:
    return SwapPlan(
        before_step=swap in ("after_batch", "drain"),
        after_step=swap == "between_batches",
        when_published=swap == "when_published",
        drains=swap == "drain",
        rolling=rolling,
    )


def waves(engines: Sequence[T], rolling: int) -> list[Sequence[T]]:
    """The engines in the order they are swapped, those of one wave together."""
    if rolling == 0 or rolling >= len(engines):
        return [engines] if engines else []
    return [engines[start : start + rolling] for start in range(0, len(engines), rolling)]


def may_start(step: int, serving: WeightVersion) -> bool:
    """Step n starts only when the engines serve n - 1 or newer: so a sample is at most bound + 1 steps old."""
    return serving >= step - 1

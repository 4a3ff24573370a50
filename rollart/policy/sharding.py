"""How the rollout is divided between shards: which engines each has, and which shard plays the next group."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


def part(of: Sequence[T], number: int, shards: int) -> tuple[T, ...]:
    """Of these, what the shard of this number has: each gets as many as any other, or one more."""
    return tuple(of[number::shards])


def part_of(amount: int, number: int, shards: int) -> int:
    """The same of an amount."""
    return len(range(number, amount, shards))


@dataclass(slots=True, eq=False)
class ShardView:
    """All that is to be known of a shard to give it a group."""

    number: int
    up: bool = False
    pools: frozenset[str] = frozenset()
    """With an engine up there."""
    groups: Counter[str] = field(default_factory=Counter)
    """That it plays, by pool."""


def least_loaded(shards: Sequence[ShardView], pool: str) -> ShardView | None:
    """The one for a group of this pool: with the fewest there, then in all. One without an engine of the pool only
    where no other is up; None where none is."""
    up = [shard for shard in shards if shard.up]
    up = [shard for shard in up if pool in shard.pools] or up
    return min(up, key=lambda shard: (shard.groups[pool], shard.groups.total(), shard.number), default=None)

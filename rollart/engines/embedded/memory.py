"""What the scheduler and the engine ask of a cache, whatever it is made of: slabs on a CPU, pages on a GPU.

A sequence that was placed has a `capacity` of tokens that fit without another call; one that was not has 0.
"""

from collections.abc import Sequence as Row
from typing import Protocol

from rollart.engines.embedded.sequence import Sequence


class Memory(Protocol):
    """Keys and values of sequences in flight and of idle sessions, within one bound."""

    @property
    def used_tokens(self) -> int:
        """Tokens' worth of memory held now."""

    @property
    def num_parked(self) -> int:
        """Idle sessions that are kept."""

    def place(self, seq: Sequence, num_tokens: int, followers: int) -> bool:
        """Give a sequence room for at least `num_tokens`, and whatever its session has in the cache.

        False, and nothing changed, where sequences in flight fill the memory. `followers` are about to be placed too.
        """

    def borrow(self, seq: Sequence) -> bool:
        """Take over what another session has of this one's beginning. False: wait, an older one is computing it."""

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Room for at least `num_tokens`. False where there is none."""

    def short_of(self, running: Row[Sequence]) -> bool:
        """Whether one more step of these may find no room, so that one of them would have to give way."""

    def release(self, seq: Sequence) -> None:
        """Take a sequence's room away."""

    def park(self, seq: Sequence) -> None:
        """Keep what a finished sequence has for its session's next turn, if there is room."""

    def clear(self) -> None:
        """Forget idle sessions and every key and value in flight; sequences keep their room."""

    def drop_parked(self) -> None:
        """Forget idle sessions."""

"""The version a trainer is at, and copies of the last two: what can be published.

Invariant: the weights of the current and of the previous version are to be had at any time, from any thread, whatever
step is under way. So the trainer takes a version's copy before it changes the weights.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rollart.errors import TrainerError
from rollart.types import WeightVersion

T = TypeVar("T")


class Versions(Generic[T]):
    """`copy` gives a copy of the live weights."""

    def __init__(self, copy: Callable[[], T]) -> None:
        self._copy = copy
        self._lock = threading.Lock()
        """Held while the version changes or a copy is taken."""
        self._held: dict[WeightVersion, T] = {}
        self._current: WeightVersion = 0

    @property
    def current(self) -> WeightVersion:
        """Steps done."""
        return self._current

    def of(self, version: WeightVersion) -> T:
        """The copy of a version; taken once, kept while it is the current or the previous one."""
        with self._lock:
            if version not in self._held:
                if version != self._current:
                    raise not_held(version, sorted({self._current, *self._held}))
                self._held = {at: weights for at, weights in self._held.items() if at >= version - 1}
                self._held[version] = self._copy()  # into the room of the one that was let go of
            return self._held[version]

    def advance(self) -> WeightVersion:
        """A step is done: the live weights are of the next version."""
        with self._lock:
            self._current += 1
            return self._current

    def reset(self, version: WeightVersion, change: Callable[[], None]) -> None:
        """`change` puts other weights in place; no copy of what was there before stays."""
        with self._lock:
            change()
            self._current, self._held = version, {}


def not_held(version: WeightVersion, held: list[WeightVersion]) -> TrainerError:
    return TrainerError(f"version {version} is not held any more (or not yet); held: {held}")

"""When those who compute a reward count as down, and when to look whether they are back. Used by the scorer.

One trajectory that gets no answer says little: its own episode may be what takes so long. They are down when one has
used up its tries, and nobody else was answered since the first of these failed. Any answer, an error too, says that
they are up. While they are down one trajectory at a time looks, first after a while and then ever more seldom. Pure:
times are given.
"""

from dataclasses import dataclass

FIRST_LOOK_S = 1.0
"""After it was noticed; doubled after each look in vain."""
SELDOM_S = 30.0
"""The longest time between two looks."""


class Outage:
    def __init__(self) -> None:
        self._answered_s = float("-inf")
        self._since_s: float | None = None
        self._looks = 0
        self.due_s = 0.0
        """When to look next, while they are down."""

    @property
    def is_down(self) -> bool:
        return self._since_s is not None

    def answered(self, now_s: float) -> float | None:
        """Somebody was, with a score or an error. Where they were down: for how long."""
        self._answered_s = now_s
        since_s, self._since_s = self._since_s, None
        return None if since_s is None else now_s - since_s

    def answered_since(self, since_s: float) -> bool:
        """Whether anybody was."""
        return self._answered_s >= since_s

    def gave_up(self, since_s: float, now_s: float) -> bool:
        """One got no answer in all its tries since then. True where this says that they are down now."""
        if self.is_down or self.answered_since(since_s):
            return False
        self._since_s = since_s
        self._looks = 0
        self.due_s = now_s + FIRST_LOOK_S
        return True

    def looked_in_vain(self, now_s: float) -> None:
        self._looks += 1
        self.due_s = now_s + min(SELDOM_S, FIRST_LOOK_S * 2.0 ** min(self._looks, 30))


@dataclass(slots=True)
class Budget:
    """The tries of one trajectory that failed. Those that nobody answered are the platform's failures where nobody else
    was answered either, and its own where others were."""

    retries: int
    failed: int = 0
    """Of its own."""
    silent: int = 0
    """In a row without an answer, while nobody else had one."""
    silent_s: float = 0.0
    """When the first of these failed."""

    def answered_badly(self) -> None:
        self.failed += 1
        self.silent = 0

    def unanswered(self, began_s: float, now_s: float, outage: Outage) -> None:
        """A try since `began_s`. Where there is only one, it must have seen the whole silence."""
        if self.silent and outage.answered_since(self.silent_s):
            self.failed += self.silent
            self.silent = 0
        if not self.silent:
            self.silent_s = now_s if self.retries else began_s
        self.silent += 1

    @property
    def tries(self) -> int:
        return self.failed + self.silent

    @property
    def is_spent(self) -> bool:
        """Its own failures have used it up."""
        return self.failed > self.retries

    @property
    def is_silent(self) -> bool:
        return self.silent > self.retries

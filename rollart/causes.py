"""Why things fail, counted. Texts that differ only in ids, numbers and addresses are one cause.

Bounded: only a fixed number of causes is told apart; all others count together.
"""

import re
from typing import NamedTuple

MAX_CAUSES = 32
"""Told apart; later ones count as `OTHERS`."""
OTHERS = "other reasons"
MAX_CHARACTERS = 400
"""Kept of a text."""
LINE_CHARACTERS = 200
"""Of its first line, which says what kind of cause it is."""

_VARIES = re.compile(
    r"(?P<keep>\b(?:status|signal|HTTP|code|errno|Errno)\b[ :=]*\d+)"  # such a number says what kind it is
    r"|\b(?:eval|g)\d+[\w.~/-]*"  # groups, attempts, calls
    r"|\b0x[0-9a-fA-F]+\b"
    r"|\b(?=[a-f-]*\d)[0-9a-f]{4,}(?:-[0-9a-f]{4,})+\b"  # UUIDs
    r"|\b(?=[a-f]*\d)[0-9a-f]{8,}\b"
    r"|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
)


class Cause(NamedTuple):
    times: int
    text: str
    """The first text of this cause."""

    def __str__(self) -> str:
        return f"{self.times} x {first_line(self.text)}"


class Causes:
    """Counts texts by cause."""

    __slots__ = ("_found", "total")

    def __init__(self) -> None:
        self._found: dict[str, Cause] = {}
        self.total = 0

    def add(self, text: str, shown: str | None = None) -> None:
        """`shown`: what to keep of the first of its cause, where that is not the text itself."""
        self.total += 1
        kind = kind_of(text)
        known = self._found.get(kind)
        if known is None and len(self._found) >= MAX_CAUSES:
            kind = text = OTHERS
            shown, known = None, self._found.get(kind)
        self._found[kind] = (
            Cause(1, (shown or text)[:MAX_CHARACTERS]) if known is None else known._replace(times=known.times + 1)
        )

    def top(self, most: int = 1) -> list[Cause]:
        """The most frequent, the first to come first among equals."""
        return sorted(self._found.values(), key=lambda cause: -cause.times)[:most]

    def words(self) -> str:
        """The most frequent one, such as `744 x RewardError: reward: returned nan`; empty where there is none."""
        found = self.top()
        return str(found[0]) if found else ""


def kind_of(text: str) -> str:
    """What texts of the same cause have in common."""
    return _VARIES.sub(lambda found: found["keep"] or "#", first_line(text))


def first_line(text: str) -> str:
    return text.split("\n", 1)[0][:LINE_CHARACTERS]

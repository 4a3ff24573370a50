"""Where a process that runs user code is put, so that it can reach and use no more than it is given.

`sandbox.py`, `container.py` and `pod.py` are boxes. One is made for each process and ends with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Box(Protocol):
    """Made for one process. Its command may be one of our workers, which then talks over its standard input and
    output, or any other program."""

    @property
    def output_bytes(self) -> int:
        """Longest answer that is taken from it."""

    @property
    def pass_fds(self) -> Sequence[int]:
        """Of this process, that the command needs."""

    @property
    def opening(self) -> bytes:
        """What it is sent before the first call, once its command is known."""

    @property
    def ends_with_command(self) -> bool:
        """Killing its command ends all that is in it. Otherwise `remove` does, and the command ends by itself then:
        killed while it makes the box, it would leave one that nobody knows."""

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """What to start instead of these words, and with which environment."""

    def over(self) -> str:
        """Which limit it went over, where that is known; else nothing. May block."""

    def remove(self) -> None:
        """End what is in it, and remove what it leaves. Blocks; may be called again."""


MakeBox = Callable[[str], Box]
"""From the name of its process."""

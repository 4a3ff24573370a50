"""Files of the run directory that survive a full disk: one that is only added to, and those written whole.

Invariant: what was put is in the file in order, or still held here; a line is never torn by a write that found no room,
only by a kill.
"""

import os
from pathlib import Path
from typing import IO

from rollart.errors import StoreFull, writing


def write_whole(path: Path, data: bytes) -> None:
    """Whole or not at all: what was there stays where this finds no room, and after a kill. Raises OSError."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)  # a part of it would take the room that is missing
        raise


class AppendFile:
    """`put` what is to be written, `write_out` now and then. What finds no room is held, and goes first next time."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        """`fresh`: what is there is thrown away."""
        self._path = path
        self.file: IO[bytes] = open(path, "wb" if fresh else "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self.held = bytearray()
        """Put, and not written yet."""
        self.full = False
        """The last try found no room."""

    def put(self, data: bytes) -> None:
        self.held += data

    def write_out(self, *, durable: bool = False) -> None:
        """Raises StoreFull; then what was not written is still held."""
        self.full = True
        with writing(str(self._path)):
            left = memoryview(self.held)
            try:
                while left:  # a disk that gets full takes a part first
                    left = left[self.file.write(left) :]
            finally:
                self.held = bytearray(left)
            if durable:
                os.fsync(self.file.fileno())
        self.full = False

    @property
    def num_bytes(self) -> int:
        """In the file by now."""
        return os.fstat(self.file.fileno()).st_size

    def move_to(self, path: Path) -> None:
        """Give what is written another name, and go on in a new file of the old one. Raises StoreFull, changing
        nothing."""
        with writing(str(self._path)):
            os.fsync(self.file.fileno())
            os.rename(self._path, path)
            try:
                new = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
            except OSError:
                os.rename(path, self._path)
                raise
        self.file.close()
        self.file = new

    def close(self) -> int:
        """Write what can be written; returns the bytes that could not."""
        try:
            self.write_out()
        except StoreFull:
            pass  # whoever closes says so
        finally:
            self.file.close()
        return len(self.held)

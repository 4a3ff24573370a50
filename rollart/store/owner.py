"""Whose a weight store is: a lock file beside it, held for as long as its run lives.

The kernel lets go of a lock with the process that holds it, however that ends. Invariant: what a live run owns is not
removed by any other; what is left of a dead one can be.
"""

import fcntl
import os
from pathlib import Path

LOCK = ".lock"
"""Added to the store's name."""


class Claim:
    """A store that is ours until `release`."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._handle)


def claim(store: Path) -> Claim | None:
    """Own it; None where a live run does, where the lock is another user's, or where none can be had."""
    path = store.with_name(store.name + LOCK)
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return Claim(path, handle)
        except FileNotFoundError:
            pass
        except OSError:  # another's, or a file system without locks
            os.close(handle)
            return None
        os.close(handle)  # its holder removed it meanwhile, so this lock protects nothing


def left_behind(root: Path, prefix: str) -> list[Path]:
    """The stores below `root` that have, or had, an owner."""
    return [path.with_name(path.name.removesuffix(LOCK)) for path in sorted(root.glob(f"{prefix}*{LOCK}"))]

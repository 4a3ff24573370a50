"""Whose a weight store is: a lock file beside it, held for as long as its run lives; and what dead runs left.

The kernel lets go of a lock with the process that holds it, however that ends. Invariant: what a live run owns is not
removed by any other; what is left of a dead one can be.
"""

import fcntl
import os
import shutil
from pathlib import Path

ROOT = Path("/dev/shm")
PREFIX = "rollart-"
"""What the folders of runs in a host's shared memory begin with."""
LOCK, USERS = ".lock", ".users"
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


def is_owned(store: Path) -> bool:
    """Whether a live process owns it."""
    return _is_locked(store.with_name(store.name + LOCK), fcntl.LOCK_SH)


def users_file(store: Path) -> Path:
    """On which every process that uses a host's copy holds a shared lock."""
    return store.with_name(store.name + USERS)


def is_used(store: Path) -> bool:
    """Whether a live process uses it."""
    return _is_locked(users_file(store), fcntl.LOCK_EX)


def _is_locked(path: Path, how: int) -> bool:
    """Whether somebody holds a lock that keeps others from this one."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def remove_left_behind(root: Path = ROOT) -> None:
    """Free the memory that runs left which were killed and never resumed. What a live run owns or uses stays."""
    for lock in sorted(root.glob(f"{PREFIX}*{LOCK}")):
        store = lock.with_name(lock.name.removesuffix(LOCK))
        if not is_used(store):
            remove_store(store)


def remove_store(store: Path) -> None:
    """Remove one that nobody owns."""
    owned = claim(store)
    if owned is not None:
        shutil.rmtree(store, ignore_errors=True)
        users_file(store).unlink(missing_ok=True)
        owned.release()

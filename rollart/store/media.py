"""Where the files of a store lie, and how they are written and read there: on a disk, or in shared memory.

Pages of shared memory that are touched for the first time are slow (measured: 0.6 GB/s, and 2 through a new mapping,
against 8 for pages that are mapped already). So `SharedMemory` uses them again: the files of a
version that was dropped are kept as spares, the next push writes into them, and each process keeps its mapping of them.

Invariant: what somebody reads does not change under them. Who maps a file holds a shared lock on it for as long as any
tensor of it lives, and whoever uses a file again first has it for itself: the kernel ends the locks of a process that
dies. No torch here: the process that stages weights on a host imports this.
"""

import fcntl
import mmap
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Put = Callable[[int, Bytes], None]
"""Writes these bytes at this place."""
SPARE = "spare"
"""The folder of a store in which files wait to be used again."""


class Medium(Protocol):
    """Where files lie. Raises OSError."""

    @contextmanager
    def writing(self, path: Path, num_bytes: int) -> Iterator[Put]:
        """A new file of this size. What had the name before stays what it was for those who have it mapped."""
        yield lambda at, piece: None

    def mapped(self, path: Path) -> Bytes:
        """The file's bytes, without a copy. Writing to them changes nobody else's."""

    def retire(self, paths: Sequence[Path]) -> None:
        """These files are of no use any more."""


class DiskMedium:
    """A file system, local or of a network."""

    @contextmanager
    def writing(self, path: Path, num_bytes: int) -> Iterator[Put]:
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.truncate(handle, num_bytes)

            def put(at: int, piece: Bytes) -> None:
                left = piece.data
                while left:
                    done = os.pwrite(handle, left, at)
                    at, left = at + done, left[done:]

            yield put
        finally:
            os.close(handle)

    def mapped(self, path: Path) -> Bytes:
        handle = os.open(path, os.O_RDONLY)
        lease = Lease(handle)
        raw = _bytes_of(_private(handle))
        raw.lease = lease
        return raw

    def retire(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)


class SharedMemory:
    """Shared memory below `directory`, used again. One process writes there, any number read."""

    def __init__(self, directory: Path) -> None:
        self._spare = directory / SPARE
        self._read = _Mappings()
        self._written = _Mappings()

    @contextmanager
    def writing(self, path: Path, num_bytes: int) -> Iterator[Put]:
        raw = self.create(path, num_bytes)

        def put(at: int, piece: Bytes) -> None:
            raw[at : at + len(piece)] = piece

        yield put

    def create(self, path: Path, num_bytes: int) -> Bytes:
        """A new file, mapped: what is written to these bytes is in it."""
        self.retire([path] if path.exists() else [], forget=False)
        handle = self._take(path, num_bytes)
        try:
            return np.frombuffer(self._written.of(handle, _shared), dtype=np.uint8)
        finally:
            os.close(handle)

    def opened(self, path: Path) -> Bytes:
        """A file that is there, to be written on."""
        handle = os.open(path, os.O_RDWR)
        try:
            return np.frombuffer(self._written.of(handle, _shared), dtype=np.uint8)
        finally:
            os.close(handle)

    def mapped(self, path: Path) -> Bytes:
        lease = leased(path)
        raw = _bytes_of(self._read.of(lease.handle, _private))
        raw.lease = lease
        return raw

    def forget(self, path: Path) -> None:
        """Map this file anew the next time: somebody has written to private pages of the mapping that is kept."""
        with suppress(OSError):
            self._read.forget(path.stat())

    def retire(self, paths: Sequence[Path], *, forget: bool = True) -> None:
        """Keep these to be used again, and where `forget` no others."""
        if forget and paths:
            shutil.rmtree(self._spare, ignore_errors=True)
        for path in paths:
            self._spare.mkdir(exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                os.rename(path, self._spare / uuid.uuid4().hex)

    def _take(self, path: Path, num_bytes: int) -> int:
        """A file of this size under this name: a spare one that nobody reads, the one whose size is nearest; or new."""
        with suppress(FileNotFoundError):
            spares = sorted(self._spare.iterdir(), key=lambda one: abs(one.stat().st_size - num_bytes))
            for spare in spares:
                handle = os.open(spare, os.O_RDWR)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.rename(spare, path)
                    _resize(handle, num_bytes)
                except BlockingIOError:  # somebody still reads it: it goes when they let go
                    os.close(handle)
                    spare.unlink(missing_ok=True)
                except BaseException:
                    os.close(handle)
                    raise
                else:
                    fcntl.flock(handle, fcntl.LOCK_UN)
                    return handle
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _resize(handle, num_bytes)
        except BaseException:
            os.close(handle)
            raise
        return handle


def _resize(handle: int, num_bytes: int) -> None:
    """With its memory: a page that is not to be had when it is written to would end the process."""
    os.truncate(handle, num_bytes)
    if os.fstat(handle).st_blocks * 512 < num_bytes:  # asking for what is there looks at every page
        os.posix_fallocate(handle, 0, num_bytes)


class Leased(np.ndarray):  # type: ignore[type-arg]
    """Bytes of a file, which nobody uses again while they, or a tensor of them, are there."""

    lease: "Lease"


class Lease:
    """Closes a file, and with it ends the lock on it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self) -> None:
        os.close(self.handle)


def leased(path: Path) -> Lease:
    """A file that is not used again while the lease lives. Raises FileNotFoundError where it is already."""
    lease = Lease(os.open(path, os.O_RDONLY))
    try:
        fcntl.flock(lease.handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileNotFoundError(path) from None
    if not os.path.samestat(os.fstat(lease.handle), path.stat()):
        raise FileNotFoundError(path)  # it was retired after we opened it
    return lease


class _Mappings:
    """The mappings of files of one process. Those whose files have no name any more are let go of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}
        """By device and number: a handle of the file, and the mapping."""

    def of(self, handle: int, make: Callable[[int], mmap.mmap]) -> mmap.mmap:
        status = os.fstat(handle)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            for other, (own, mapping) in list(self._held.items()):
                if os.fstat(own).st_nlink == 0 or (other == key and len(mapping) != status.st_size):
                    os.close(self._held.pop(other)[0])
            if key not in self._held:
                # Opened anew: a lock belongs to the open file, and a mapping that is kept must not hold one.
                own = os.open(f"/dev/fd/{handle}", os.O_RDWR if make is _shared else os.O_RDONLY)
                self._held[key] = own, make(own)
            return self._held[key][1]

    def forget(self, status: os.stat_result) -> None:
        with self._lock:
            held = self._held.pop((status.st_dev, status.st_ino), None)
        if held is not None:
            os.close(held[0])

    def __del__(self) -> None:
        for handle, _ in self._held.values():
            os.close(handle)


def _private(handle: int) -> mmap.mmap:
    return mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)


def _shared(handle: int) -> mmap.mmap:
    return mmap.mmap(handle, 0)


def _bytes_of(mapping: Any) -> Leased:
    return np.frombuffer(mapping, dtype=np.uint8).view(Leased)

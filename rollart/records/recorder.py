"""The Recorder port over files of the run directory.

Control only puts into a queue; a thread encodes and writes, about once a second.
Invariant: nothing here ever delays or ends a job. What does not fit into the queue, or cannot be written, is dropped,
counted, and warned about once; later rows say how many are missing. The fates of groups are small: those that cannot
be written are held, and written with the next frame.
"""

import contextlib
import fcntl
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rollart.records.format import ROW_BYTES, SUFFIX, Frame, files_of, frames_of
from rollart.records.rows import FORMAT, Dropped, Ended, LifeRow, Trained, TrainedGroup
from rollart.types import Batch, Played

WRITE_S = 1.0
"""Between two writes: what a kill of the whole process can lose."""
QUEUE_BYTES = 128 << 20
"""Of token arrays and texts waiting to be written; more is dropped."""
FRAME_BYTES = 4 << 20
"""Of the queue, written together."""
FILE_BYTES = 64 << 20
"""A file of this size is closed and the next one begun."""
FEWEST_FILES = 8
"""A bounded total is made of this many files at least, so that deleting the oldest loses a small part."""
HELD_ROWS = 4096
"""Fates of groups that are held while nothing can be written; more are dropped."""
CLOSE_S = 30.0
"""The end of a run waits this long for the last write."""
Warn = Callable[[str], None]
"""May be called from any thread."""
Settled = Ended | Trained
"""The fate of groups."""


class FileRecorder:
    """Keeps `share` of the groups, `total_bytes` of them at most. Its folder is made with the first write."""

    def __init__(
        self,
        folder: Path,
        *,
        share: float = 1.0,
        total_bytes: int | None = None,
        zero_s: float = 0.0,
        life: int | None = None,
        warn: Warn = lambda text: None,
        write_s: float = WRITE_S,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._share = share
        self._zero_s = zero_s
        self._warn = warn
        self._write_s = write_s
        self._queue: deque[tuple[int, Played | Settled]] = deque()
        self._queue_bytes = queue_bytes
        self._given_bytes = 0
        """Put into the queue since the start. Only the giving thread changes it and `_left_out`."""
        self._left_out = 0
        """Attempts that found the queue full."""
        self._rows_left_out = 0
        """Fates of groups that did."""
        self._taken_bytes = 0
        """Taken out since the start. Only the writing thread changes it and all below."""
        self._lost = 0
        """Attempts that could not be written."""
        self._noted = 0
        """How many of both the files mention."""
        self._held: list[Settled] = []
        """Fates of groups that could not be written yet."""
        self._rows_lost = 0
        """Fates that were too many to hold, or cannot be encoded."""
        self._told = False
        self._files = _Files(folder, total_bytes, next_life(folder) if life is None else life)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="rollart-recorder", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Attempts that were to be kept and are not."""
        return self._left_out + self._lost

    def played(self, played: Played) -> None:
        name = played.trajectory.id
        if not self._is_kept(str(name) if played.evaluation else name.group):
            return
        try:
            size = _bytes_of(played)
        except Exception:  # a strange message: the writing thread deals with it
            size = ROW_BYTES
        if not self._put(size, played):
            self._left_out += 1

    def ended(self, group: str, how: str) -> None:
        if self._is_kept(group):
            self._settled(Ended(group, how))

    def trained(self, batch: Batch) -> None:
        groups = [TrainedGroup(g.id, [str(member.id) for member in g.members], g.advantages) for g in batch.groups]
        self._settled(Trained(batch.step, groups))

    def close(self) -> None:
        """Write what is left. Waits for that, but not longer than `CLOSE_S`."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self.dropped:
            self._warn(f"trajectories: {self.dropped} finished attempts were not kept")
        if rows := self._rows_left_out + self._rows_lost:
            self._warn(f"trajectories: {rows} fates of groups were not kept")

    def _is_kept(self, key: str) -> bool:
        """Drawn by name, so members of a group are kept together, and a resumed run keeps the same groups."""
        return self._share >= 1.0 or zlib.crc32(key.encode()) < self._share * 2**32

    def _settled(self, row: Settled) -> None:
        if not self._put(ROW_BYTES, row):
            self._rows_left_out += 1

    def _put(self, size: int, item: Played | Settled) -> bool:
        if self._given_bytes - self._taken_bytes + size > self._queue_bytes:
            return False
        self._given_bytes += size
        self._queue.append((size, item))
        return True

    # --- in the writing thread --------------------------------------------------------------------------------

    def _write_on(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(self._write_s)
            if self._left_out or self._rows_left_out:
                self._tell("they come faster than they are written")
            while self._queue:
                self._write_some()
        if self._held or self.dropped > self._noted:
            self._write_some()
        self._rows_lost += len(self._held)
        self._files.close()

    def _write_some(self) -> None:
        """Write what is held, and one frame from the queue."""
        frame = Frame()
        attempts = taken_bytes = 0
        dropped = self.dropped
        if dropped > self._noted:
            frame.add(Dropped(dropped - self._noted))
        settled = [row for row in self._held if self._encode(frame, row)]
        while self._queue and taken_bytes < FRAME_BYTES:
            given_bytes, item = self._queue.popleft()
            taken_bytes += given_bytes
            if not self._encode(frame, item):
                continue
            if isinstance(item, Played):
                attempts += 1
            else:
                settled.append(item)
        try:
            if frame:
                self._files.write(frame.whole())
                self._noted = dropped
            self._held = []
        except Exception as error:  # a full or lost disk must not end a job
            self._held = settled[:HELD_ROWS]
            self._rows_lost += len(settled) - len(self._held)
            self._lose(attempts, f"{type(error).__name__}: {error}")
        self._taken_bytes += taken_bytes

    def _encode(self, frame: Frame, item: Played | Settled) -> bool:
        """Whether it could be added."""
        try:
            if isinstance(item, Played):
                frame.played(item, self._zero_s)
            else:
                frame.add(item)
        except Exception as error:  # strange user data costs this attempt only
            attempt = isinstance(item, Played)
            self._rows_lost += not attempt
            self._lose(int(attempt), f"one cannot be encoded ({type(error).__name__}: {error})")
            return False
        return True

    def _lose(self, attempts: int, why: str) -> None:
        self._lost += attempts
        self._tell(why)

    def _tell(self, why: str) -> None:
        """Once: the first reason says most."""
        if not self._told:
            self._told = True
            self._warn(f"trajectories: not all are kept, the job goes on: {why}")


class _Files:
    """The files of one run, the newest of ours open. Each life of the run begins a new one, and so does each shard."""

    def __init__(self, folder: Path, total_bytes: int | None, life: int) -> None:
        self._folder = folder
        self._total_bytes = total_bytes
        self._file_bytes = min(FILE_BYTES, (total_bytes or FILE_BYTES * FEWEST_FILES) // FEWEST_FILES)
        self._file: IO[bytes] | None = None
        self._bytes = 0
        """Of the open file, whole frames only."""
        self._life = life

    def write(self, frame: bytes) -> None:
        """Raises OSError. The file then ends where it did before, or the next write begins a new one."""
        if self._file is None or self._bytes >= self._file_bytes:
            self._begin()
        assert self._file is not None
        self._append(frame)
        self._trim()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _append(self, frame: bytes) -> None:
        assert self._file is not None
        left = memoryview(frame)
        try:
            while left:  # a disk that gets full takes a part first
                left = left[self._file.write(left) :]
        except OSError:
            try:
                os.ftruncate(self._file.fileno(), self._bytes)
            except OSError:
                self.close()
            raise
        self._bytes += len(frame)

    def _begin(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._open_next()
        self._bytes = 0
        first = Frame()
        first.add(LifeRow(FORMAT, self._life))
        try:
            self._append(first.whole())
        except OSError:  # without its first row its life would be unknown
            self.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def _open_next(self) -> Path:
        """A file that nobody has, though shards begin theirs at the same time."""
        while True:
            before = files_of(self._folder)
            number = int(before[-1].stem) + 1 if before else 0
            path = self._folder / f"{number:06d}{SUFFIX}"
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - close() closes it
            fcntl.flock(self._file, fcntl.LOCK_EX)
            return path

    def _trim(self) -> None:
        """Make room for the next file by deleting the oldest ones."""
        if self._total_bytes is None or self._bytes < self._file_bytes:
            return
        with contextlib.suppress(OSError):
            files = files_of(self._folder)
            sizes = [path.stat().st_size for path in files]
            total = sum(sizes)
            for path, size in zip(files[:-1], sizes[:-1], strict=True):
                if total <= self._total_bytes - self._file_bytes:
                    return
                if not _is_written(path):
                    path.unlink()
                    total -= size


def _is_written(path: Path) -> bool:
    """Whether a process writes it: that of another shard."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _bytes_of(played: Played) -> int:
    """About what it takes in memory. Texts are estimated from their tokens."""
    size = ROW_BYTES
    for turn in played.trajectory.turns:
        size += 2 * turn.context.nbytes + 3 * turn.completion.tokens.nbytes
    for message in played.left:
        size += len(message.content)
    return size


def next_life(folder: Path) -> int:
    """How often the run has been started by now."""
    return 1 + max((_life_of(path) for path in files_of(folder)), default=-1)


def _life_of(path: Path) -> int:
    """From a file's first row. A file without it was cut off at once."""
    for frame in frames_of(path):
        first = frame.rows[0]
        return first.life if isinstance(first, LifeRow) else -1
    return -1

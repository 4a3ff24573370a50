"""The coordinator's durable memory as files of the run directory.

`journal/batch-<step>` before the step, `journal/checkpoint` replaced atomically; each is written beside, synced, and
renamed, so that what is there is whole. A full disk is StoreFull, and leaves nothing behind.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rollart.append import write_whole
from rollart.errors import JobError, writing
from rollart.types import Batch, Checkpoint
from rollart.workers.wire import SCHEMA, pack, unpack

T = TypeVar("T")


class FileJournal:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write_batch(self, batch: Batch) -> None:
        _write(self._batch(batch.step), pack(batch))

    def batches(self, from_step: int) -> Sequence[Batch]:
        return [_read(self._batch(step), Batch) for step in self.steps() if step >= from_step]

    def steps(self) -> list[int]:
        """The steps whose batches are there, in order."""
        return sorted(int(path.name[6:]) for path in self._folder.glob("batch-????????"))

    def commit(self, checkpoint: Checkpoint) -> None:
        _write(self._folder / "checkpoint", pack(checkpoint))
        for step in self.steps():
            if step < checkpoint.step:
                self._batch(step).unlink()

    def latest(self) -> Checkpoint | None:
        path = self._folder / "checkpoint"
        return _read(path, Checkpoint) if path.exists() else None

    def _batch(self, step: int) -> Path:
        return self._folder / f"batch-{step:08d}"


def _write(path: Path, body: bytes) -> None:
    with writing(str(path)):
        write_whole(path, SCHEMA.to_bytes(4, "big") + body)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _read(path: Path, kind: type[T]) -> T:
    body = path.read_bytes()
    if len(body) >= 4 and body[:4] != SCHEMA.to_bytes(4, "big"):
        raise JobError(f"{path}: written by another version of rollart; resume with that one, or start anew")
    try:
        value = unpack(memoryview(body)[4:])
    except ValueError as error:
        raise JobError(f"{path}: damaged ({error}); remove it to go on without it") from None
    if not isinstance(value, kind):
        raise JobError(
            f"{path}: holds a {type(value).__name__}, not a {kind.__name__}; it is not a journal of this job"
        )
    return value

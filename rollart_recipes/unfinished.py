"""A model directory is there whole or not at all: it is written beside its place, and renamed when it is done."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollart.errors import JobError


@contextmanager
def unfinished(path: str | Path) -> Iterator[Path]:
    """`PATH.unfinished`, to write into; what one that was killed left there goes first."""
    target = Path(path).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise JobError(f"{path}: is not empty; give a new directory")
    beside = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)

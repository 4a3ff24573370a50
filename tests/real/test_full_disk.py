"""The run directory's own small file system gets full in the middle of a job, and later has room again."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.events import schema
from tests.real.harness import job, running
from tests.small_disk import small_disk

DISK_MB = 200
LEFT_MB = 1
"""Enough for events and batches; a checkpoint or a version of the weights takes more."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", f"{DISK_MB}m"):
        yield tmp_path / "disk"


def fill(path: Path) -> None:
    """Take all room but a little, while the job writes."""
    with open(path, "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        file.truncate(file.tell() - LEFT_MB * 1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["files", "shm"])
def test_a_full_disk_costs_a_job_time_and_nothing_else(model: Path, disk: Path, weights: str) -> None:
    raw = job(model, weights={"type": weights, "bucket_mb": 1}, checkpoint={"every": 1})
    with running(disk, raw) as run:
        run.step(2)
        fill(disk / "filler")
        run.until(lambda events: any(isinstance(event, schema.StoreFull) for event in events), "full store")
        (disk / "filler").unlink()
        assert run.wait() == 0, run.said
        run.ended_well(8)
        events = run.events()
    full = [event for event in events if isinstance(event, schema.StoreFull)]
    assert all("No space left on device" in event.reason for event in full)
    assert len([event for event in events if isinstance(event, schema.StoreRoom)]) == len(full)
    assert not [event for event in events if isinstance(event, schema.TrainerDown | schema.Replay)]


@pytest.mark.slow
def test_a_disk_that_stays_full_stops_the_job_which_can_be_resumed(model: Path, disk: Path) -> None:
    raw = job(model, checkpoint={"every": 1}, limits={"backoff_s": 0.1, "store_full_s": 6.0})
    with running(disk, raw) as run:
        run.step(2)
        fill(disk / "filler")
        assert run.wait() == 1
        assert "no room to write for 6 s (limits.store_full_s)" in run.said
        (disk / "filler").unlink()
        run.start("--resume", str(run.out))
        assert run.wait() == 0, run.said
        run.ended_well(8)

"""The journal on disk: writes that are cut short, full disks, and damaged files."""

import contextlib
import errno
import os
from pathlib import Path

import pytest

from rollart.errors import JobError, StoreFull
from rollart.store.journal import FileJournal
from rollart.workers.wire import SCHEMA, pack
from tests.contracts.trainer import checkpoint, empty_batch


def test_a_write_that_was_cut_short_never_was(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    journal.write_batch(empty_batch(0))
    journal.commit(checkpoint(0))
    (tmp_path / "batch-00000001.new").write_bytes(pack(empty_batch(1))[:5])
    (tmp_path / "checkpoint.new").write_bytes(b"")
    journal = FileJournal(tmp_path)
    assert journal.latest() == checkpoint(0)
    assert [batch.step for batch in journal.batches(0)] == [0]
    journal.write_batch(empty_batch(1))
    assert [batch.step for batch in journal.batches(0)] == [0, 1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_journal_as_it_was_and_the_write_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    journal = FileJournal(tmp_path)
    journal.commit(checkpoint(1))
    journal.write_batch(empty_batch(1))
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StoreFull, match=os.strerror(number)):
            journal.write_batch(empty_batch(2))
        with pytest.raises(StoreFull, match=os.strerror(number)):
            journal.commit(checkpoint(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "no part of a file is left"
    assert journal.latest() == checkpoint(1)
    journal.write_batch(empty_batch(2))
    journal.commit(checkpoint(2))
    assert journal.latest() == checkpoint(2)


@pytest.mark.parametrize("cut", [0, 1, -1])
@pytest.mark.parametrize("name", ["batch-00000000", "checkpoint"])
def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path, name: str, cut: int) -> None:
    journal = FileJournal(tmp_path)
    journal.write_batch(empty_batch(0))
    journal.commit(checkpoint(0))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(JobError, match=rf"{name}: damaged .*; remove it"):
        journal.latest() if name == "checkpoint" else journal.batches(0)


@pytest.mark.parametrize("at", [0, 7, -1])
def test_a_changed_byte_is_damage_or_another_value_and_never_a_crash(tmp_path: Path, at: int) -> None:
    journal = FileJournal(tmp_path)
    journal.commit(checkpoint(3))
    path = tmp_path / "checkpoint"
    body = bytearray(path.read_bytes())
    for value in range(256):
        body[at] = value
        path.write_bytes(body)
        with contextlib.suppress(JobError):
            journal.latest()


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    (tmp_path / "checkpoint").write_bytes(SCHEMA.to_bytes(4, "big") + pack(empty_batch(0)))
    with pytest.raises(JobError, match="holds a Batch, not a Checkpoint"):
        journal.latest()


def test_what_else_lies_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    for name in ("notes", "batch-x", "batch-000000001"):
        (tmp_path / name).write_text("mine")
    journal.write_batch(empty_batch(0))
    journal.commit(checkpoint(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch-000000001", "batch-x", "checkpoint", "notes"]


def test_a_journal_of_records_with_other_fields_is_not_read(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    journal.write_batch(empty_batch(0))
    [path] = tmp_path.glob("batch-*")
    path.write_bytes((SCHEMA ^ 1).to_bytes(4, "big") + path.read_bytes()[4:])
    with pytest.raises(JobError, match="written by another version of rollart; resume with that one"):
        journal.batches(0)

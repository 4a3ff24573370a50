"""The trainer contract, on the single-device trainer in this process; the journal contract, on files."""

import asyncio
import contextlib
import errno
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollart.errors import JobError, StoreFull, WeightError
from rollart.ports import Journal, Trainer
from rollart.store.journal import FileJournal
from rollart.store.shm import ShmStore
from rollart.train.single import AsyncTrainer, SingleTrainer
from rollart.types import Batch, WeightManifest
from rollart.workers.wire import SCHEMA, pack
from tests.contracts.trainer import (
    JournalContract,
    TrainerBench,
    TrainerContract,
    checkpoint,
    empty_batch,
)
from tests.train.samples import make_batch, random_samples, tiny_model
from tests.train.settings import trainer_settings


class TestAsyncTrainer(TrainerContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def play(self, work: Callable[[TrainerBench], Awaitable[None]]) -> None:
        settings = trainer_settings(tiny_model(self.folder / "model"), self.folder, lr=1e-2)
        store = ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=1 << 12)

        def batch(step: int) -> Batch:
            return make_batch(step, random_samples(step, 8))

        def complete(manifest: WeightManifest) -> bool:
            try:
                return bool(store.fetch(manifest))
            except WeightError:
                return False

        async def another() -> Trainer:
            return AsyncTrainer(SingleTrainer(settings), store)

        async def main() -> None:
            async with asyncio.timeout(60):
                await work(TrainerBench(trainer=await another(), another=another, batch=batch, complete=complete))

        try:
            asyncio.run(main())
        finally:
            store.close()


class TestFileJournal(JournalContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "journal"

    def journal(self) -> Journal:
        return FileJournal(self.folder)

    def reopened(self, journal: Journal) -> Journal:
        return FileJournal(self.folder)


# --- damaged files ----------------------------------------------------------------------------------------------


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

"""Trajectories on disk: what is written comes back whole, whatever is cut off, full, slow or strange."""

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import rollart.records.recorder
from rollart.errors import JobError
from rollart.records.format import FOLDER, ROW_BYTES, Frame, files_of, frames_of
from rollart.records.reader import Archive, TrajectoryFilter
from rollart.records.recorder import FileRecorder
from rollart.records.rows import AttemptRow, Dropped, Ended, LifeRow
from rollart.types import Message, TurnNote
from tests.contracts.recorder import RecorderBench, RecorderContract, batch, played, trajectory

NEVER_S = 1000.0
"""Between two writes: nothing is written but at the end."""


def fates(run: Path) -> dict[str, tuple[str, int | None, float | None]]:
    return {head.id: (head.fate, head.step, head.advantage) for head in Archive(run).find(TrajectoryFilter())}


class TestFileRecorder(RecorderContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._run = tmp_path

    def bench(self) -> RecorderBench:
        recorder = FileRecorder(self._run / FOLDER)

        def kept() -> dict[str, tuple[str, int | None, float | None]]:
            recorder.close()
            return fates(self._run)

        return RecorderBench(recorder=recorder, kept=kept)


def write(run: Path, work: Callable[[FileRecorder], object], **settings: Any) -> FileRecorder:
    recorder = FileRecorder(run / FOLDER, **settings)
    work(recorder)
    recorder.close()
    return recorder


def ids(run: Path) -> list[str]:
    return [head.id for head in reversed(Archive(run).find(TrajectoryFilter()))]


def test_a_trajectory_comes_back_with_everything(tmp_path: Path) -> None:
    write(tmp_path, lambda keep: keep.played(played()), zero_s=100.0)
    archive = Archive(tmp_path)
    [head] = archive.find(TrajectoryFilter())
    found = archive.one(head)
    before = trajectory()
    assert [turn.shown for turn in found.turns] == [note.shown for note in played().notes]
    assert [turn.text for turn in found.turns] == ["calc", "5"]
    assert found.left == played().left
    for turn, was in zip(found.turns, before.turns, strict=True):
        assert turn.context.tolist() == was.context.tolist()
        assert turn.tokens.tolist() == was.completion.tokens.tolist()
        assert turn.logprobs.dtype == np.float32
        assert (turn.logprobs == was.completion.logprobs).all()
        assert (turn.fresh, turn.reward, turn.env_s) == (was.fresh, was.reward, was.env_s)
        assert (turn.finish, turn.engine, turn.pool) == ("stop", "fast-1", "fast")
    assert found.turns[1].versions.tolist() == [3, 4, 4]
    assert [(turn.wait_s, turn.generate_s) for turn in found.turns] == [(0.5, 1.5), (0.25, 0.75)]
    assert (head.reward, head.parts, head.status) == (1.0, {"found": 0.9, "brevity": 0.1}, "done")
    assert (head.born, head.newest, head.turns, head.tokens) == (3, 4, 2, 7)
    assert head.times == {
        "started_s": 10.0,
        "ended_s": 15.0,
        "open_s": 0.125,
        "reset_s": 0.0625,
        "wait_s": 0.75,
        "generate_s": 2.25,
        "env_s": 0.75,
        "queue_s": 0.5,
        "reward_s": 0.25,
    }


@pytest.mark.parametrize("tokens", [[], [0, 65_535], [70_000, 3, 2**24 - 1], [70_000, 0, 2**31 - 1], [-1, 5]])
def test_tokens_of_any_width_come_back(tokens: list[int], tmp_path: Path) -> None:
    whole = played()
    first, *others = whole.trajectory.turns
    wide = np.array(tokens, dtype=np.int32)
    turns = (msgspec.structs.replace(first, context=wide), *others)
    whole = replace(whole, trajectory=replace(whole.trajectory, turns=turns))
    write(tmp_path, lambda keep: keep.played(whole))
    archive = Archive(tmp_path)
    assert archive.one(archive.find(TrajectoryFilter())[0]).turns[0].context.tolist() == wide.tolist()


def test_half_a_character_is_no_trouble(tmp_path: Path) -> None:
    whole = played()
    object.__setattr__(whole, "notes", (whole.notes[0], TurnNote("fast", 0.0, (), "a\ud83d")))
    write(tmp_path, lambda keep: keep.played(whole))
    archive = Archive(tmp_path)
    assert archive.one(archive.find(TrajectoryFilter())[0]).turns[1].text.startswith("a")


def test_a_file_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    """As after a kill -9."""
    for number in range(3):  # three frames in one file, as three writes make them
        write(tmp_path, lambda keep, number=number: keep.played(played(f"g{number}")))  # type: ignore[misc]
    whole = b"".join(path.read_bytes() for path in files_of(tmp_path / FOLDER))
    for path in files_of(tmp_path / FOLDER):
        path.unlink()
    path = tmp_path / FOLDER / "000000.rec"
    counts = []
    for length in [*range(0, len(whole) - 1, 13), len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:length])
        counts.append(sum(isinstance(row, AttemptRow) for frame in frames_of(path) for row in frame.rows))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 3)
    assert counts[-2] == 2, "the last frame is torn"


def test_damage_hides_what_follows_it_and_nothing_else(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, lambda keep, number=number: keep.played(played(f"g{number}")))  # type: ignore[misc]
    middle = files_of(tmp_path / FOLDER)[1]
    body = bytearray(middle.read_bytes())
    body[len(body) // 2] ^= 255
    middle.write_bytes(bytes(body))
    assert ids(tmp_path) == ["g0.0.0", "g2.0.0"]


def test_a_resumed_run_goes_on_and_lost_history_is_marked(tmp_path: Path) -> None:
    def first(keep: FileRecorder) -> None:
        for group in ("ready", "open", "fresh"):
            keep.played(played(group))

    def second(keep: FileRecorder) -> None:
        keep.trained(batch(4, ("ready", [trajectory("ready")])))
        keep.played(played("open", attempt=100))
        keep.trained(batch(5, ("open", [trajectory("open", attempt=100)])))

    write(tmp_path, first)
    before = files_of(tmp_path / FOLDER)[0].read_bytes()
    write(tmp_path, second)
    assert files_of(tmp_path / FOLDER)[0].read_bytes() == before
    assert fates(tmp_path) == {
        "ready.0.0": ("trained", 4, 1.0),
        "open.0.0": ("restart", None, None),
        "fresh.0.0": ("restart", None, None),
        "open.0.100": ("trained", 5, 1.0),
    }
    assert {head.id: head.life for head in Archive(tmp_path).find(TrajectoryFilter())}["open.0.100"] == 1


def test_held_out_episodes_played_again_after_a_kill_are_both_there(tmp_path: Path) -> None:
    episode = played("eval0-sampled-maths")
    object.__setattr__(episode, "evaluation", True)
    for _ in range(2):
        write(tmp_path, lambda keep: keep.played(episode))
    assert [(head.life, head.fate) for head in Archive(tmp_path).find(TrajectoryFilter())] == [(1, "eval"), (0, "eval")]


def test_a_group_opened_again_is_not_over_because_it_once_was(tmp_path: Path) -> None:
    def first(keep: FileRecorder) -> None:
        keep.played(played("g1"))
        keep.ended("g1", "stale")

    write(tmp_path, first)
    write(tmp_path, lambda keep: keep.played(played("g1", attempt=100)))
    assert fates(tmp_path) == {"g1.0.0": ("stale", None, None), "g1.0.100": ("open", None, None)}


def test_an_unused_attempt_stays_unused_when_its_step_is_made_again(tmp_path: Path) -> None:
    step = batch(4, ("g1", [trajectory("g1")]))

    def first(keep: FileRecorder) -> None:
        keep.played(played("g1"))
        keep.played(played("g1", 1))
        keep.trained(step)

    write(tmp_path, first)
    write(tmp_path, lambda keep: keep.trained(step))
    assert fates(tmp_path) == {"g1.0.0": ("trained", 4, 1.0), "g1.1.0": ("unused", None, None)}


def test_a_share_is_of_whole_groups_and_the_same_ones_again(tmp_path: Path) -> None:
    def work(keep: FileRecorder) -> None:
        for number in range(400):
            for member in range(2):
                keep.played(played(f"g{number}", member))

    for name in ("a", "b"):
        write(tmp_path / name, work, share=0.25)
    kept = ids(tmp_path / "a")
    assert kept == ids(tmp_path / "b")
    groups = [name.split(".")[0] for name in kept]
    assert [groups.count(group) for group in dict.fromkeys(groups)] == [2] * len(set(groups))
    assert 50 <= len(set(groups)) <= 150


def test_the_oldest_files_go_where_the_total_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollart.records.recorder, "FRAME_BYTES", 1)

    def work(keep: FileRecorder) -> None:
        for number in range(60):
            keep.played(played(f"g{number}"))

    write(tmp_path, work, total_bytes=16_000)
    files = files_of(tmp_path / FOLDER)
    assert sum(path.stat().st_size for path in files) <= 16_000
    kept = ids(tmp_path)
    assert kept == [f"g{number}.0.0" for number in range(60 - len(kept), 60)]
    assert 5 < len(kept) < 60
    assert Archive(tmp_path).first_is_gone
    write(tmp_path / "whole", work, total_bytes=None)
    assert len(ids(tmp_path / "whole")) == 60
    assert not Archive(tmp_path / "whole").first_is_gone


def test_a_file_that_another_process_writes_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollart.records.recorder, "FRAME_BYTES", 1)
    other = FileRecorder(tmp_path / FOLDER, write_s=0.01)
    other.played(played("other"))
    while not files_of(tmp_path / FOLDER) or not ids(tmp_path):
        time.sleep(0.01)

    def work(keep: FileRecorder) -> None:
        for number in range(60):
            keep.played(played(f"g{number}"))

    write(tmp_path, work, total_bytes=16_000)
    assert "other.0.0" in (kept := ids(tmp_path))
    assert len(kept) < 60, "others were deleted"
    other.close()
    write(tmp_path, work, total_bytes=16_000)
    assert "other.0.0" not in ids(tmp_path), "nobody writes it any more"


def test_what_comes_too_fast_is_dropped_counted_and_warned_of_once(tmp_path: Path) -> None:
    warnings: list[str] = []

    def work(keep: FileRecorder) -> None:
        for number in range(50):
            keep.played(played(f"g{number}"))

    recorder = write(tmp_path, work, queue_bytes=10_000, write_s=NEVER_S, warn=warnings.append)
    kept = ids(tmp_path)
    assert 0 < len(kept) < 50
    assert recorder.dropped == 50 - len(kept) == Archive(tmp_path).dropped
    assert [text for text in warnings if "faster" in text] == warnings[:1]
    assert f"{recorder.dropped} finished attempts were not kept" in warnings[-1]
    assert len(warnings) == 2


def test_a_folder_that_cannot_be_made_costs_the_trajectories_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    warnings: list[str] = []

    def work(keep: FileRecorder) -> None:
        for number in range(5):
            keep.played(played(f"g{number}"))
        keep.trained(batch(0, ("g1", [trajectory()])))

    recorder = write(tmp_path, work, warn=warnings.append, write_s=0.001)
    assert recorder.dropped == 5
    assert sum("the job goes on" in text for text in warnings) == 1
    with pytest.raises(JobError, match="no trajectories"):
        Archive(tmp_path)


class FullDisk:
    """Files on a disk that takes a part of a write and then no more, while it is `full`."""

    def __init__(self) -> None:
        self.full = threading.Event()
        self.refused = threading.Event()

    def open(self, path: Path, mode: str, **options: Any) -> Any:
        real = open(path, mode, **options)  # noqa: SIM115
        disk = self

        class File:
            def write(self, data: memoryview) -> int:
                if not disk.full.is_set():
                    return real.write(data)
                if len(data) > 10:
                    return real.write(data[:10])
                disk.refused.set()
                raise OSError(errno.ENOSPC, "No space left on device")

            fileno = staticmethod(real.fileno)
            close = staticmethod(real.close)

        return File()


def test_a_disk_that_was_full_for_a_while_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk()
    monkeypatch.setattr(rollart.records.recorder, "open", disk.open, raising=False)
    warnings: list[str] = []
    recorder = FileRecorder(tmp_path / FOLDER, write_s=0.001, warn=warnings.append)
    recorder.played(played("before"))
    wait_for(lambda: "before.0.0" in ids_or_none(tmp_path))
    disk.full.set()
    recorder.played(played("meanwhile"))
    assert disk.refused.wait(10)
    wait_for(lambda: recorder.dropped == 1)
    disk.full.clear()
    recorder.played(played("after"))
    recorder.close()
    assert ids(tmp_path) == ["before.0.0", "after.0.0"]
    assert Archive(tmp_path).dropped == 1
    assert "No space left on device" in warnings[0]
    assert sum("the job goes on" in text for text in warnings) == 1


def test_a_disk_that_is_full_while_a_file_begins_leaves_no_file_without_its_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk()
    monkeypatch.setattr(rollart.records.recorder, "open", disk.open, raising=False)
    disk.full.set()
    recorder = FileRecorder(tmp_path / FOLDER, write_s=0.001)
    recorder.played(played("meanwhile"))
    wait_for(lambda: recorder.dropped == 1)
    assert not files_of(tmp_path / FOLDER)
    disk.full.clear()
    recorder.played(played("after"))
    recorder.close()
    for path in files_of(tmp_path / FOLDER):
        assert isinstance(next(iter(frames_of(path))).rows[0], LifeRow)
    write(tmp_path, lambda keep: keep.played(played("resumed")))
    assert {head.id: head.life for head in Archive(tmp_path).find(TrajectoryFilter())} == {
        "after.0.0": 0,
        "resumed.0.0": 1,
    }


@pytest.mark.parametrize("row", [Dropped(1), Ended("g0", "stale")])
def test_a_file_without_its_first_row_does_not_stop_a_resumed_run(tmp_path: Path, row: Dropped | Ended) -> None:
    (tmp_path / FOLDER).mkdir()
    frame = Frame()
    frame.add(row)
    (tmp_path / FOLDER / "000000.rec").write_bytes(frame.whole())
    recorder = write(tmp_path, lambda keep: keep.played(played("resumed")))
    assert recorder.dropped == 0
    assert ids(tmp_path) == ["resumed.0.0"]


def test_what_became_of_groups_while_the_disk_was_full_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk()
    monkeypatch.setattr(rollart.records.recorder, "open", disk.open, raising=False)
    warnings: list[str] = []
    recorder = FileRecorder(tmp_path / FOLDER, write_s=0.001, warn=warnings.append)
    for group in ("g1", "g2"):
        recorder.played(played(group))
    wait_for(lambda: len(ids_or_none(tmp_path)) == 2)
    disk.full.set()
    recorder.ended("g1", "stale")
    assert disk.refused.wait(10)
    disk.refused.clear()
    recorder.trained(batch(4, ("g2", [trajectory("g2")])))
    assert disk.refused.wait(10)
    disk.full.clear()
    recorder.close()
    assert fates(tmp_path) == {"g1.0.0": ("stale", None, None), "g2.0.0": ("trained", 4, 1.0)}
    assert len(warnings) == 1, "the disk was full; nothing is missing"


def test_what_became_of_groups_is_held_in_bounds_and_the_rest_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollart.records.recorder, "HELD_ROWS", 2)
    (tmp_path / FOLDER).write_text("in the way")
    warnings: list[str] = []

    def work(keep: FileRecorder) -> None:
        for number in range(5):
            keep.ended(f"g{number}", "stale")

    write(tmp_path, work, warn=warnings.append)
    assert "5 fates of groups were not kept" in warnings[-1]
    write(tmp_path / "fast", work, warn=warnings.append, queue_bytes=3 * ROW_BYTES, write_s=NEVER_S)
    assert "2 fates of groups were not kept" in warnings[-1]


def wait_for(true: Callable[[], bool]) -> None:
    """Of another thread, which has a few milliseconds of work."""
    tick = threading.Event()
    for _ in range(2000):
        if true():
            return
        tick.wait(0.005)
    raise AssertionError("it never became true")


def ids_or_none(run: Path) -> list[str]:
    try:
        return ids(run)
    except JobError:
        return []


def test_what_cannot_be_encoded_costs_one_attempt(tmp_path: Path) -> None:
    whole = played("strange")
    object.__setattr__(whole, "left", (Message(role="user", content=["a list"]),))  # type: ignore[arg-type]
    warnings: list[str] = []

    def work(keep: FileRecorder) -> None:
        keep.played(played("before"))
        keep.played(whole)
        keep.played(played("after"))

    recorder = write(tmp_path, work, warn=warnings.append)
    assert ids(tmp_path) == ["before.0.0", "after.0.0"]
    assert recorder.dropped == 1
    assert "cannot be encoded" in warnings[0]


@pytest.mark.parametrize(
    ("wanted", "order", "found"),
    [
        (TrajectoryFilter(), "newest", ["g4.0.0", "g3.0.0", "g2.0.0", "g1.0.0"]),
        (TrajectoryFilter(), "worst", ["g2.0.0", "g1.0.0", "g3.0.0"]),
        (TrajectoryFilter(), "best", ["g3.0.0", "g1.0.0", "g2.0.0"]),
        (TrajectoryFilter(), "failed", ["g4.0.0"]),
        (TrajectoryFilter(reward=(0.4, 2.0)), "newest", ["g3.0.0", "g1.0.0"]),
        (TrajectoryFilter(status="failed"), "newest", ["g4.0.0"]),
        (TrajectoryFilter(name="g2"), "newest", ["g2.0.0"]),
        (TrajectoryFilter(name="g3.0.0"), "newest", ["g3.0.0"]),
        (TrajectoryFilter(task="maths"), "worst", ["g2.0.0", "g1.0.0", "g3.0.0"]),
        (TrajectoryFilter(task="lake"), "newest", []),
        (TrajectoryFilter(version=4), "best", ["g3.0.0", "g1.0.0", "g2.0.0"]),
        (TrajectoryFilter(version=5), "newest", []),
    ],
)
def test_trajectories_are_found_and_ordered(
    tmp_path: Path, wanted: TrajectoryFilter, order: str, found: list[str]
) -> None:
    def work(keep: FileRecorder) -> None:
        for group, reward in (("g1", 0.5), ("g2", -1.0), ("g3", 2.0), ("g4", None)):
            keep.played(played(group, reward=reward))

    write(tmp_path, work)
    archive = Archive(tmp_path)
    assert [head.id for head in archive.find(wanted, order)] == found
    assert [head.id for head in archive.find(wanted, order, 1)] == found[:1]


def test_an_advantage_that_is_no_number_costs_its_row_only(tmp_path: Path) -> None:
    strange = batch(3, ("g1", [trajectory()]))
    object.__setattr__(strange.groups[0], "advantages", (object(),))
    warnings: list[str] = []

    def work(keep: FileRecorder) -> None:
        keep.trained(strange)
        keep.played(played("after"))

    recorder = write(tmp_path, work, warn=warnings.append)
    assert ids(tmp_path) == ["after.0.0"]
    assert recorder.dropped == 0
    assert "cannot be encoded" in warnings[0]


def test_a_file_that_goes_while_it_is_looked_at_is_told_in_one_line(tmp_path: Path) -> None:
    """The oldest files of a run that is still going on."""
    write(tmp_path, lambda keep: keep.played(played()))
    archive = Archive(tmp_path)
    [head] = archive.find(TrajectoryFilter())
    files_of(tmp_path / FOLDER)[0].unlink()
    assert list(archive.whole([head])) == []
    with pytest.raises(JobError, match=r"^g1\.0\.0: its file has gone since"):
        archive.one(head)

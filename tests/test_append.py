"""Files that are only added to: a full disk costs them time, and no line."""

import errno
from pathlib import Path
from typing import Any

import pytest

from rollart.append import AppendFile
from rollart.errors import StoreFull, writing
from rollart.events import schema
from rollart.events.log import EventLog, read_events
from rollart.launch.books import as_lines
from tests.events import some


class SmallDisk:
    """A raw file on a disk that takes so many bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self.room = room

    def write(self, data: memoryview) -> int:
        taken = min(len(data), self.room)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        return int(self._file.write(data[:taken]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def put_on(file: AppendFile, room: int) -> SmallDisk:
    disk = SmallDisk(file.file, room)
    file.file = disk  # type: ignore[assignment]
    return disk


def test_what_finds_no_room_is_held_and_goes_first_when_there_is_some(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = AppendFile(path)
    disk = put_on(file, room=5)
    file.put(b"first\nsecond\n")
    with pytest.raises(StoreFull, match=f"{path}: .*No space left"):
        file.write_out()
    assert path.read_bytes() == b"first"
    assert file.full
    file.put(b"third\n")
    disk.room = 100
    file.write_out(durable=True)
    assert path.read_bytes() == b"first\nsecond\nthird\n"
    assert not file.full
    assert file.close() == 0


def test_what_finds_no_room_to_the_end_is_counted(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "lines")
    put_on(file, room=0)
    file.put(b"first\n")
    assert file.close() == 6


def test_a_log_on_a_full_disk_ends_nothing_and_is_whole_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(lambda: 0.0, path)
    assert log.file is not None
    disk = put_on(log.file, room=30)
    log.emit(some(schema.Run, name="x"))
    log.flush()
    for _ in range(3):
        log.emit(schema.Warning(text="y" * 2_000_000))
    log.flush()
    with pytest.raises(StoreFull):
        log.flush(durable=True)
    disk.room = 1 << 30
    log.flush(durable=True)
    assert [event.n for event in read_events(path)] == [0, 1, 2, 3]
    assert log.close() == 0


def test_a_log_that_cannot_begin_its_next_part_goes_on_in_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(lambda: 0.0, path, part_bytes=10)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        log.emit(some(schema.Run))
        log.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
    log.emit(schema.Finished(steps=0))
    log.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert [type(event) for event in read_events(path)] == [schema.Run, schema.Finished]


def test_metrics_wait_for_room(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"old")
    file = AppendFile(path, fresh=True)
    disk = put_on(file, room=4)
    keep = as_lines(file)
    keep({"step": 1.0})
    disk.room = 100
    keep({"step": 2.0})
    assert path.read_bytes() == b'{"step":1.0}\n{"step":2.0}\n'
    file.close()


class SafetensorError(Exception):
    """As the library has it: no number, only words."""


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (ValueError("no"), False),
    ],
)
def test_a_full_disk_or_quota_is_told_from_other_errors(error: Exception, full: bool) -> None:
    words = str(error.args[-1]).split("(")[0].strip()
    with pytest.raises(StoreFull if full else type(error), match=words), writing("somewhere"):
        raise error


def test_each_line_is_handed_on_once_whatever_the_disk_takes(tmp_path: Path) -> None:
    path, got = tmp_path / "events.jsonl", list[bytes]()
    log = EventLog(lambda: 0.0, path, lines=got.append)
    assert log.file is not None
    disk = put_on(log.file, room=10)
    for number in range(3):
        log.emit(some(schema.Warning, text=f"number {number}"))
        log.flush()
        log.flush()
    assert len(got) == 3
    disk.room = 10_000
    assert log.close() == 0
    assert len(got) == 3
    assert b"".join(got) == path.read_bytes()

"""The log as files: it goes on in new parts, and every reader sees one log, after a kill at any moment too."""

import builtins
import gzip
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.cli import main
from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import (
    OWN,
    EventBuffer,
    EventLog,
    Fold,
    Renumbering,
    drop_torn_line,
    event_files,
    micros,
    packed,
    read_events,
    unpacked,
)
from rollart.events.schema import Event
from rollart.launch.books import read_again
from rollart.launch.simulation import simulate
from rollart.launch.training import LoggedFacts
from rollart.types import Span
from tests.control.scene import BASE
from tests.events import some


def log_of(path: Path, count: int, *, part_bytes: int = 100, first: int = 0) -> None:
    """Events of about 30 bytes, a flush after each."""
    log = EventLog(lambda: 0.0, path, part_bytes=part_bytes, after=schema.Killed(n=first - 1, t=0.0) if first else None)
    for _ in range(count):
        log.emit(schema.Killed())
        log.flush()
    log.close()


def numbers(path: Path) -> list[int]:
    return [event.n for event in read_events(path)]


def test_a_log_goes_on_in_a_new_part_and_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, 20)
    names = [part.name for part in event_files(path)]
    assert len(names) > 3
    assert names == [*(f"events-{number:06d}.jsonl" for number in range(1, len(names))), "events.jsonl"]
    assert all(part.stat().st_size < 200 for part in event_files(path))
    assert numbers(path) == list(range(20))
    log_of(path, 10, first=20)
    assert numbers(path) == list(range(30)), "a resumed run goes on after the last part"


def test_a_log_below_the_size_is_one_file(tmp_path: Path) -> None:
    log_of(tmp_path / "events.jsonl", 20, part_bytes=1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_part_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, 20)
    first = event_files(path)[0]
    first.with_name(f"{first.name}.gz").write_bytes(gzip.compress(first.read_bytes()))
    first.unlink()
    assert numbers(path) == list(range(20))
    log_of(path, 10, first=20)
    assert numbers(path) == list(range(30)), "its number is not given again"


def test_a_kill_between_two_parts_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, 20)
    whole = len(event_files(path))
    path.rename(tmp_path / f"events-{whole:06d}.jsonl")
    assert numbers(path) == list(range(20))
    log_of(path, 2, first=20)
    assert numbers(path) == list(range(22))


def test_a_reader_that_is_overtaken_by_a_new_part_misses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that it was about to open gets its number, and another one its name."""
    path = tmp_path / "events.jsonl"
    log_of(path, 3, part_bytes=1 << 20)
    opened: list[Path] = []

    def open_late(name: Path, mode: str = "r") -> Any:
        if name == path and not opened:
            opened.append(name)
            path.rename(tmp_path / "events-000001.jsonl")
            log_of(path, 3, part_bytes=1 << 20, first=3)
        return open(name, mode)

    monkeypatch.setattr("rollart.events.log.open", open_late, raising=False)
    assert numbers(path) == list(range(6))


def test_no_log_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        numbers(tmp_path / "events.jsonl")
    assert event_files(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize("torn", [b"", b'{"n": 20', b"x" * 200_000])
@pytest.mark.parametrize("count", [0, 20])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes, count: int) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, count, part_bytes=1 << 20)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    drop_torn_line(path)
    assert path.read_bytes() == whole


def test_a_resumed_run_reads_its_history_once_and_never_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, 10_000, part_bytes=100_000)
    last = event_files(path)[-1]
    last.write_bytes(last.read_bytes() + b'{"n": 10000, "t"')
    size = sum(part.stat().st_size for part in event_files(path))
    reads: Counter[str] = Counter()
    plain_open = builtins.open

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            count = super().readinto(buffer) or 0
            reads["bytes"] += count
            reads["largest"] = max(reads["largest"], len(buffer))
            return count

        def readall(self) -> bytes:
            raise AssertionError("the whole file at once")

    def counting(name: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if not str(name).startswith(str(tmp_path)) or "b" not in mode:
            return plain_open(name, mode, *arguments, **keywords)
        file = Counted(str(name), mode.replace("b", ""))
        return io.BufferedRandom(file) if "+" in mode else io.BufferedReader(file)

    monkeypatch.setattr(builtins, "open", counting)
    monkeypatch.setattr(io, "open", counting)
    known, seen = LoggedFacts(), Counter[type[Event]]()

    def look(event: Event) -> None:
        seen[type(event)] += 1

    assert read_again(path, (known.read, look)).n == 9_999
    assert seen[schema.Killed] == 10_000
    assert reads["bytes"] < 1.5 * size, "once, and the last line's block"
    assert reads["largest"] <= 1 << 17, "in pieces"


def test_a_resumed_log_goes_on_after_what_a_kill_left_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, 3, part_bytes=1 << 20)
    with path.open("ab") as file:
        file.write(b'{"n":3,"t":0.0,"e":"a"')
    last = read_again(path, ())
    log_of(path, 1, part_bytes=1 << 20, first=last.n + 1)
    assert numbers(path) == [0, 1, 2, 3]


def test_the_commands_read_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = build_job({**BASE, "model": {}, "sim": {}})
    simulate(job, tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    whole = list(read_events(path))
    lines = path.read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / "events-000001.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    path.write_bytes(b"".join(lines[len(lines) // 2 :]))
    assert list(read_events(path)) == whole
    assert main(["audit", str(tmp_path / "run")]) == 0
    assert "was kept" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "run")]) == 0
    assert main(["sim", "fit", str(tmp_path / "run"), "--out", str(tmp_path / "profile.yaml")]) == 0


def test_the_size_of_a_part_is_the_jobs(tmp_path: Path) -> None:
    job = build_job({**BASE, "track": {"events_mb": 1}, "train": {"steps": 80}})
    simulate(job, tmp_path / "run")
    parts = event_files(tmp_path / "run" / "events.jsonl")
    assert len(parts) > 1
    assert [event.n for event in read_events(parts[-1])] == list(range(sum(1 for _ in read_events(parts[-1]))))


def test_text_that_is_no_utf8_is_written_with_a_mark_in_its_place(tmp_path: Path) -> None:
    log = EventLog(lambda: 0.0, tmp_path / "events.jsonl")
    heard: list[Event] = []
    log.read_by(heard.append)
    log.emit(schema.Stall(text="caf\udce9", waiting=[schema.Wait(who="caf\udce9", what="", for_s=1.0)]))
    log.emit(some(schema.Reward, id="g0", parts={"\udce9": 1.0}))
    log.close()
    written = list(read_events(tmp_path / "events.jsonl"))
    waiting = [schema.Wait(who="caf?", what="", for_s=1.0)]
    assert written == [
        schema.Stall(n=0, t=0.0, text="caf?", waiting=waiting),
        some(schema.Reward, n=1, t=0.0, id="g0", parts={"?": 1.0}),
    ]
    assert heard == written


def test_what_is_no_json_is_a_mistake_of_ours_and_not_hidden(tmp_path: Path) -> None:
    log = EventLog(lambda: 0.0, tmp_path / "events.jsonl")
    with pytest.raises(TypeError):
        log.emit(schema.Warning(text=tmp_path))  # type: ignore[arg-type]
    log.close()


def test_a_field_with_its_default_is_not_in_the_line(tmp_path: Path) -> None:
    log = EventLog(lambda: 0.0, tmp_path / "events.jsonl")
    log.emit(some(schema.Reward, id="g0"))
    log.emit(schema.Stopped(reason="no", user=True, cause=0))
    log.emit(some(schema.Said, id="g0/0", spans=[Span(0, 3), Span(1, 2)]))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "e": "reward",
        "n": 0,
        "t": 0,
        "id": "g0",
        "value": 0,
        "s": 0,
        "busy_s": 0,
        "cold_s": 0,
        "tries": 0,
    }
    assert lines[1] == {"e": "stopped", "n": 1, "t": 0.0, "cause": 0, "reason": "no", "user": True}
    assert lines[2]["spans"] == [[0, 3], [1, 2]]
    assert "prefill_busy_s" not in lines[2]


def test_a_number_that_is_none_is_null_and_read_again(tmp_path: Path) -> None:
    log = EventLog(lambda: 0.0, tmp_path / "events.jsonl")
    log.emit(some(schema.StepEnd, metrics={"actor/grad_norm": math.nan}))
    log.close()
    [event] = read_events(tmp_path / "events.jsonl")
    assert isinstance(event, schema.StepEnd)
    assert event.metrics == {"actor/grad_norm": None}


def test_every_kind_of_event_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = EventLog(lambda: 0.0, tmp_path / "events.jsonl")
    heard: list[Event] = []
    log.read_by(heard.append)
    for kind in schema.KINDS.values():
        log.emit(some(kind))
    log.close()
    assert list(read_events(tmp_path / "events.jsonl")) == heard
    assert [type(event) for event in heard] == list(schema.KINDS.values())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"e":"dance","n":1,"t":0.0}', "line 2: 'dance' is not a known kind of event; read it with the"),
        (b'{"n":1,"t":0.0}', "line 2: None is not a known kind of event; read it with the"),
        (
            b'{"e":"push","n":1,"t":0.0}',
            r"line 2: an event 'push' of another version .*missing required field `version`",
        ),
        (b'{"e":"push","n":1,"t":0.0,"version":"one"}', r"line 2: an event 'push' .*Expected `int`, got `str`"),
        (b'{"e":"push","n":1,', r"line 2: is not an event \(.*\); the file was damaged"),
        (b"[1]", r"line 2: is not an event \(.*\); the file was damaged"),
        (b'{"e":"warning","text":"\xff"}', r"line 2: is not an event \(.*\); the file was damaged"),
    ],
)
def test_a_line_that_is_no_event_of_this_version_is_named(
    tmp_path: Path, line: bytes, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, 1)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(JobError, match=f"^{path}: {text}"):
        numbers(path)
    assert main(["audit", str(tmp_path)]) == 2
    assert f"{path}: line 2: " in capsys.readouterr().err


def test_a_field_that_a_newer_version_added_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"e":"push","n":0,"t":0.0,"version":3,"new":{"a":1}}\n')
    assert list(read_events(tmp_path / "events.jsonl")) == [schema.Push(n=0, t=0.0, version=3)]


class Counting(Fold):
    def __init__(self, *parts: Fold) -> None:
        self.read_kinds: list[type[Event]] = []
        super().__init__(*parts)

    def _on_killed(self, event: schema.Killed) -> None:
        self.read_kinds.append(type(event))

    def _on_words(self, event: schema.Warning | schema.Stall) -> None:
        self.read_kinds.append(type(event))

    def helper(self, event: Event) -> None:
        raise AssertionError("takes no kind of its own")


class Swaps(Fold):
    def __init__(self) -> None:
        self.count = 0
        super().__init__()

    def _on_swap(self, event: schema.SwapEnd) -> None:
        self.count += 1


def test_a_fold_gets_the_kinds_that_its_methods_name_and_its_parts_get_theirs() -> None:
    swaps = Swaps()
    fold = Counting(swaps)
    for event in (schema.Killed(), schema.Warning(text=""), some(schema.SwapEnd), some(schema.Stall), some(schema.End)):
        fold.read(event)
    assert fold.read_kinds == [schema.Killed, schema.Warning, schema.Stall]
    assert swaps.count == 1


def test_two_handlers_of_one_kind_are_refused() -> None:
    with pytest.raises(AssertionError, match="two handlers of SwapEnd"):
        Counting(Swaps(), Swaps())


@given(st.floats(0.0, 1e7))
def test_microseconds_are_as_round_gives_them(seconds: float) -> None:
    half = round(seconds, 6) + 5e-7  # where digits are few enough for doubt
    for one in (seconds, half, math.nextafter(half, 0.0), math.nextafter(half, 1e9)):
        assert micros(one) == round(one, 6)


def test_events_of_a_buffer_get_numbers_of_the_log_and_so_do_their_causes(tmp_path: Path) -> None:
    """Two buffers, taken in turn: each event still names the one it followed from, which may be of the log."""
    now_s = 100.0
    log = EventLog(lambda: now_s, tmp_path / "events.jsonl")
    first = log.emit(schema.Killed())
    buffers = [EventBuffer(lambda: now_s, 90.0, lambda count: None) for _ in range(2)]
    renumberings = [Renumbering() for _ in buffers]
    for round_ in range(3):
        for number, buffer in enumerate(buffers):
            cause = first
            for step in range(3):
                text = f"{number} {round_} {step}"
                cause = buffer.emit(schema.Warning(text=text, cause=cause))
                now_s += 0.5
            log.adopt(unpacked(packed(buffer.take())), renumberings[number])
            assert len(buffer) == 0
    log.close()
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event.n for event in events] == list(range(19))
    told = [event for event in events if isinstance(event, schema.Warning)]
    by_number = {event.n: event.text for event in told}
    for event in told:
        of, place = event.text.rsplit(" ", 1)
        assert by_number.get(event.cause, "") == ("" if place == "0" else f"{of} {int(place) - 1}")
        assert event.cause < event.n
    assert [event.t for event in told] == [10.0 + 0.5 * number for number in range(18)]


def test_a_cause_that_was_never_taken_is_not_known() -> None:
    renumbering = Renumbering()
    assert renumbering.of(OWN + 3) == -1
    renumbering.took(OWN + 5, 40)
    assert [renumbering.of(number) for number in (7, OWN + 3, OWN + 5, OWN + 9)] == [7, -1, 40, 44]

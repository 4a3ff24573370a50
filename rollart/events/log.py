"""The append-only run log: writes events to `events.jsonl`, hands each to its readers, and reads them back.

Every decision and every outcome is one event: a struct of `rollart.events.schema`, and one line of JSON in the file.
The summary (`rollart.report.fold`) and the audit (`rollart.report.audit`) are folds over this log and read nothing
else, live or afterwards.

A log that grows large goes on in a new file: `events-000001.jsonl` is its oldest part, `events.jsonl` the one that is
written to. `read_events` reads all parts as one, also those that someone compressed with gzip.
"""

import gzip
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Union, get_args

import msgspec

from rollart.append import AppendFile
from rollart.errors import JobError, StoreFull, as_utf8
from rollart.events.schema import KINDS, Event

Reader = Callable[[Event], None]

FLUSH_BYTES = 1 << 20
"""Events are written out in pieces of this size, and whenever `flush` is called."""
PART_BYTES = 1 << 30
"""The log goes on in a new part at this size."""
BLOCK_BYTES = 1 << 16

_encode_into = msgspec.json.Encoder().encode_into
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Union[tuple(KINDS.values())]]).decode  # type: ignore[misc]  # noqa: UP007
_decode = msgspec.json.Decoder(Union[tuple(KINDS.values())]).decode  # noqa: UP007 - of a tuple that is made


class Fold:
    """A reader of events whose methods are handlers: one that takes `event: schema.Send` is called with each `Send`.

    A union of kinds is called with each of these. `parts` are folds that handle other kinds. `before` is a fold that
    is given each event first; it may handle the same kinds.
    """

    def __init__(self, *parts: "Fold", before: "Fold | None" = None) -> None:
        self.now = Event()
        """The event that is read, or was read last."""
        self._handlers: dict[type[Event], Callable[[Any], None]] = {}
        found = [(kind, getattr(self, name)) for name, method in vars(type(self)).items() for kind in _handled(method)]
        for kind, handler in [*found, *(entry for part in parts for entry in part._handlers.items())]:
            assert kind not in self._handlers, f"{type(self).__name__} has two handlers of {kind.__name__}"
            self._handlers[kind] = handler
        for kind, handler in () if before is None else before._handlers.items():
            own = self._handlers.get(kind)
            self._handlers[kind] = handler if own is None else _in_turn(handler, own)

    def read(self, event: Event) -> None:
        self.now = event
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)


def _in_turn(first: Callable[[Any], None], second: Callable[[Any], None]) -> Callable[[Any], None]:
    def both(event: Any) -> None:
        first(event)
        second(event)

    return both


def _handled(method: object) -> list[type[Event]]:
    """The kinds of events that a method is annotated to take."""
    kind = getattr(method, "__annotations__", {}).get("event")
    return [kind for kind in get_args(kind) or (kind,) if kind in KINDS.values()]


def micros(seconds: float) -> float:
    """`round(seconds, 6)`, in a third of the time: that writes the number out, and reads it again."""
    scaled = seconds * 1e6
    whole = round(scaled)
    return whole / 1e6 if abs(scaled - whole) < 0.49 else round(seconds, 6)


class EventLog:
    """Writes events to a file (or nowhere) and hands each to its readers.

    `clock` gives seconds; control passes `loop.time`. Coordinators write through a
    `LogHandle`, which can be cut off.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        path: Path | None = None,
        *,
        after: Event | None = None,
        part_bytes: int = PART_BYTES,
        lines: Callable[[bytes], None] | None = None,
    ) -> None:
        """`after`: the last event of the log that a resumed run goes on with. `lines`: gets what goes to the file, too,
        in whole lines."""
        self._clock = clock
        self.zero_s = clock() - (after.t if after else 0.0)
        """When the run began, on the log's clock."""
        self._path = path
        self._part_bytes = part_bytes
        self.file = AppendFile(path) if path else None
        self._lines = lines
        self._told = 0
        """Bytes that the file holds and `lines` got before."""
        self._readers: list[tuple[Reader, tuple[type[Event], ...]]] = []
        self._readers_of: dict[type[Event], tuple[Reader, ...]] = {}
        """By kind, worked out when the first event of a kind comes."""
        self._next = after.n + 1 if after else 0
        self.last_s = self.zero_s
        """When the last event was written, on the log's clock."""

    def read_by(self, reader: Reader, *kinds: type[Event]) -> None:
        """Hand it each event; of these kinds alone, where some are given."""
        self._readers.append((reader, kinds))
        self._readers_of.clear()

    def emit(self, event: Event) -> int:
        """Append one event; returns its sequence number, for later events to name as their cause."""
        self.last_s = now_s = self._clock()
        event.t = micros(now_s - self.zero_s)
        return self.append(event)

    def append(self, event: Event) -> int:
        """The same with an event that knows its time."""
        event.n = number = self._next
        self._next = number + 1
        if self.file is not None:
            held = self.file.held
            end = len(held)
            try:
                _encode_into(event, held, end)
            except (UnicodeEncodeError, TypeError):  # user text that is not UTF-8 gets a `?` instead of ending the job
                event = _plain(event)
                _encode_into(event, held, end)
            held += b"\n"
            if end >= FLUSH_BYTES and not self.file.full:
                self.flush()
        readers = self._readers_of.get(type(event))
        if readers is None:
            readers = tuple(reader for reader, kinds in self._readers if not kinds or isinstance(event, kinds))
            self._readers_of[type(event)] = readers
        for reader in readers:
            reader(event)
        return number

    def adopt(self, events: Sequence[Event], renumbering: "Renumbering") -> None:
        """Append what a buffer had. `renumbering`: of that buffer."""
        self.last_s = self._clock()
        if events:
            renumbering.took(events[0].n, self._next)
        for event in events:
            event.cause = renumbering.of(event.cause)
            self.append(event)

    def flush(self, *, durable: bool = False) -> None:
        """Write out what there is. On a full disk the rest is held, and written later. `durable`: sync to disk, and
        raise StoreFull instead."""
        if self.file is None:
            return
        if self._lines is not None and len(self.file.held) > self._told:
            self._lines(bytes(self.file.held[self._told :]))
        try:
            self.file.write_out(durable=durable)
            if self.file.num_bytes >= self._part_bytes:
                self._rotate(self.file)
        except StoreFull:
            if durable:
                raise
        finally:
            self._told = len(self.file.held)

    def _rotate(self, full: AppendFile) -> None:
        """Go on in a new file. After a kill at any point, every event is in a part that is read."""
        assert self._path is not None
        number = 1
        while _part(self._path, number) is not None:
            number += 1
        full.move_to(_numbered(self._path, number))

    def close(self) -> int:
        """Returns how many bytes of events could not be written."""
        if self.file is None:
            return 0
        self.flush()
        left = self.file.close()
        self.file = None
        return left


class EventBuffer:
    """The events of a part of the run that has a process of its own, until the run's log takes them.

    They have numbers of their own, from `OWN` on, and so have the causes that they name; a cause below is an event of
    the run's log."""

    def __init__(self, clock: Callable[[], float], zero_s: float, changed: Callable[[int], None]) -> None:
        """`zero_s`: when the run began, on this clock. `changed`: told how many events there are, at each."""
        self._clock = clock
        self.zero_s = zero_s
        self._changed = changed
        self._events: list[Event] = []
        self._next = OWN
        self.last_s = clock()

    def __len__(self) -> int:
        return len(self._events)

    def emit(self, event: Event) -> int:
        event.n = number = self._next
        self._next = number + 1
        self.last_s = now_s = self._clock()
        event.t = micros(now_s - self.zero_s)
        self._events.append(event)
        self._changed(len(self._events))
        return number

    def flush(self, *, durable: bool = False) -> None:
        """They are written where they are taken."""

    def take(self) -> tuple[Event, ...]:
        events, self._events = self._events, []
        return tuple(events)


OWN = 1 << 40
"""The first number of a buffer's own."""
KEPT_RUNS = 1 << 16
"""Runs of numbers of which a `Renumbering` knows the new ones."""


class Renumbering:
    """Which events of a log those of a buffer have become. Those of long ago are forgotten."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._moved: list[int] = []
        """By which the numbers from the first one on have moved."""

    def took(self, own: int, number: int) -> None:
        """The buffer's event of this number has got another one; so will those that follow it."""
        if not self._moved or self._moved[-1] != number - own:
            self._first.append(own)
            self._moved.append(number - own)
            if len(self._first) > 2 * KEPT_RUNS:
                del self._first[:KEPT_RUNS], self._moved[:KEPT_RUNS]

    def of(self, cause: int) -> int:
        """The number in the log; -1 where it is not known any more."""
        if cause < OWN:
            return cause
        at = bisect_right(self._first, cause) - 1
        return cause + self._moved[at] if at >= 0 else -1


class Log(Protocol):
    """Where events go."""

    @property
    def last_s(self) -> float: ...

    def emit(self, event: Event) -> int: ...

    def flush(self, *, durable: bool = False) -> None: ...


class LogHandle:
    """One coordinator's access to the log. It is `cut` when that is killed: what it still says is dropped."""

    __slots__ = ("_cut", "_log", "emit")

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._cut = False
        self.emit: Callable[[Event], int] = log.emit
        """As the log's own, until it is cut."""

    @property
    def last_s(self) -> float:
        return self._log.last_s

    @property
    def zero_s(self) -> float:
        return self._log.zero_s

    def adopt(self, events: Sequence[Event], renumbering: Renumbering) -> None:
        if not self._cut:
            self._log.adopt(events, renumbering)

    def flush(self, *, durable: bool = False) -> None:
        if not self._cut:
            self._log.flush(durable=durable)

    def cut(self) -> None:
        self._cut = True
        self.emit = _dropped


def _dropped(event: Event) -> int:
    return -1


def event_files(path: Path) -> list[Path]:
    """The parts of the log that goes on in `path`, oldest first. None where there is no log."""
    parts: list[Path] = []
    while (part := _part(path, len(parts) + 1)) is not None:
        parts.append(part)
    return [*parts, path] if path.exists() else parts


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run directory's log, in order, from all its parts. A torn last line (a killed run) is left out.
    The run may still be going on. Raises JobError for a line that this version cannot read."""
    number = 1
    while True:
        part = _part(path, number)
        if part is not None:
            with gzip.open(part) if part.suffix == ".gz" else open(part, "rb") as lines:
                yield from _whole_lines(lines, part)
            number += 1
            continue
        try:
            last = open(path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            if _part(path, number) is None:
                if number > 1:
                    return  # killed between giving the part its number and beginning the next
                raise
            continue
        with last:
            if _part(path, number) is None:  # else this may be the part after that one
                yield from _whole_lines(last, path)
                return


def drop_torn_line(path: Path) -> None:
    """Cut off an incomplete last line, so that the log can go on. Reads no more than that line."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = at = file.seek(0, os.SEEK_END)
        newline = -1
        while at > 0 and newline < 0:
            start = max(0, at - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(at - start).rfind(b"\n")
            at = start
        whole = at + newline + 1
        if whole < end:
            file.truncate(whole)


def packed(events: Sequence[Event]) -> bytes:
    """To cross to another process of this version."""
    try:
        return _pack(events)
    except (UnicodeEncodeError, TypeError):
        return _pack([_plain(event) for event in events])


def unpacked(body: bytes) -> tuple[Event, ...]:
    return tuple(_unpack(body))


def events_in(lines: bytes) -> Iterator[Event]:
    """Of whole lines that this version wrote."""
    return map(_decode, lines.splitlines())


def _whole_lines(lines: Iterable[bytes], path: Path) -> Iterator[Event]:
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                yield _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise JobError(f"{path}: line {number}: {_what_is_wrong(line, error)}") from None


class _Kind(msgspec.Struct):
    e: str | None = None


def _what_is_wrong(line: bytes, error: Exception) -> str:
    """Why this version cannot read a line."""
    fix = "read it with the version of RollArt that wrote it"
    try:
        kind = msgspec.json.decode(line.decode(), type=_Kind).e
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"is not an event ({error}); the file was damaged"
    if kind not in KINDS:
        return f"{kind!r} is not a known kind of event; {fix}"
    return f"an event {kind!r} of another version ({error}); {fix}"


def _plain(value: Any) -> Any:
    """The same with valid text and Python's own types."""
    match value:
        case msgspec.Struct():
            return type(value)(**{name: _plain(getattr(value, name)) for name in value.__struct_fields__})
        case str():
            return as_utf8(value)
        case float():
            return float(value)
        case dict():
            return {_plain(key): _plain(inner) for key, inner in value.items()}
        case list():
            return [_plain(inner) for inner in value]
        case tuple():
            return tuple(_plain(inner) for inner in value)
    return value


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:06d}{path.suffix}")


def _part(path: Path, number: int) -> Path | None:
    """An older part of the log, as it was left or compressed."""
    plain = _numbered(path, number)
    packed = plain.with_name(f"{plain.name}.gz")
    return plain if plain.exists() else packed if packed.exists() else None

"""The append-only run log, and metric values that know how to reduce.

Every decision and every outcome is one event: a JSON object on one line of `events.jsonl`, with `n` (sequence
number), `t` (seconds since the run began, on the run's clock), `e` (kind), and, where something earlier led to
it, `cause` (that event's `n`). `docs/events.md` lists the kinds. The summary (`rollart.summary`) and the audit
(`rollart.audit`) are folds over this log and read nothing else, live or afterwards.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

Event = dict[str, Any]
Reader = Callable[[Event], None]

FLUSH_BYTES = 1 << 20
"""Events are written out in pieces of this size, and whenever `flush` is called."""


class EventLog:
    """Writes events to a file (or nowhere) and hands each to its readers.

    `clock` gives seconds; control passes `loop.time`. A log that was `cut` swallows everything: so a killed
    coordinator's dying words do not enter the history.
    """

    def __init__(self, clock: Callable[[], float], path: Path | None = None, *, after: Event | None = None) -> None:
        """`after`: the last event of the log that a resumed run goes on with."""
        self._clock = clock
        self._zero_s = clock() - (after["t"] if after else 0.0)
        self._file: IO[bytes] | None = open(path, "ab") if path else None  # noqa: SIM115 - closed in close()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._readers: list[Reader] = []
        self._next = after["n"] + 1 if after else 0
        self.last_s = self._zero_s
        """When the last event was written, on the log's clock."""

    def read_by(self, reader: Reader) -> None:
        self._readers.append(reader)

    def emit(self, kind: str, fields: Event) -> int:
        """Append one event; returns its sequence number, for later events to name as their cause."""
        number = self._next
        self._next = number + 1
        now_s = self._clock()
        self.last_s = now_s
        event: Event = {"n": number, "t": round(now_s - self._zero_s, 6), "e": kind, **fields}
        if self._file is not None:
            line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
            self._pending.append(line)
            self._pending_bytes += len(line)
            if self._pending_bytes >= FLUSH_BYTES:
                self.flush()
        for reader in self._readers:
            reader(event)
        return number

    def flush(self, *, durable: bool = False) -> None:
        if self._file is None:
            return
        self._file.write(b"".join(self._pending))
        self._pending.clear()
        self._pending_bytes = 0
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None


class LogHandle:
    """One incarnation's access to the log; `cut` it when that incarnation is dead."""

    __slots__ = ("_cut", "_log")

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._cut = False

    @property
    def last_s(self) -> float:
        return self._log.last_s

    def emit(self, kind: str, fields: Event) -> int:
        return -1 if self._cut else self._log.emit(kind, fields)

    def flush(self, *, durable: bool = False) -> None:
        if not self._cut:
            self._log.flush(durable=durable)

    def cut(self) -> None:
        self._cut = True


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run directory's log, in order. A torn last line (a killed run) is left out."""
    with open(path, "rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield orjson.loads(line)


@dataclass(frozen=True, slots=True)
class Mean:
    total: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class Max:
    value: float


@dataclass(frozen=True, slots=True)
class Sum:
    value: float


@dataclass(frozen=True, slots=True)
class Last:
    value: float


Metric = Mean | Max | Sum | Last


def reduce(before: Metric, after: Metric) -> Metric:
    """Combine two values of one metric; both must be of one kind."""
    match before, after:
        case Mean(), Mean():
            return Mean(before.total + after.total, before.count + after.count)
        case Max(), Max():
            return Max(max(before.value, after.value))
        case Sum(), Sum():
            return Sum(before.value + after.value)
        case Last(), Last():
            return after
    raise TypeError(f"one metric, two kinds: {before!r} and {after!r}")


class Metrics:
    """Metric values since the last `row`, by name: `reward/mean`, `staleness/max`, ..."""

    def __init__(self) -> None:
        self._values: dict[str, Metric] = {}

    def add(self, name: str, value: Metric) -> None:
        before = self._values.get(name)
        self._values[name] = value if before is None else reduce(before, value)

    def row(self) -> Mapping[str, float]:
        """The reduced values, by name in order; and start anew."""
        row: dict[str, float] = {}
        for name in sorted(self._values):
            value = self._values[name]
            row[name] = value.total / value.count if isinstance(value, Mean) else value.value
        self._values.clear()
        return row

"""What a run writes down of itself: the event log, and what reads it: summary, audit and `metrics.jsonl`.

`Folds` read every event, in order. They sit in the log's own process, or in one beside it, which is sent the lines of
the log as they are written: a long simulation then has a second core. Invariant: both give the same.
"""

import asyncio
import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import orjson

from rollart.append import AppendFile
from rollart.config.job import Job
from rollart.errors import Deadlock, JobError, RollartError, StayedFull, StoreFull
from rollart.events import schema
from rollart.events.log import EventLog, Reader, drop_torn_line, event_files, events_in, read_events
from rollart.events.schema import Event
from rollart.report.audit import Audit
from rollart.report.fold import SummaryFold
from rollart.report.summary import Summary

EVENTS = "events.jsonl"

Row = Callable[[Mapping[str, float]], object]
"""Takes the metrics of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What the events say at the end."""

    summary: Summary
    violations: list[str]
    faults: dict[str, list[int]]
    """Kind -> [fired, of these during a swap]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Folded):
    deadlock: bool
    full: bool = False
    """It stopped because its store was full for longer than it may wait."""


class Folds:
    """Summary, audit and metrics."""

    def __init__(self, out: Path | None, *, audited: bool = True, summary: SummaryFold | None = None) -> None:
        self._summary = summary or SummaryFold()
        self._audit = Audit() if audited else None
        self.readers: list[Reader] = [self._summary.read, *([self._audit.read] if self._audit else [])]
        """Of all kinds of events."""
        self._metrics = AppendFile(out / "metrics.jsonl", fresh=True) if out else None
        self.takers: list[Row] = [as_lines(self._metrics)] if self._metrics else []
        """Get the metrics of each step."""
        self.rows = metric_rows(self._summary, self.takers)
        """Reads the kinds of `ROW_KINDS` after the others have."""

    def again(self, path: Path, views: Sequence[Reader]) -> Event:
        """Read what was written before the run was resumed; the views read it as well."""
        rows: list[Mapping[str, float]] = []
        try:
            last = read_again(path, (*self.readers, *views, metric_rows(self._summary, [rows.append])))
        except BaseException:
            self.close()
            raise
        for row in rows:  # made again from the events, so none is missing or twice there
            self.takers[0](row)
        return last

    def result(self) -> Folded:
        return Folded(
            summary=self._summary.result(),
            violations=self._audit.finish() if self._audit else [],
            faults=self._audit.faults if self._audit else {},
        )

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


class FoldsBeside:
    """The same in a process of its own, over the lines of the log."""

    def __init__(self, out: Path, *, audited: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._lines, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_read_lines, args=(theirs, out, audited), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        theirs.close()

    def take(self, lines: bytes) -> None:
        """Whole lines, in order; none, and it is the end."""
        with contextlib.suppress(ConnectionError):  # `result` says what became of it
            self._lines.send_bytes(lines)

    def result(self) -> Folded:
        """All lines are taken. Raises RuntimeError where the process could not read them."""
        self.take(b"")
        try:
            found: Folded = self._lines.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise RuntimeError(
                f"the process that reads the events ended with status {self._process.exitcode}; its error is above"
            ) from None
        self._process.join()
        return found


def _read_lines(lines: Connection, out: Path, audited: bool) -> None:
    """What runs there. It ends with its parent; a Ctrl-C is the parent's to take."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folds = Folds(out, audited=audited)
    readers = (*folds.readers, folds.rows)
    with contextlib.suppress(EOFError):
        while chunk := lines.recv_bytes():
            for event in events_in(chunk):
                for read in readers:
                    read(event)
        folds.close()
        lines.send(folds.result())


ROW_KINDS = (schema.StepEnd, schema.Replayed)
"""After these there may be a row of metrics."""


class Books:
    """The event log of a run, and the folds over it."""

    def __init__(
        self,
        job: Job,
        out: Path | None,
        *,
        audited: bool = True,
        beside: bool = False,
        summary: SummaryFold | None = None,
        views: Sequence[Reader] = (),
        history: Reader | None = None,
    ) -> None:
        """`beside`: summary, audit and metrics are in a process of their own. `views` read the events here. `history`:
        the run is resumed; it and all others first read what was written."""
        self._path = path = out / EVENTS if out else None
        clock = asyncio.get_running_loop().time
        part_bytes = job.track.events_mb * 1_000_000
        self._folds: Folds | FoldsBeside
        self.takers: list[Row] = []
        """Get the metrics of each step, where the folds are here."""
        if beside:
            assert out is not None
            self._folds = FoldsBeside(out, audited=audited)
            self.log = EventLog(clock, path, part_bytes=part_bytes, lines=self._folds.take)
            return
        folds = self._folds = Folds(out, audited=audited, summary=summary)
        self.takers = folds.takers
        last = None
        if history is not None:
            assert path is not None
            last = folds.again(path, (*views, history))
        self.log = EventLog(clock, path, after=last, part_bytes=part_bytes)
        for reader in (*folds.readers, *views):
            self.log.read_by(reader)
        self.log.read_by(folds.rows, *ROW_KINDS)

    def close(self) -> None:
        left = self.log.close()
        if left:
            say(f"rollart: {self._path}: no room for the last {left} bytes of events; the journal is whole")
        if isinstance(self._folds, Folds):
            self._folds.close()

    def result(self, error: RollartError | None) -> RunResult:
        """After `close`. `error`: what stopped the run, where something did."""
        found = self._folds.result()
        return RunResult(
            summary=found.summary,
            violations=found.violations,
            faults=found.faults,
            deadlock=isinstance(error, Deadlock),
            full=isinstance(error, StayedFull),
        )


def read_again(path: Path, readers: tuple[Reader, ...]) -> Event:
    """Feed a run's history to its readers, in one pass, and cut off a torn last line. Returns the last event."""
    if not event_files(path):
        raise JobError(f"--resume: {path} is not there; give the run directory of a job that was stopped or killed")
    drop_torn_line(path)
    last: Event | None = None
    for event in read_events(path):
        for reader in readers:
            reader(event)
        last = event
    if last is None:
        raise JobError(f"--resume: {path} is empty; start the job anew without --resume")
    return last


def metric_rows(summary: SummaryFold, takers: Sequence[Row]) -> Reader:
    """Hands each step's metrics to those who keep them."""

    def read(event: Event) -> None:
        if summary.row is not None:
            row, summary.row = summary.row, None
            for take in takers:
                take(row)

    return read


def as_lines(file: AppendFile) -> Callable[[Mapping[str, float]], None]:
    """`metrics.jsonl`: one JSON object a line, written at once, or when there is room again."""

    def keep(row: Mapping[str, float]) -> None:
        file.put(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        with contextlib.suppress(StoreFull):
            file.write_out()

    return keep


def say(text: str) -> None:
    """Progress, on standard error: results go to standard output."""
    print(text, file=sys.stderr, flush=True)

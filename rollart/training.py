"""`rollart train` and `rollart eval`: a real job on the real clock, from its run directory and back into it.

A resumed run goes on in the same directory: its events are read again first, so that summary and audit know the whole
history.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from rollart.append import AppendFile
from rollart.audit import Audit
from rollart.checks import refuse_start
from rollart.config.changes import plain
from rollart.config.job import Job
from rollart.control.coordinator import Coordinator, checkpoint_facts
from rollart.control.waits import Waits
from rollart.errors import Interrupted, JobError, RollartError, StayedFull
from rollart.events import Event, EventLog, LogHandle, Reader, drop_torn_line, event_files, read_events
from rollart.real import real_world
from rollart.records.format import FOLDER
from rollart.records.recorder import FileRecorder
from rollart.resume import Resumption, resumed_job
from rollart.run import RunResult, as_lines, facts, make_run_dir, metric_rows, rare_collections, say, write_summary
from rollart.summary import Summary
from rollart.trackers import Tracking, trackers
from rollart.train.journal import FileJournal

Work = Callable[[Coordinator], Coroutine[Any, Any, None]]


Watch = Callable[[Summary, Callable[[], str]], Reader]
"""Makes a reader of events that looks at the summary as it grows, and asks what the run waits for: the live view."""

WRITE_S = 1.0
"""Between two writes of new events to their file."""
WAITS_SHOWN = 3
"""The longest wait of so many kinds."""


def train(job: Job, out: Path, *, resume: Resumption | None = None, watch: Watch | None = None) -> RunResult:
    """Run a job to its end, or until the user stops it."""
    return _run(job, out, Coordinator.run, trains=True, resume=resume, watch=watch)


def evaluate(job: Job, out: Path, *, watch: Watch | None = None) -> RunResult:
    """Play the held-out tasks of a job with its model as it is."""
    return _run(job, out, Coordinator.evaluate, trains=False, resume=None, watch=watch)


def _run(job: Job, out: Path, work: Work, *, trains: bool, resume: Resumption | None, watch: Watch | None) -> RunResult:
    refuse_start(job, out, trains=trains, resume=resume is not None)
    if resume is None:
        make_run_dir(job, out)
    with _alone(out), rare_collections():
        if resume is not None:
            resume.keep()
        result = asyncio.run(_drive(job, out, work, trains=trains, resume=resume, watch=watch))
    try:
        write_summary(out, result.summary)
    except OSError as error:
        say(f"rollart: {out / 'summary.json'}: not written: {error.strerror}")
    return result


async def _drive(
    job: Job, out: Path, work: Work, *, trains: bool = True, resume: Resumption | None, watch: Watch | None
) -> RunResult:
    loop = asyncio.get_running_loop()
    summary, audit = Summary(), Audit()
    path = out / "events.jsonl"
    journal = FileJournal(out / "journal")
    coordinator: Coordinator | None = None

    def waits() -> str:
        return "" if coordinator is None else _longest(coordinator.waits, loop.time())

    views = () if watch is None else (_harmless(watch(summary, waits)),)
    everyone: tuple[Reader, ...] = (summary.read, audit.read, *views)
    rows: list[Mapping[str, float]] = []
    known = _Known()
    last = _read_again(path, (*everyone, known.read, metric_rows(summary, rows.append))) if resume else None
    log = EventLog(loop.time, path, after=last, part_bytes=job.track.events_mb * 1_000_000)
    tracking = Tracking(lambda text: log.emit("warning", {"text": text}))
    for reader in (*everyone, tracking.read):
        log.read_by(reader)
    with contextlib.closing(AppendFile(out / "metrics.jsonl", fresh=True)) as metrics:
        keep = as_lines(metrics)
        for row in rows:  # a resumed run's are made again from its events: none twice, none lost
            keep(row)
        log.read_by(metric_rows(summary, keep, tracking.row))
        if resume is None:
            log.emit("run", facts(job, clock="real"))
        else:
            _complete(log, known, journal)
            log.emit("killed", {})
            _tell_changes(log, known, resume)
        tracking.start(trackers(job, out))
        (out / "pid").write_text(str(os.getpid()))

        def lost(worker: str, reason: str) -> None:
            log.emit("worker.lost", {"worker": worker, "reason": reason})
            if coordinator is not None:
                coordinator.lost(worker, reason)

        real = real_world(job, out, journal, lost, trains=trains, earlier=resume.earlier if resume else ())
        recorder = _recorder(job, out, log, loop)
        coordinator = Coordinator(job, replace(real.world, recorder=recorder), LogHandle(log))
        _stop_on_signals(loop, coordinator)
        writing = asyncio.create_task(_write_out(log))
        try:
            await work(coordinator)
        except RollartError as error:
            user, full = isinstance(error, Interrupted), isinstance(error, StayedFull)
            log.emit("stopped", {"reason": str(error), "user": user, "full": full})
        finally:
            writing.cancel()
            await real.close()
            if recorder is not None:
                await asyncio.to_thread(recorder.close)
            tracking.close()
            if left := log.close():
                say(f"rollart: {path}: no room for the last {left} bytes of events; the journal is whole")
    return RunResult(summary=summary.result(), violations=audit.finish(), deadlock=False, faults={})


def _recorder(job: Job, out: Path, log: EventLog, loop: asyncio.AbstractEventLoop) -> FileRecorder | None:
    """Keeps the trajectories, where the job wants any."""
    settings = job.trajectories
    if not settings.keep:
        return None

    def warn(text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(log.emit, "warning", {"text": text})

    return FileRecorder(
        out / FOLDER,
        share=settings.keep,
        total_bytes=None if settings.total_mb is None else settings.total_mb << 20,
        zero_s=log.zero_s,
        warn=warn,
    )


async def _write_out(log: EventLog) -> None:
    """Who follows `events.jsonl` sees what happens as it happens."""
    while True:
        await asyncio.sleep(WRITE_S)
        log.flush()


def _longest(waits: Waits, now_s: float) -> str:
    found = waits.oldest()[:WAITS_SHOWN]
    return ", ".join(f"{wait.who} on {wait.what} for {now_s - wait.since_s:.0f} s" for wait in found)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the run directory: two coordinators over one journal would destroy it."""
    try:
        lock = open(out / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise JobError(
            f"--resume: {out} cannot be written to ({error.strerror}); make it writable, or resume a copy of it"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"--resume: {out} is still running; stop it first, or wait until it has ended") from None
        yield


def _harmless(reader: Reader) -> Reader:
    """Watching never ends a run: a watcher that raises is told of once, and watches no more."""
    well = True

    def read(event: Event) -> None:
        nonlocal well
        if well:
            try:
                reader(event)
            except Exception as error:  # the boundary to whoever watches
                well = False
                say(f"rollart: the display broke and is off, the run goes on: {type(error).__name__}: {error}")

    return read


def _read_again(path: Path, readers: tuple[Reader, ...]) -> Event:
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


class _Known:
    """What the events say of the journal and of the job."""

    def __init__(self) -> None:
        self.written: dict[int, None] = {}
        """Steps whose batches were written."""
        self.committed: Event = {}
        """The last checkpoint."""
        self.job: Event = {}
        """What the readers of the events know of the job."""

    def read(self, event: Event) -> None:
        if event["e"] == "run":
            self.job = {key: value for key, value in event.items() if key not in ("n", "t", "e")}
        elif event["e"] == "changed":
            self.job = event["job"]
        elif event["e"] == "written":
            self.written[event["step"]] = None
        elif event["e"] == "checkpoint":
            self.committed = event


def _complete(log: EventLog, known: _Known, journal: FileJournal) -> None:
    """Say what the journal knows and the events do not: the run was killed between the one and the other."""
    checkpoint = journal.latest()
    for batch in journal.batches(0):
        if batch.step not in known.written:
            log.emit("written", {"step": batch.step})
    if checkpoint is not None:
        held = checkpoint_facts(checkpoint)
        if any(known.committed.get(key) != value for key, value in held.items()):
            log.emit("checkpoint", held)


def _tell_changes(log: EventLog, known: _Known, resume: Resumption) -> None:
    """Say what a resumed run does otherwise; also where a kill came between keeping a change and saying so."""
    job = facts(resume.job, clock="real")
    if resume.changes or job != known.job:
        changes = {change.key: [plain(change.before), plain(change.after)] for change in resume.changes}
        log.emit("changed", {"step": resume.step, "changes": changes, "job": job})


def _stop_on_signals(loop: asyncio.AbstractEventLoop, coordinator: Coordinator) -> None:
    """The first Ctrl-C (or SIGTERM) stops with a checkpoint; the second stops at once."""
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            say("rollart: stopping; Ctrl-C again stops at once")
            coordinator.stop()
        else:
            loop.remove_signal_handler(signal.SIGINT)  # a third one is Python's own
            coordinator.stop_now("stopped at once by the user")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def newest_run(name: str, runs: Path = Path("runs")) -> Path:
    """The run directory of the unfinished job of this name that was written to last."""

    def goes_on(out: Path) -> bool:
        if (out / "summary.json").exists():
            summary = _written_summary(out) or _summary_from_events(out)
            if summary["state"] == "finished":
                return False
        return resumed_job(out).get("name") == name

    found = [path.parents[1] for path in runs.glob("*/journal/checkpoint") if goes_on(path.parents[1])]
    if not found:
        raise JobError(f"--resume: no unfinished run of {name!r} in {runs}; give its directory, as in --resume RUN")

    def written_s(out: Path) -> float:
        """0 where there are no events; who resumes it is told."""
        return max((part.stat().st_mtime for part in event_files(out / "events.jsonl")), default=0.0)

    return max(found, key=written_s)


def summary_again(out: Path) -> dict[str, Any]:
    """What a run came to, or has come to so far: as it was written at the end, or from its events."""
    events, written = out / "events.jsonl", out / "summary.json"
    summary = None
    if written.exists() and written.stat().st_mtime >= max(part.stat().st_mtime for part in event_files(events)):
        summary = _written_summary(out)
    return summary or _summary_from_events(out)


def _summary_from_events(out: Path) -> dict[str, Any]:
    summary = Summary()
    for event in read_events(out / "events.jsonl"):
        summary.read(event)
    return summary.result()


def trained_s(out: Path) -> float:
    """How long a run trained, start-up and evaluations included."""
    seconds = _summary_of(out)["time_s"]
    assert isinstance(seconds, float)
    return seconds


def add_control(out: Path, plays: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Write into a run's summary, beside before and after, what another model reached; returns its `eval`."""
    summary = _summary_of(out)
    for task, row in summary["eval"].items():
        row["control"] = plays[task]["sampled"]["reward"]
        if "greedy" in row and "greedy" in plays[task]:
            row["greedy"]["control"] = plays[task]["greedy"]["reward"]
    write_summary(out, summary)
    rows: dict[str, Any] = summary["eval"]
    return rows


def _summary_of(out: Path) -> dict[str, Any]:
    try:
        summary = _written_summary(out)
    except OSError as error:
        raise JobError(f"{out}: has no summary ({error.strerror}); give the run directory of a finished job") from None
    if summary is None:
        raise JobError(f"{out / 'summary.json'}: is not whole; `rollart show {out} --json` makes it from the events")
    return summary


def _written_summary(out: Path) -> dict[str, Any] | None:
    """None where the file is not whole: a machine that went down, or someone's own copy. Raises OSError."""
    try:
        summary: dict[str, Any] = orjson.loads((out / "summary.json").read_bytes())
    except ValueError:
        return None
    return summary

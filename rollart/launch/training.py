"""`rollart train` and `rollart eval`: a real job on the real clock, from its run directory and back into it.

A resumed run goes on in the same directory: its events are read again first, so that summary and audit know the whole
history.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rollart.config.changes import plain
from rollart.config.job import Job
from rollart.control.coordinator import Coordinator
from rollart.control.learner import committed
from rollart.control.waits import Waits
from rollart.control.world import RolloutWorld
from rollart.events import schema
from rollart.events.log import EventLog, Reader
from rollart.events.schema import Event
from rollart.launch.books import Books, RunResult, say
from rollart.launch.checks import refuse_start
from rollart.launch.driver import Life, Work, drive, facts, rare_collections
from rollart.launch.hub import with_models_here
from rollart.launch.real import real_world
from rollart.launch.resume import Resumption
from rollart.launch.rundir import alone, make_run_dir, write_summary
from rollart.records.format import FOLDER
from rollart.records.recorder import FileRecorder, next_life
from rollart.report.fold import SummaryFold
from rollart.report.trackers import Tracking, trackers
from rollart.store.journal import FileJournal
from rollart.workers.setup import ShardSetup

Watch = Callable[[SummaryFold, Callable[[], str]], Reader]
"""Makes a reader of events that looks at the summary as it grows, and asks what the run waits for: the live view."""


WRITE_S = 1.0
"""Between two writes of new events to their file."""
WAITS_SHOWN = 3
"""Kinds of waits of which the longest is shown."""


def train(job: Job, out: Path, *, resume: Resumption | None = None, watch: Watch | None = None) -> RunResult:
    """Run a job to its end, or until the user stops it."""
    return _run(job, out, Coordinator.run, trains=True, resume=resume, watch=watch)


def evaluate(job: Job, out: Path, *, watch: Watch | None = None) -> RunResult:
    """Play the held-out tasks of a job with its model as it is."""
    return _run(job, out, Coordinator.evaluate, trains=False, resume=None, watch=watch)


def _run(job: Job, out: Path, work: Work, *, trains: bool, resume: Resumption | None, watch: Watch | None) -> RunResult:
    job = with_models_here(job)
    refuse_start(job, out, trains=trains, resume=resume is not None)
    if resume is None:
        make_run_dir(job, out)
    with alone(out), rare_collections():
        if resume is not None:
            resume.keep()
        result = asyncio.run(drive_real(job, out, work, trains=trains, resume=resume, watch=watch))
    try:
        write_summary(out, result.summary)
    except OSError as error:
        say(f"rollart: {out / 'summary.json'}: not written: {error.strerror}")
    return result


async def drive_real(
    job: Job, out: Path, work: Work, *, trains: bool = True, resume: Resumption | None, watch: Watch | None
) -> RunResult:
    loop = asyncio.get_running_loop()
    summary = SummaryFold()
    running: list[Coordinator] = []
    known = LoggedFacts()

    def waiting() -> str:
        return longest_wait(running[-1].waits, loop.time()) if running else ""

    views = [] if watch is None else [harmless(watch(summary, waiting))]
    books = Books(job, out, summary=summary, views=views, history=known.read if resume else None)
    log = books.log
    tracking = Tracking(lambda text: log.emit(schema.Warning(text=text)))
    log.read_by(tracking.read)
    books.takers.append(tracking.row)
    journal = FileJournal(out / "journal")
    if resume is None:
        log.emit(facts(job, clock="real"))
    else:
        complete_log(log, known, journal)
        log.emit(schema.Killed())
        tell_changes(log, known, resume)
    tracking.start(trackers(job, out))
    (out / "pid").write_text(str(os.getpid()))
    life = next_life(out / FOLDER)
    recorder = _recorder(job, out, log, loop, life)

    def lost(worker: str, reason: str) -> None:
        log.emit(schema.WorkerLost(worker=worker, reason=reason))
        for coordinator in running:
            coordinator.lost(worker, reason)

    shards = ShardSetup(life=life, began_at=time.time() - (loop.time() - log.zero_s), trains=trains)

    def live() -> Life:
        earlier = resume.earlier if resume else ()
        real = real_world(job, out, journal, lost, trains=trains, earlier=earlier, shards=shards)
        world = replace(real.world, recorder=recorder)
        if isinstance(world.rollout, RolloutWorld):
            world = replace(world, rollout=replace(world.rollout, recorder=recorder))
        return Life(world=world, close=real.close, killed=loop.create_future())

    def started(coordinator: Coordinator) -> None:
        running.append(coordinator)
        stop_on_signals(loop, coordinator)

    writing = asyncio.create_task(_write_out(log))
    try:
        error = await drive(job, log, live, work, started)
    finally:
        writing.cancel()
        if recorder is not None:
            await asyncio.to_thread(recorder.close)
        tracking.close()
        books.close()
    return books.result(error)


def _recorder(job: Job, out: Path, log: EventLog, loop: asyncio.AbstractEventLoop, life: int) -> FileRecorder | None:
    """Keeps the trajectories, where the job wants any."""
    settings = job.trajectories
    if not settings.keep:
        return None

    def warn(text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(log.emit, schema.Warning(text=text))

    return FileRecorder(
        out / FOLDER,
        share=settings.keep,
        total_bytes=None if settings.total_mb is None else settings.total_mb << 20,
        zero_s=log.zero_s,
        life=life,
        warn=warn,
    )


async def _write_out(log: EventLog) -> None:
    """Who follows `events.jsonl` sees what happens as it happens."""
    while True:
        await asyncio.sleep(WRITE_S)
        log.flush()


def longest_wait(waits: Waits, now_s: float) -> str:
    found = waits.oldest()[:WAITS_SHOWN]
    return ", ".join(f"{wait.who} on {wait.what} for {now_s - wait.since_s:.0f} s" for wait in found)


def harmless(reader: Reader) -> Reader:
    """Watching never ends a run: a watcher that raises is told of once, and watches no more."""
    well = True

    def read(event: Event) -> None:
        nonlocal well
        if well:
            try:
                reader(event)
            except Exception as error:  # the boundary to the display
                well = False
                say(f"rollart: the display broke and is off, the run goes on: {type(error).__name__}: {error}")

    return read


class LoggedFacts:
    """What the events say of the journal and of the job."""

    def __init__(self) -> None:
        self.written: dict[int, None] = {}
        """Steps whose batches were written."""
        self.committed: schema.Checkpoint | None = None
        """The last checkpoint."""
        self.job: schema.Run | None = None
        """What the readers of the events know of the job."""

    def read(self, event: Event) -> None:
        match event:
            case schema.Run():
                self.job = event
            case schema.Changed():
                self.job = event.job
            case schema.Written():
                self.written[event.step] = None
            case schema.Checkpoint():
                self.committed = event


def complete_log(log: EventLog, known: LoggedFacts, journal: FileJournal) -> None:
    """Say what the journal knows and the events do not: the run was killed between the one and the other."""
    checkpoint = journal.latest()
    for batch in journal.batches(0):
        if batch.step not in known.written:
            log.emit(schema.Written(step=batch.step))
    if checkpoint is not None:
        held = committed(checkpoint)
        if not held.same_as(known.committed):
            log.emit(held)


def tell_changes(log: EventLog, known: LoggedFacts, resume: Resumption) -> None:
    """Say what a resumed run does otherwise; also where a kill came between keeping a change and saying so."""
    job = facts(resume.job, clock="real")
    if resume.changes or not job.same_as(known.job):
        changes = {change.key: schema.Change(plain(change.before), plain(change.after)) for change in resume.changes}
        log.emit(schema.Changed(step=resume.step, changes=changes, job=job))


def stop_on_signals(loop: asyncio.AbstractEventLoop, coordinator: Coordinator) -> None:
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

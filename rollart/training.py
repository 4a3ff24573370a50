"""`rollart train` and `rollart eval`: a real job on the real clock, from its run directory and back into it.

A resumed run goes on in the same directory: its events are read again first, so that summary and audit know the whole
history.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import yaml

from rollart.audit import Audit
from rollart.config import Job
from rollart.control.coordinator import Coordinator, checkpoint_facts
from rollart.errors import Interrupted, JobError, RollartError
from rollart.events import Event, EventLog, LogHandle, read_events
from rollart.run import RunResult, facts, metric_rows, rare_collections, say
from rollart.summary import Summary
from rollart.train.journal import FileJournal
from rollart.worlds import real_world

Reader = Callable[[Event], None]


def train(job: Job, out: Path, *, resume: bool = False, readers: tuple[Reader, ...] = ()) -> RunResult:
    """Run a job to its end, or until the user stops it. `readers` see every event as it happens."""
    if not resume:
        out.mkdir(parents=True, exist_ok=False)
        (out / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False))
    with _alone(out), rare_collections():
        result = asyncio.run(_train(job, out, resume=resume, readers=readers))
    (out / "summary.json").write_bytes(orjson.dumps(result.summary, option=orjson.OPT_INDENT_2))
    return result


async def _train(job: Job, out: Path, *, resume: bool, readers: tuple[Reader, ...]) -> RunResult:
    loop = asyncio.get_running_loop()
    summary, audit = Summary(), Audit()
    path = out / "events.jsonl"
    journal = FileJournal(out / "journal")
    everyone = (summary.read, audit.read, *(_harmless(reader) for reader in readers))
    last = _read_again(path, everyone) if resume else None
    log = EventLog(loop.time, path, after=last)
    for reader in everyone:
        log.read_by(reader)
    with open(out / "metrics.jsonl", "ab") as metrics:  # noqa: ASYNC230 - one line a step, on a local disk
        log.read_by(metric_rows(summary, metrics.write))
        if last is None:
            log.emit("run", facts(job, clock="real"))
        else:
            _complete(log, path, journal)
            log.emit("killed", {})
        (out / "pid").write_text(str(os.getpid()))

        def lost(worker: str, reason: str) -> None:
            log.emit("worker.lost", {"worker": worker, "reason": reason})
            coordinator.lost(worker, reason)

        real = real_world(job, out, journal, lost)
        coordinator = Coordinator(job, real.world, LogHandle(log))
        _stop_on_signals(loop, coordinator)
        try:
            await coordinator.run()
        except RollartError as error:
            log.emit("stopped", {"reason": str(error), "user": isinstance(error, Interrupted)})
        finally:
            await real.close()
            log.close()
    return RunResult(summary=summary.result(), violations=audit.finish(), deadlock=False, faults={})


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the run directory: two coordinators over one journal would destroy it."""
    with open(out / "lock", "w") as lock:
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
    """Feed a run's history to its readers, and cut off a torn last line. Returns the last event."""
    if not path.exists():
        raise JobError(f"--resume: {path} is not there; give the run directory of a job that was stopped or killed")
    last: Event | None = None
    for event in read_events(path):
        for reader in readers:
            reader(event)
        last = event
    if last is None:
        raise JobError(f"--resume: {path} is empty; start the job anew without --resume")
    body = path.read_bytes()
    whole = body.rfind(b"\n") + 1
    if whole < len(body):
        os.truncate(path, whole)
    return last


def _complete(log: EventLog, path: Path, journal: FileJournal) -> None:
    """Say what the journal knows and the events do not: the run was killed between the one and the other."""
    written: dict[int, None] = {}
    committed: Event = {}
    for event in read_events(path):
        if event["e"] == "written":
            written[event["step"]] = None
        elif event["e"] == "checkpoint":
            committed = event
    checkpoint = journal.latest()
    for batch in journal.batches(0):
        if batch.step not in written:
            log.emit("written", {"step": batch.step})
    if checkpoint is not None:
        held = checkpoint_facts(checkpoint)
        if any(committed.get(key) != value for key, value in held.items()):
            log.emit("checkpoint", held)


def _stop_on_signals(loop: asyncio.AbstractEventLoop, coordinator: Coordinator) -> None:
    """The first Ctrl-C (or SIGTERM) stops with a checkpoint; the second stops at once."""
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            coordinator.stop()
        else:
            loop.remove_signal_handler(signal.SIGINT)  # a third one is Python's own
            coordinator.stop_now("stopped at once by the user; `rollart train --resume` goes on from the journal")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def resumed_job(out: Path) -> dict[str, Any]:
    """The job a run directory was made for."""
    try:
        loaded = yaml.safe_load((out / "job.yaml").read_text())
    except OSError as error:
        raise JobError(
            f"--resume: {out} is no run directory ({error.strerror}); give one, such as runs/NAME-TIME"
        ) from None
    assert isinstance(loaded, dict)
    return loaded

"""`rollart train` and `rollart eval`: a real job on the real clock, from its run directory and back into it.

A resumed run goes on in the same directory: its events are read again first, so that summary and audit know the whole
history.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import yaml

from rollart.audit import Audit
from rollart.config import Job
from rollart.control.coordinator import Coordinator
from rollart.errors import JobError, RollartError
from rollart.events import Event, EventLog, LogHandle, read_events
from rollart.resources import refuse_unplaceable
from rollart.run import RunResult, facts, metric_rows, rare_collections
from rollart.summary import Summary
from rollart.train.journal import FileJournal
from rollart.worlds import real_world

Reader = Callable[[Event], None]


def train(job: Job, out: Path, *, resume: bool = False, readers: tuple[Reader, ...] = ()) -> RunResult:
    """Run a job to its end, or until the user stops it. `readers` see every event as it happens."""
    refuse_unplaceable(job)
    if not resume:
        out.mkdir(parents=True, exist_ok=False)
        (out / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False))
    with rare_collections():
        result = asyncio.run(_train(job, out, resume=resume, readers=readers))
    (out / "summary.json").write_bytes(orjson.dumps(result.summary, option=orjson.OPT_INDENT_2))
    return result


async def _train(job: Job, out: Path, *, resume: bool, readers: tuple[Reader, ...]) -> RunResult:
    loop = asyncio.get_running_loop()
    summary, audit = Summary(), Audit()
    path = out / "events.jsonl"
    last = _read_again(path, summary, audit) if resume else None
    log = EventLog(loop.time, path, after=last)
    for reader in (summary.read, audit.read, *readers):
        log.read_by(reader)
    with open(out / "metrics.jsonl", "ab") as metrics:  # noqa: ASYNC230 - one line a step, on a local disk
        log.read_by(metric_rows(summary, metrics.write))
        if last is None:
            log.emit("run", facts(job, clock="real"))
        else:
            log.emit("killed", {})
        (out / "pid").write_text(str(os.getpid()))
        real = real_world(job, out, FileJournal(out / "journal"))
        coordinator = Coordinator(job, real.world, LogHandle(log))
        _stop_on_signals(loop, coordinator)
        try:
            await coordinator.run()
        except RollartError as error:
            log.emit("stopped", {"reason": str(error)})
        finally:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(signal.SIGINT)
            await real.close()
            log.close()
    return RunResult(summary=summary.result(), violations=audit.finish(), deadlock=False, faults={})


def _read_again(path: Path, summary: Summary, audit: Audit) -> Event:
    """Feed a run's history to its readers, and cut off a torn last line. Returns the last event."""
    if not path.exists():
        raise JobError(f"--resume: {path} is not there; give the run directory of a job that was stopped or killed")
    last: Event | None = None
    for event in read_events(path):
        summary.read(event)
        audit.read(event)
        last = event
    if last is None:
        raise JobError(f"--resume: {path} is empty; start the job anew without --resume")
    body = path.read_bytes()
    whole = body.rfind(b"\n") + 1
    if whole < len(body):
        os.truncate(path, whole)
    return last


def _stop_on_signals(loop: asyncio.AbstractEventLoop, coordinator: Coordinator) -> None:
    """The first Ctrl-C stops with a checkpoint; the second stops at once."""

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        coordinator.stop()

    loop.add_signal_handler(signal.SIGINT, stop)


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

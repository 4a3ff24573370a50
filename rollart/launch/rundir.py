"""The run directory: made once, owned by one run at a time, its summary written whole or not at all."""

import contextlib
import fcntl
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import orjson
from msgspec.structs import replace

from rollart.append import write_whole
from rollart.config.job import Job
from rollart.errors import JobError
from rollart.events.log import event_files, read_events
from rollart.launch.resume import resumed_job, write_job
from rollart.report.fold import SummaryFold
from rollart.report.summary import Play, Plays, Progress, Summary


class _State(msgspec.Struct):
    """What is read of the summaries of other runs, which may be of another version."""

    state: str


S = TypeVar("S", Summary, _State)


def make_run_dir(job: Job, out: Path) -> None:
    """A new run directory with its job. Raises JobError where it cannot be made."""
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise JobError(f"--out: {out} exists; give a directory that does not, or remove it") from None
    except OSError as error:
        raise JobError(f"--out: {out} cannot be made ({error.strerror}); give a directory you can write to") from None
    try:
        write_job(out, job)
    except OSError as error:
        shutil.rmtree(out, ignore_errors=True)
        raise JobError(f"--out: {out} cannot be written to ({error.strerror}); give another directory") from None


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
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


def write_summary(out: Path, summary: Summary) -> None:
    """Raises OSError, and leaves the old one in place then."""
    text = orjson.dumps(summary, default=msgspec.to_builtins, option=orjson.OPT_INDENT_2)
    write_whole(out / "summary.json", text)


def newest_run(name: str, runs: Path = Path("runs")) -> Path:
    """The run directory of the unfinished job of this name that was written to last."""

    def goes_on(out: Path) -> bool:
        if (out / "summary.json").exists():
            summary = _written(out, _State) or _summary_from_events(out)
            if summary.state == "finished":
                return False
        return resumed_job(out).get("name") == name

    found = [path.parents[1] for path in runs.glob("*/journal/checkpoint") if goes_on(path.parents[1])]
    if not found:
        raise JobError(f"--resume: no unfinished run of {name!r} in {runs}; give its directory, as in --resume RUN")

    def written_s(out: Path) -> float:
        """0 where there are no events; resuming such a run is refused later."""
        return max((part.stat().st_mtime for part in event_files(out / "events.jsonl")), default=0.0)

    return max(found, key=written_s)


def summary_again(out: Path) -> Summary:
    """A run's summary, as written at its end; made from its events where it is missing or older than they are."""
    events, written = out / "events.jsonl", out / "summary.json"
    summary = None
    if written.exists() and written.stat().st_mtime >= max(part.stat().st_mtime for part in event_files(events)):
        summary = _written(out, Summary)
    return summary or _summary_from_events(out)


def _summary_from_events(out: Path) -> Summary:
    summary = SummaryFold()
    for event in read_events(out / "events.jsonl"):
        summary.read(event)
    return summary.result()


def trained_s(out: Path) -> float:
    """How long a run trained, start-up and evaluations included."""
    return _summary_of(out).time_s


def add_control(out: Path, plays: Plays) -> dict[str, Progress]:
    """Add another model's result to a run's summary, beside before and after. Returns its `eval`."""
    summary = _summary_of(out)
    rows = {task: _with_control(row, plays[task]) for task, row in summary.eval.items()}
    write_summary(out, replace(summary, eval=rows))
    return rows


def _with_control(row: Progress, plays: Mapping[str, Play]) -> Progress:
    greedy = row.greedy
    if greedy is not msgspec.UNSET and "greedy" in plays:
        greedy = replace(greedy, control=plays["greedy"].reward)
    return replace(row, control=plays["sampled"].reward, greedy=greedy)


def _summary_of(out: Path) -> Summary:
    try:
        summary = _written(out, Summary)
    except OSError as error:
        raise JobError(f"{out}: has no summary ({error.strerror}); give the run directory of a finished job") from None
    if summary is None:
        raise JobError(f"{out / 'summary.json'}: is not whole; `rollart show {out} --json` makes it from the events")
    return summary


def _written(out: Path, kind: type[S]) -> S | None:
    """None where the file is not whole: a machine that went down, or an earlier version. Raises OSError."""
    try:
        return msgspec.json.decode((out / "summary.json").read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None

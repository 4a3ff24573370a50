"""One error class per boundary, and the context manager that names the boundary an error crossed.

    RollartError
    |- JobError        the user's job cannot run: says the key and the fix (exit code 2)
    |- JobStopped      a running job gave up: says why and what to do (exit code 1)
    |  |- Interrupted  the user stopped it at once (exit code 130)
    |  `- StayedFull   there was no room to write for too long
    |- Deadlock        nothing can ever move again: names who waits on what
    `- BoundaryError   something beyond a port broke
       |- EngineError  |- RequestError  |- AnswerError  |- AgentError  |- RewardError  |- TaskError
       |- EnvError     |- EnvCrashed    `- EnvOverLimit
       |- TrainerError `- StartAgain
       |- WeightError  `- VersionGone
       |- ClusterError |- NoRoom |- CannotHost
       `- StoreFull    there is no room to write: tried again, and nobody's death

A bad rollout is data, not a crash: a BoundaryError ends one attempt, with its text as the reason.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType


def install(extra: str) -> str:
    """The command that brings an extra to this interpreter: from the clone that this code stands in, where it does."""
    root = Path(__file__).resolve().parents[1]
    what = f"-e '{root}[{extra}]'" if (root / "pyproject.toml").exists() else f"'rollart[{extra}]'"
    return f"{sys.executable} -m pip install {what}"


class RollartError(Exception):
    """Any error RollArt raises on purpose."""


class JobError(RollartError, ValueError):
    """The job file, an override or a command line is wrong. The text names the key and the fix."""


class JobStopped(RollartError):
    """The job stopped by itself for the reason given."""


class Interrupted(JobStopped):
    """The user stopped the job at once."""


class StayedFull(JobStopped):
    """What must be written found no room for longer than the job may wait."""


class Deadlock(RollartError):
    """No task can ever run again; the text names who waits on what since when."""


class BoundaryError(RollartError):
    """Something on the other side of a port failed."""


class EngineError(BoundaryError):
    """An engine died, hung, or refused."""


class RequestError(BoundaryError):
    """The engine is well, but this request cannot be served by any: the prompt does not fit, say."""


class AnswerError(BoundaryError):
    """The engine is well, but this answer cannot be believed: a log-probability that is not a number, say."""


class EnvError(BoundaryError):
    """An environment failed to open, answer or make sense."""


class EnvCrashed(EnvError):
    """Its process ended, or cannot be believed any more."""


class EnvOverLimit(EnvError):
    """It used more than it may, and was ended for that."""


class AgentError(BoundaryError):
    """The agent that plays an environment raised."""


class TaskError(BoundaryError):
    """A task set failed to draw a task, or drew nonsense."""


class RewardError(BoundaryError):
    """A reward function failed. `retryable` is False where another try gives the same error. `answered` is False where
    nobody was there to say anything: the platform may be down. `calls`: that were made, none where nobody was reached.
    `busy_s`: of a judge's engines."""

    def __init__(
        self, message: str, *, retryable: bool = True, answered: bool = True, calls: int = 1, busy_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.answered = answered
        self.calls = calls
        self.busy_s = busy_s


class TrainerError(BoundaryError):
    """The trainer was lost."""


class StartAgain(TrainerError):
    """The trainer cannot go on, but has noted what the next one must do otherwise: no failure, and a step has only so
    many of them."""


class WeightError(BoundaryError):
    """A weight bucket is missing or damaged."""


class VersionGone(WeightError):
    """The trainer is too far ahead to push this version again; a newer one will come."""


class ClusterError(BoundaryError):
    """A worker could not be started."""


class NoRoom(ClusterError):
    """No machine of the right kind has room for a worker now; one may join."""


class CannotHost(ClusterError):
    """This machine will never have this worker: it lacks what only a person brings. The text says what."""


class StoreFull(BoundaryError):
    """There is no room for what must be written. Some may be made: who writes waits, and tries again."""


FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXTS = tuple(os.strerror(number) for number in FULL)
"""How libraries say it that have errors of their own, as safetensors does."""


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Turn a full disk, store or quota into StoreFull, named `<where>: ...`. Everything else passes unchanged."""
    try:
        yield
    except RollartError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in FULL or any(text in text_of(error) for text in FULL_TEXTS):
            raise StoreFull(f"{where}: {error}") from error
        raise


_PASS = (BoundaryError, JobStopped, Deadlock)


class boundary:  # noqa: N801 - reads as a statement: `with boundary(EnvError, "env.step"):`
    """Turn whatever an adapter raises into the boundary's own error, named `<where>: ...`.

    Adapters are asked to raise `rollart.errors` only; user code behind them does not know that.
    Cancellation, exits, errors that already have a boundary and those that end the job by themselves pass unchanged.
    A JobError does not: what is wrong beyond a port while the job runs is not the job file.
    """

    __slots__ = ("_error", "_where")

    def __init__(self, error: type[BoundaryError], where: str) -> None:
        self._error = error
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, _PASS) or not isinstance(error, Exception):
            return
        text = text_of(error)
        name = "" if isinstance(error, TimeoutError | JobError) else f"{type(error).__name__}: "
        raise self._error(f"{self._where}: {name}{text}") from error


def text_of(error: BaseException) -> str:
    """What an error of user code says, as text that can be written down whatever that code does."""
    try:
        text = str(error)
    except Exception as worse:  # the boundary to user code: a `__str__` of its own
        text = f"{type(error).__name__}, whose text cannot be had ({type(worse).__name__})"
    return as_utf8(text) or type(error).__name__


def as_utf8(text: str) -> str:
    """The text with `?` for what is not a character: half a surrogate pair, as in a file name that is not UTF-8."""
    return text.encode("utf-8", "replace").decode()

"""Every wait of the control plane has a name, a since and, where it can have one, a limit.

A `WaitList` holds the waits of one kind, oldest first, with one timer for all of them: a guarded call costs no timer
of its own. The watchdog reads the same lists to say who waits on what.
"""

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Expired(TimeoutError):
    """A wait of ours was over its limit: what was awaited was given up, and may be well."""


class Signal:
    """Lets everyone go on who waits for it now; whoever waits later waits for the next time."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def next(self) -> "asyncio.Future[None]":
        """Done when it is given next."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def give(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Waiting(NamedTuple):
    """One wait, for a report."""

    who: str
    what: str
    since_s: float


class _Wait:
    """One wait, while its context is open."""

    __slots__ = ("_list", "due_s", "expired", "since_s", "task", "who")

    def __init__(self, waits: "WaitList", who: str, task: "asyncio.Task[object]", since_s: float, due_s: float) -> None:
        self._list = waits
        self.who = who
        self.task = task
        self.since_s = since_s
        self.due_s = due_s
        self.expired = False

    def __enter__(self) -> None:
        self._list.waits[self] = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._list.waits[self]
        if not self.expired:
            return
        if not isinstance(error, asyncio.CancelledError):
            self.forgive()
        elif self.task.uncancel() == 0:
            raise Expired(f"no answer in {self._list.limit_s:g} s") from None

    def expire(self, next_s: float) -> None:
        """Cancel what is awaited; again, where it swallowed the last time."""
        self.forgive()
        self.expired = True
        self.due_s = next_s
        self.task.cancel()

    def forgive(self) -> None:
        """Take back a cancellation that was swallowed."""
        if self.expired:
            self.expired = False
            self.task.uncancel()


class WaitList:
    """Waits of one kind with one limit."""

    def __init__(self, what: str, limit_s: float | None = None) -> None:
        self.what = what
        self.limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self.waits: dict[_Wait, None] = {}
        """Oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.waits)

    def during(self, who: str) -> _Wait:
        """A context in which this task waits, under this list's name; Expired when the limit passes first."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        now_s = self._loop.time()
        if self.limit_s is None:
            return _Wait(self, who, task, now_s, 0.0)
        due_s = now_s + self.limit_s
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._expire)
        return _Wait(self, who, task, now_s, due_s)

    async def guard(self, who: str, awaitable: Awaitable[T]) -> T:
        """Await it in such a context. One coroutine more, where calls are few."""
        with self.during(who):
            return await awaitable

    def _expire(self) -> None:
        """End the waits that are over their limit; look again when the next one may be."""
        assert self.limit_s is not None
        now_s = self._loop.time()
        self._timer = None
        for wait in list(self.waits):
            if wait.due_s > now_s:
                self._timer = self._loop.call_at(wait.due_s, self._expire)
                return
            wait.expire(now_s + self.limit_s)
            del self.waits[wait]
            self.waits[wait] = None  # it now falls due last: the list stays in order
        if self.waits:
            self._timer = self._loop.call_at(now_s + self.limit_s, self._expire)

    def oldest(self) -> Waiting | None:
        wait = min(self.waits, key=lambda wait: wait.since_s, default=None)
        return None if wait is None else Waiting(wait.who, self.what, wait.since_s)

    def holds(self, who: str) -> bool:
        """Whether this one waits here, or a call of its."""
        return any(wait.who == who or wait.who.startswith(f"{who}/") for wait in self.waits)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Waits:
    """All the wait lists of one job."""

    def __init__(self) -> None:
        self._lists: dict[str, WaitList] = {}

    def on(self, what: str, limit_s: float | None = None) -> WaitList:
        """The list of this name; made at its first use."""
        return self._lists.setdefault(what, WaitList(what, limit_s))

    def oldest(self) -> list[Waiting]:
        """The longest wait of each kind, the longest of all first."""
        found = [oldest for waits in self._lists.values() if (oldest := waits.oldest()) is not None]
        return sorted(found, key=lambda waiting: (waiting.since_s, waiting.what))

    def counts(self) -> dict[str, int]:
        return {name: len(waits) for name, waits in self._lists.items() if len(waits)}

    def what(self, who: str) -> str:
        """What this one waits on; empty where nothing is known."""
        return next((name for name, waits in self._lists.items() if waits.holds(who)), "")

    def report(self, now_s: float) -> str:
        """Who waits on what, in one sentence each."""
        counts = self.counts()
        lines = [
            f"{waiting.who} waits on {waiting.what} since {now_s - waiting.since_s:.1f} s"
            + (f" ({counts[waiting.what] - 1} more behind it)" if counts[waiting.what] > 1 else "")
            for waiting in self.oldest()
        ]
        return "; ".join(lines) or "nobody waits on anything that is known"

    def close(self) -> None:
        for waits in self._lists.values():
            waits.close()

"""An event loop whose clock jumps to the next timer: an hour of waiting takes no time.

Public asyncio API only: the loop's `time` and `call_at` are overridden, and a selector that never sleeps is passed to
it. Timers set in a background context (`ports.BACKGROUND`) are kept apart: when nothing else is left, the loop is
deadlocked, and `on_deadlock` is called at once.
"""

import asyncio
import contextvars
import heapq
import selectors
from collections.abc import Callable
from typing import Any

from rollart.errors import Deadlock
from rollart.ports import BACKGROUND

_Timer = tuple[float, int, asyncio.TimerHandle, Callable[..., object], tuple[Any, ...], contextvars.Context]


class _JumpSelector(selectors.DefaultSelector):
    """Instead of waiting until something happens, makes the next thing happen."""

    jump: Callable[[], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            self.jump()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers lie in heaps of tuples, which compare in C, in order of time and then of setting."""

    def __init__(self) -> None:
        selector = _JumpSelector()
        selector.jump = self._jump
        self._now_s = 0.0
        self._timers: list[_Timer] = []
        self._background: list[_Timer] = []
        self._numbers = 0
        self.on_deadlock: Callable[[], None] | None = None
        """Called when nothing can ever happen again; it must make something happen."""
        super().__init__(selector)

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if context is None:
            context = contextvars.copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heap = self._background if BACKGROUND.get() else self._timers
        heapq.heappush(heap, (when, self._numbers, handle, callback, args, context))
        return handle

    def _jump(self) -> None:
        """Nothing is ready: move the clock to the next timer, and run all that are due then."""
        _forget_cancelled(self._timers)
        if not self._timers:
            self._deadlocked()
            return
        _forget_cancelled(self._background)
        due_s = self._timers[0][0]
        if self._background:
            due_s = min(due_s, self._background[0][0])
        self._now_s = max(self._now_s, due_s)
        for heap in (self._timers, self._background):
            while heap and heap[0][0] <= self._now_s:
                _, _, handle, callback, args, context = heapq.heappop(heap)
                if not handle.cancelled():
                    self.call_soon(_run, handle, callback, args, context=context)

    def _deadlocked(self) -> None:
        if self.on_deadlock is None:
            raise Deadlock("no task can ever run again, and nobody was asked to say who waits")
        callback, self.on_deadlock = self.on_deadlock, None
        self.call_soon(callback)


def _forget_cancelled(heap: list[_Timer]) -> None:
    while heap and heap[0][2].cancelled():
        heapq.heappop(heap)


def _run(handle: asyncio.TimerHandle, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
    """A timer may be cancelled between falling due and being run."""
    if not handle.cancelled():
        callback(*args)

"""An event loop whose clock jumps to the next timer: an hour of waiting takes no time.

It runs what is ready, in order; when nothing is, it moves the clock to the next timer and calls all that are due then.
There are no sockets, threads or signals in it, so that is all: asyncio's own loops do more at every turn, which takes
a fifth of a large simulation. Timers set in a background context (`ports.BACKGROUND`) are kept apart: when nothing else
is left, the loop is deadlocked, and `on_deadlock` is called at once.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVarTuple, Unpack

from rollart.errors import Deadlock
from rollart.ports import BACKGROUND

Ts = TypeVarTuple("Ts")


class _Call(asyncio.TimerHandle):
    """A callback that is ready, or a timer: its own fields, as asyncio's take longer to set."""

    __slots__ = ("args", "at_s", "callback", "context")

    def __init__(
        self, at_s: float, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self.at_s = at_s
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        self.callback = None

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.at_s


_Timer = tuple[float, int, _Call]


class VirtualLoop(asyncio.BaseEventLoop):
    """Timers lie in heaps of tuples, which compare in C, in order of time and then of setting."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._soon: deque[_Call] = deque()
        self._timers: list[_Timer] = []
        self._background: list[_Timer] = []
        self._numbers = 0
        self._going = False
        self._stopped = False
        self.on_deadlock: Callable[[], None] | None = None
        """Called when nothing can ever happen again; it must make something happen."""
        super().__init__()

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> _Call:
        call = _Call(self._now_s, callback, args, contextvars.copy_context() if context is None else context)
        self._soon.append(call)
        return call

    call_soon_threadsafe = call_soon
    """Of a signal's handler: nothing sleeps here that would have to be woken."""

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> _Call:
        timer = _Call(when, callback, args, contextvars.copy_context() if context is None else context)
        self._numbers = number = self._numbers + 1
        heapq.heappush(self._background if BACKGROUND.get() else self._timers, (when, number, timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> _Call:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    # --- running --------------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return self._going

    def stop(self) -> None:
        """After what is ready now."""
        self._stopped = True

    def run_forever(self) -> None:
        """Until `stop`. Raises Deadlock when nothing can ever happen and there is no `on_deadlock`."""
        soon = self._soon
        self._going = True
        asyncio._set_running_loop(self)
        try:
            while True:
                if not (soon or self._stopped):
                    self._jump()
                for _ in range(len(soon)):
                    call = soon.popleft()
                    if call.callback is not None:
                        try:
                            call.context.run(call.callback, *call.args)
                        except (SystemExit, KeyboardInterrupt):
                            raise
                        except BaseException as error:  # as asyncio's loops do
                            self.call_exception_handler(
                                {"message": f"Exception in callback {call.callback!r}", "exception": error}
                            )
                if self._stopped:
                    return
        finally:
            self._stopped = self._going = False
            asyncio._set_running_loop(None)

    def _jump(self) -> None:
        """Nothing is ready: move the clock to the next timer; all that are due then are ready."""
        timers, background, soon = self._timers, self._background, self._soon
        while timers and timers[0][2].callback is None:  # cancelled
            heapq.heappop(timers)
        if not timers:
            self._deadlocked()
            return
        while background and background[0][2].callback is None:
            heapq.heappop(background)
        now_s = timers[0][0]
        if background and background[0][0] < now_s:
            now_s = background[0][0]
        if now_s < self._now_s:
            now_s = self._now_s
        self._now_s = now_s
        while timers and timers[0][0] <= now_s:
            soon.append(heapq.heappop(timers)[2])
        while background and background[0][0] <= now_s:
            soon.append(heapq.heappop(background)[2])

    def _deadlocked(self) -> None:
        if self.on_deadlock is None:
            raise Deadlock("no task can ever run again, and nobody was asked to say who waits")
        callback, self.on_deadlock = self.on_deadlock, None
        self.call_soon(callback)

"""How a client of functions behaves in a burst: how many calls it has under way, and when it asks a second time.

`Places` halves what it allows when the platform says that it is too much, and grows by one each time that many calls
went well. `Hedge` knows how long calls took lately. Both are of one backend, and touch nothing but the event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

KEPT, FEWEST = 256, 20
"""Latencies that are remembered, and how many must be known before a call counts as slow."""


class Places:
    """At most `most` calls at a time; fewer for a while where that was too much."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = float(most)
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def allowed(self) -> int:
        return max(1, int(self._allowed))

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a place, and have it."""
        if self._taken >= self.allowed or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it got its place as it was cancelled
                    self._leave()
                raise
        else:
            self._taken += 1
        try:
            yield
        finally:
            self._leave()

    def went_well(self) -> None:
        self._allowed = min(self._most, self._allowed + 1.0 / self._allowed)
        self._admit()

    def too_much(self) -> None:
        self._allowed = max(1.0, self._allowed / 2)

    def _leave(self) -> None:
        self._taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._taken < self.allowed:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)


class Hedge:
    """Asks again, beside the first call, where that takes longer than this share of the last calls did."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds: deque[float] = deque(maxlen=KEPT)

    @property
    def patience_s(self) -> float | None:
        """How long the first call may take alone; None while too little is known."""
        if len(self._seconds) < FEWEST:
            return None
        known = sorted(self._seconds)
        return known[min(len(known) - 1, int(self._share * len(known)))]

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer that comes first, or, where both fail, the error of the last. The other call is cancelled."""
        loop = asyncio.get_running_loop()
        began_s, patience_s = loop.time(), self.patience_s
        calls = [asyncio.ensure_future(call())]
        try:
            done, _ = await asyncio.wait(calls, timeout=patience_s)
            if not done:
                calls.append(asyncio.ensure_future(call()))
            for until in (asyncio.FIRST_COMPLETED, asyncio.ALL_COMPLETED):
                await asyncio.wait(calls, return_when=until)
                good = [each for each in calls if each.done() and each.exception() is None]
                if good:
                    self._seconds.append(loop.time() - began_s)
                    return good[0].result()
            return calls[-1].result()
        finally:
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

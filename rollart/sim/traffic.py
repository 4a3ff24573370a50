"""A link that all who use it share evenly, and the images of environments that come over one.

Nothing is stepped: each transfer gets the same number of bytes while it lasts, so one counter of bytes serves them all.
"""

import asyncio
import heapq

from rollart.config.sim import SimImageSettings

ALMOST_B = 1e-3
"""Bytes; less than this is nothing."""


class SharedLink:
    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._each = 0.0
        """Bytes that each transfer has got, had it been there from the beginning."""
        self._at_s = 0.0
        self._under_way: list[tuple[float, int, asyncio.Future[None]]] = []
        """What `_each` is when one is done; a heap."""
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None

    async def transfer(self, num_bytes: float) -> None:
        if num_bytes <= 0.0:
            return
        self._advance()
        self._numbers += 1
        done: asyncio.Future[None] = self._loop.create_future()
        entry = (self._each + num_bytes, self._numbers, done)
        heapq.heappush(self._under_way, entry)
        self._plan()
        try:
            await done
        except asyncio.CancelledError:
            if entry in self._under_way:  # what it has left to send, nobody waits for
                self._advance()
                self._under_way.remove(entry)
                heapq.heapify(self._under_way)
                self._plan()
            raise

    def _advance(self) -> None:
        now_s = self._loop.time()
        if self._under_way:
            self._each += (now_s - self._at_s) * self._rate / len(self._under_way)
        self._at_s = now_s

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._under_way:
            left = max(0.0, self._under_way[0][0] - self._each)
            self._timer = self._loop.call_later(left * len(self._under_way) / self._rate, self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        self._advance()
        while self._under_way and self._under_way[0][0] <= self._each + ALMOST_B:
            done = heapq.heappop(self._under_way)[2]
            if not done.done():
                done.set_result(None)
        self._plan()


class SimImages:
    """What the machines with environments have of their images; one that is not there is pulled, once for all."""

    def __init__(self, settings: SimImageSettings) -> None:
        self._room = settings.cache_gb * 1e9
        self._link = SharedLink(settings.pull_gb_s * 1e9)
        self._here: dict[str, float] = {}
        """Bytes of each, the least recently used first."""
        self._used: dict[str, int] = {}
        """Environments that run on one, or wait for it."""
        self._coming: dict[str, asyncio.Task[None]] = {}

    async def take(self, image: str, num_bytes: float) -> None:
        """Wait until it is there. Call `leave` when it is needed no more, also if this was given up."""
        self._used[image] = self._used.get(image, 0) + 1
        if image in self._here:
            self._here[image] = self._here.pop(image)
            return
        pull = self._coming.get(image)
        if pull is None:
            pull = self._coming[image] = asyncio.create_task(self._pull(image, num_bytes))
        await asyncio.shield(pull)

    def leave(self, image: str) -> None:
        self._used[image] -= 1
        if not self._used[image]:
            del self._used[image]
        self._make_room()

    async def _pull(self, image: str, num_bytes: float) -> None:
        await self._link.transfer(num_bytes)
        del self._coming[image]
        self._here[image] = num_bytes
        self._make_room()

    def _make_room(self) -> None:
        """Those in use stay, whatever room they take."""
        idle = [image for image in self._here if image not in self._used]
        while idle and sum(self._here.values()) > self._room:
            del self._here[idle.pop(0)]

"""A coordinator's own time: no two calls are worked on at once, however many engines there are."""

import asyncio


class Core:
    """On which calls wait for each other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._free_s = 0.0
        """When it has done what it was asked so far."""

    async def work(self, seconds: float) -> None:
        """Wait until these seconds of work are done."""
        self._free_s = max(self._loop.time(), self._free_s) + seconds
        await asyncio.sleep(self._free_s - self._loop.time())

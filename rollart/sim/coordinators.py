"""The coordinator's own time: no two calls are worked on at once, however many engines there are."""

import asyncio
import zlib

from rollart.config.sim import SimControlSettings


class SimCoordinators:
    """Each has one core, on which the calls of its groups wait for each other."""

    def __init__(self, settings: SimControlSettings) -> None:
        self._call_s = settings.call_s
        self._loop = asyncio.get_running_loop()
        self._free_s = [0.0] * settings.coordinators
        """When each has done what it was asked so far."""

    async def call(self, session: str) -> None:
        """Wait until this call's turn is over. `session`: `str(TrajectoryId)`."""
        which = zlib.crc32(session.partition(".")[0].encode()) % len(self._free_s)
        self._free_s[which] = max(self._loop.time(), self._free_s[which]) + self._call_s
        await asyncio.sleep(self._free_s[which] - self._loop.time())

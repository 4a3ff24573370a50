"""What must be written finds no room: waits, warns, tries again, and stops the job where that lasts.

A full disk or store is nobody's death: no worker is started again for it, and nothing is replayed. Invariant: what is
being written either gets written or ends the job; the last checkpoint is whole in both cases.
"""

import asyncio
from typing import TYPE_CHECKING

from rollart.errors import StayedFull, StoreFull
from rollart.events import schema

if TYPE_CHECKING:
    from rollart.control.context import JobContext

RETRY_S = 5.0
"""Between two tries."""


class Room:
    """Shared by all that write. `what` names a thing that is being written."""

    def __init__(self, context: "JobContext") -> None:
        self._context = context
        self._limit_s = context.job.limits.store_full_s
        self._loop = asyncio.get_running_loop()
        self._waiting = context.waits.on("room to write")
        self._since: dict[str, tuple[float, int]] = {}

    async def wait(self, what: str, error: StoreFull) -> None:
        """It found no room: returns when it is time to try again. Raises StayedFull when that went on for too long."""
        now_s = self._loop.time()
        if what not in self._since:
            cause = self._context.log.emit(schema.StoreFull(what=what, reason=str(error)))
            text = f"{what}: no room to write ({error}); trying again for {self._limit_s:g} s: free some"
            self._context.warn(text, cause)
            self._since[what] = (now_s, cause)
        left_s = self._since[what][0] + self._limit_s - now_s
        if left_s <= 0:
            raise StayedFull(
                f"{what}: no room to write for {self._limit_s:g} s (limits.store_full_s), the last time: {error}; "
                "the last checkpoint is whole: free some room and resume"
            )
        await self._waiting.guard(what, asyncio.sleep(min(RETRY_S, left_s)))

    def found(self, what: str) -> None:
        """It was written."""
        if what in self._since:
            since_s, cause = self._since.pop(what)
            waited_s = round(self._loop.time() - since_s, 3)
            self._context.log.emit(schema.StoreRoom(what=what, waited_s=waited_s, cause=cause))

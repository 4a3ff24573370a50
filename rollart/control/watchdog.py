"""Nothing hangs silently: when nothing has moved for too long, says who waits on whom since when."""

import asyncio

from rollart.control.waits import Waits
from rollart.events import LogHandle


class Watchdog:
    """A background task; its own reports do not count as movement."""

    def __init__(self, waits: Waits, log: LogHandle, stall_s: float) -> None:
        self._waits = waits
        self._log = log
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        moved_s = self._log.last_s
        reported_s = -1.0
        while True:
            await asyncio.sleep(self._stall_s / 3)
            if self._log.last_s != reported_s:
                moved_s = self._log.last_s
            now_s = self._loop.time()
            if now_s - max(moved_s, reported_s) >= self._stall_s:
                self.report("stall", f"nothing has moved for {now_s - moved_s:.0f} s")
                reported_s = now_s

    def report(self, kind: str, text: str) -> str:
        """Write who waits, and return it in words."""
        now_s = self._loop.time()
        words = f"{text}: {self._waits.report(now_s)}"
        waiting = [
            {"who": wait.who, "what": wait.what, "for_s": round(now_s - wait.since_s, 3)}
            for wait in self._waits.oldest()
        ]
        self._log.emit(kind, {"text": words, "waiting": waiting})
        self._log.flush()
        return words

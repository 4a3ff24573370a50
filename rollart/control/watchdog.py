"""Nothing hangs silently: says who waits on whom when nothing has moved for too long, and names an engine, a task or a
trajectory that stands still while its peers move."""

import asyncio
import math
from collections.abc import Callable, Sequence

from rollart.control.context import JobContext
from rollart.events import schema
from rollart.policy.stalls import Lag, Part, lagging, to_name


class Watchdog:
    """A background task; its own reports do not count as movement."""

    def __init__(
        self,
        context: JobContext,
        parts: Callable[[], Sequence[Part]],
        *,
        stalled: Callable[[str], None] | None,
    ) -> None:
        """`parts`: what the job consists of now. `stalled`: told when nothing moves; None where the head looks."""
        self._context = context
        self._waits = context.waits
        self._log = context.log
        self._parts = parts
        self._stall_s = context.job.limits.stall_s if stalled is not None else math.inf
        self._stalled = stalled
        self._lag_s = context.job.limits.lag_s
        self._loop = asyncio.get_running_loop()
        self._named: dict[str, float] = {}
        """Part that stands still -> for how long it had when it was named."""
        self._named_s = -math.inf
        """When a trajectory was named last."""
        self._reported_s = -1.0
        """When the log was written to by this, on the log's clock: a real one goes on as it writes."""

    async def run(self) -> None:
        moved_s = self._log.last_s
        stalled_s = -1.0
        while True:
            await asyncio.sleep(min(self._stall_s, self._lag_s) / 3)
            if self._log.last_s != self._reported_s:
                moved_s = self._log.last_s
            now_s = self._loop.time()
            if now_s - max(moved_s, stalled_s) >= self._stall_s:
                text = f"nothing has moved for {now_s - moved_s:.0f} s"
                self.report(schema.Stall, text)
                if self._stalled is not None:
                    self._stalled(text)
                stalled_s = now_s
                self._reported_s = self._log.last_s
            elif moved_s > now_s - self._stall_s:
                self._name_parts()

    def _name_parts(self) -> None:
        found = lagging(self._parts(), self._lag_s)
        still = {lag.part.name for lag in found}
        self._named = {name: for_s for name, for_s in self._named.items() if name in still}
        now_s = self._loop.time()
        for lag in to_name(found, self._named, now_s - self._named_s, self._lag_s):
            self._named[lag.part.name] = lag.part.still_s
            if lag.part.kind == "trajectory":
                self._named_s = now_s
            self._name(lag)
            self._reported_s = self._log.last_s

    def _name(self, lag: Lag) -> None:
        part = lag.part
        what = self._waits.what(part.name)
        peers = f"trajectories of {part.among}" if part.among else f"{part.kind}s"
        text = f"{part.kind} {part.name} has not moved for {part.still_s:.0f} s, far longer than other {peers}" + (
            f"; it waits on {what}" if what else ""
        )
        cause = self._log.emit(
            schema.Lagging(
                kind=part.kind, name=part.name, for_s=round(part.still_s, 3), peers_s=round(lag.peers_s, 3), what=what
            ),
        )
        self._context.warn(text, cause)

    def report(self, kind: type[schema.Stall | schema.Deadlock], text: str) -> str:
        """Write who waits, and return it in words."""
        now_s = self._loop.time()
        words = f"{text}: {self._waits.report(now_s)}"
        waiting = [
            schema.Wait(who=wait.who, what=wait.what, for_s=round(now_s - wait.since_s, 3))
            for wait in self._waits.oldest()
        ]
        self._log.emit(kind(text=words, waiting=waiting))
        self._log.flush()
        return words

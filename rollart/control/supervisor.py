"""The tasks of one job. A task that raises ends the job with its error; nothing fails unseen.

Tasks are kept in the order they were started and cancelled in that order, so that two runs end alike.
"""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

from rollart.ports import BACKGROUND


class TaskSupervisor:
    def __init__(self) -> None:
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set to the first error of any task; the coordinator waits on it."""

    def spawn(self, work: Coroutine[Any, Any, Any], *, background: bool = False) -> asyncio.Task[Any]:
        """Start a task. `background`: a periodic one, whose timers do not count as life."""
        context = contextvars.copy_context()
        if background:
            context.run(BACKGROUND.set, True)
        task = asyncio.get_running_loop().create_task(work, context=context)
        self.tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def fail(self, error: BaseException) -> None:
        """End the job with this error."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self.fail(error)

    async def close(self) -> None:
        """Cancel what still runs, and wait for it. Tasks may start others while they end."""
        while self.tasks:
            tasks = list(self.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                self.tasks.pop(task, None)
        if self.failed.done():
            self.failed.exception()
        else:
            self.failed.cancel()

"""The audit's books on tasks that keep failing: out of the mix after enough failures, probed, back with their share.

A part of `rollart.report.audit`, fed the same events; it counts failures itself. What it finds breaks promise 3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollart.events import schema
from rollart.events.log import Fold
from rollart.events.schema import task_set

LATE_S = 1e-3
"""Times in events are rounded."""


@dataclass(slots=True)
class _Task:
    failures: int = 0
    """Groups and draws that failed since the last group was scored."""
    out: bool = False
    due_s: float = 0.0
    """When a probe may be made."""
    probe: str = ""
    owed: int | None = None
    """Just back in the mix: one of this many next groups must be of this task."""


class TaskBooks(Fold):
    def __init__(self, broken: Callable[[int, str], None]) -> None:
        self._broken = broken
        self._most = 0
        self._shares: dict[str, float] = {}
        self.tasks: dict[str, _Task] = {}
        self._at_checkpoint: dict[str, _Task] = {}
        self.task_of: dict[str, str] = {}
        """Of groups that are alive, or may be again after a restart."""
        self._alive: dict[str, None] = {}
        """Groups admitted and not ended."""
        self._reopening: dict[str, None] = {}
        super().__init__()

    def _run(self, event: schema.Run) -> None:
        self._most = event.task_failures
        self._shares = {name: task.share for name, task in event.tasks.items()}
        self.tasks = {name: _Task() for name in event.tasks}
        self._at_checkpoint = dict(self.tasks)

    def _changed(self, event: schema.Changed) -> None:
        self._most = event.job.task_failures

    def _admitted(self, event: schema.Admit) -> None:
        group, name = event.group, task_set(event.task)
        self.task_of[group] = name
        self._alive[group] = None
        if group in self._reopening:
            del self._reopening[group]
            return
        task = self.tasks[name]
        if task.out and task.probe != group:
            self._broken(3, f"group {group} of task {name} was admitted while the task is out of the mix")
        if not task.out and task.failures >= self._most:
            self._broken(3, f"task {name} is in the mix after {task.failures} failures in a row")
        for other, waits in self.tasks.items():
            if not task.out and waits.out and not waits.probe and event.t > waits.due_s + LATE_S:
                self._broken(3, f"group {group} was admitted before the probe of task {other}, which was due")
            if waits.owed is not None:
                waits.owed = None if other == name else waits.owed - 1
                if waits.owed == 0:
                    self._broken(3, f"task {other} is back in the mix, but gets no groups")

    def _shard_lost(self, event: schema.ShardDown) -> None:
        self._reopening.update(dict.fromkeys(event.groups))

    def _ready(self, event: schema.Ready) -> None:
        self._scored(event.group)

    def _ended(self, event: schema.Group) -> None:
        self._alive.pop(event.group, None)
        name = task_set(event.task)
        task = self.tasks[name]
        if event.how == "failed":
            task.failures += 1
        elif event.how == "filtered":
            self._scored(event.group)
        elif task.probe == event.group:
            task.probe, task.due_s = "", event.t

    def _trained(self, event: schema.Batch) -> None:
        for group in event.groups:
            self._alive.pop(group, None)

    def _scored(self, group: str) -> None:
        task = self.tasks[self.task_of[group]]
        if not task.out:
            task.failures = 0

    def _undrawn(self, event: schema.DrawFailed) -> None:
        if not event.eval:
            self.tasks[event.task].failures += 1

    def _opened(self, event: schema.BreakerOpen) -> None:
        task = self.tasks[event.task]
        if not task.out and task.failures < self._most:
            self._broken(3, f"task {event.task} left the mix after {task.failures} failures in a row")
        task.out, task.probe, task.owed = True, "", None
        task.due_s = event.t + event.wait_s

    def _probed(self, event: schema.BreakerProbe) -> None:
        task = self.tasks[event.task]
        if not task.out or task.probe or event.t < task.due_s - LATE_S:
            self._broken(3, f"task {event.task} was probed out of turn")
        task.probe = event.group

    def _closed(self, event: schema.BreakerClose) -> None:
        task = self.tasks[event.task]
        if not task.out or task.probe != event.group:
            self._broken(3, f"task {event.task} came back to the mix, but not by its probe")
        # Its groups that are alive count towards its share, so groups of other tasks may come first.
        alive = sum(self.task_of[group] == event.task for group in self._alive)
        self.tasks[event.task] = _Task(owed=2 + math.ceil((alive + 2) / self._shares[event.task]))

    def _checkpoint(self, event: schema.Checkpoint) -> None:
        self._at_checkpoint = {name: replace(task) for name, task in self.tasks.items()}
        held = dict.fromkeys([*self._alive, *event.ready, *event.open])
        self.task_of = {group: self.task_of[group] for group in held if group in self.task_of}

    def _resumed(self, event: schema.Resumed) -> None:
        """The breakers are as in the checkpoint, and probes may be made at once. Where fewer failures are allowed now,
        a task that is in the mix has one left."""
        self.tasks = {
            name: replace(
                task,
                failures=task.failures if task.out else min(task.failures, self._most - 1),
                due_s=event.t,
                probe="",
                owed=None,
            )
            for name, task in self._at_checkpoint.items()
        }
        self._reopening = dict.fromkeys(event.open)
        self._alive = dict.fromkeys([*event.ready, *event.open])
        out = [name for name, task in self.tasks.items() if task.out]
        if out != event.out:
            self._broken(3, f"resumed with {event.out} out of the mix, but {out} were at the checkpoint")

"""The summary's books on what fails, and how each task fares. A part of `rollart.report.summary`, fed the same events.

Bounded: reasons are counted by cause (`rollart.causes`), and only the most frequent are told.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rollart.causes import Causes
from rollart.events import schema
from rollart.events.metrics import Metrics, Sum

FAILURES = ("engine", "answer", "trainer", "coordinator", "worker", "attempt", "draw", "reward", "sample")
MAX_REASONS = 5
"""Told of each kind of failure."""


class Failures:
    """How often each kind of thing failed, and why."""

    def __init__(self) -> None:
        self._kinds = {kind: Causes() for kind in FAILURES}

    def add(self, kind: str, who: str, reason: str) -> None:
        self._kinds[kind].add(reason, reason if who in reason else f"{who}: {reason}")

    def rows(self) -> dict[str, Any]:
        return {kind: {"count": causes.total, "reasons": reasons(causes)} for kind, causes in self._kinds.items()}


def reasons(causes: Causes) -> list[str]:
    """The most frequent ones, with how often each was met."""
    return [f"{cause.times} x {cause.text}" for cause in causes.top(MAX_REASONS)]


@dataclass(slots=True)
class _Task:
    causes: Causes = field(default_factory=Causes)
    """Of its failed attempts and draws."""
    with_gradient: int = 0
    state: str = "in"
    taken_out: int = 0
    probes: int = 0
    out_reason: str = ""


class TaskBooks:
    """Of each task: what it fails of, whether it is in the mix, and how many of its groups carried a gradient."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: dict[str, _Task] = {}
        self._teaches: dict[str, bool] = {}
        """Of each group that was ready and is not covered by a checkpoint: did its members earn different rewards?"""
        self._step_of: dict[str, int] = {}
        """Of those that were trained on."""

    def names(self, tasks: Iterable[str]) -> None:
        self._tasks = {name: _Task() for name in tasks}

    def failed(self, task: str, reason: str) -> None:
        self._tasks[task].causes.add(reason)

    def ready(self, event: schema.Ready) -> None:
        self._teaches[event.group] = event.gradient

    def trained(self, group: str, task: str, step: int) -> None:
        self._step_of[group] = step
        teaches = self._teaches.get(group, True)
        self._tasks[task].with_gradient += teaches
        for prefix in ("", f"{task}/"):
            self._metrics.add(f"{prefix}groups/trained", Sum(1))
            self._metrics.add(f"{prefix}groups/with_gradient", Sum(int(teaches)))

    def not_trained(self, group: str, task: str) -> None:
        """Its batch was formed, but lost before it was written; or all of it was set aside."""
        self._tasks[task].with_gradient -= self._teaches.get(group, True)

    def opened(self, event: schema.BreakerOpen) -> None:
        task = self._tasks[event.task]
        task.taken_out += event.probes == 0
        task.state, task.out_reason = "out", event.reason

    def probed(self, event: schema.BreakerProbe) -> None:
        task = self._tasks[event.task]
        task.probes += 1
        task.state = "probing"

    def closed(self, event: schema.BreakerClose) -> None:
        task = self._tasks[event.task]
        task.state, task.out_reason = "in", ""

    def checkpoint(self, step: int, held: Iterable[str]) -> None:
        """Whoever goes on from it meets the groups that it holds, and those of steps that are replayed; no others."""
        self._step_of = {group: at for group, at in self._step_of.items() if at >= step}
        kept = [*held, *self._step_of]
        self._teaches = {group: self._teaches[group] for group in kept if group in self._teaches}

    def resumed(self, out: Iterable[str]) -> None:
        """Breakers are as in the checkpoint."""
        left = dict.fromkeys(out)
        for name, task in self._tasks.items():
            task.state = "out" if name in left else "in"

    def row(self, name: str) -> dict[str, Any]:
        task = self._tasks[name]
        return {
            "with_gradient": task.with_gradient,
            "state": task.state,
            "taken_out": task.taken_out,
            "probes": task.probes,
            "out_reason": task.out_reason,
            "failures": task.causes.total,
            "reasons": reasons(task.causes),
        }

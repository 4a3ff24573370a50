"""How each task fares: what its attempts fail of, whether its groups teach anything, and whether it stays in the mix.

Tells the breaker what happened, and the mix what the breaker decides; writes down both. Invariant: the tasks whose
breaker is open are those that are out of the mix.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.causes import Causes
from rollart.control.context import JobContext
from rollart.control.samples import zero_variance
from rollart.events import schema
from rollart.policy.breaker import Breaker
from rollart.policy.mix import Mix
from rollart.types import BreakerState

FLAT_WINDOW = 20
"""Groups of a task, or two batches' worth, whose members all earned the same before we warn."""


@dataclass(slots=True)
class _Tally:
    """One task since the last batch was formed."""

    failed: int = 0
    undrawn: int = 0
    filtered: Causes = field(default_factory=Causes)
    """By what all members earned."""
    causes: Causes = field(default_factory=Causes)
    """Of failed attempts and draws."""

    def words(self) -> list[str]:
        found = []
        if self.undrawn:
            found.append(f"{self.undrawn} draws failed")
        if self.failed:
            found.append(f"{self.failed} groups failed")
        if self.causes.total:
            found.append(f"most often {self.causes.words()}")
        if self.filtered.total:
            found.append(f"{self.filtered.total} groups were filtered, most often {self.filtered.words()}")
        return found


class Health:
    def __init__(self, context: JobContext, mix: Mix) -> None:
        limits = context.job.limits
        self._mix = mix
        self._log = context.log
        self._warn = context.warn
        self._tasks = tasks = [task.name for task in context.job.tasks]
        self._breaker = Breaker(
            tasks, failures=limits.task_failures, wait_s=limits.task_probe_s, probes=limits.task_probes
        )
        self._tallies = {task: _Tally() for task in tasks}
        window = max(FLAT_WINDOW, 2 * context.job.rollout.groups_per_step)
        self._flat: dict[str, deque[bool]] = {task: deque(maxlen=window) for task in tasks}
        """Of the last scored groups: did all members earn the same?"""
        self._told_flat: dict[str, None] = {}
        self._told_starving: dict[str, None] = {}

    @property
    def hopeless(self) -> bool:
        """No task is left, and none came back when it was probed."""
        return self._breaker.hopeless

    # --- what happened ----------------------------------------------------------------------------------------

    def attempt_failed(self, task: str, reason: str) -> None:
        self._tallies[task].causes.add(reason)

    def draw_failed(self, task: str, index: int, group: str, reason: str, now_s: float) -> float | None:
        """As `failed`, for a group that could not be made."""
        cause = self._log.emit(schema.DrawFailed(task=task, index=index, reason=reason, eval=False))
        self._tallies[task].undrawn += 1
        self._tallies[task].causes.add(reason)
        return self._failed(task, group, now_s, cause)

    def group_failed(self, task: str, group: str, now_s: float, cause: int) -> float | None:
        """Seconds until the task is probed next, where it is out of the mix now because of this."""
        self._tallies[task].failed += 1
        return self._failed(task, group, now_s, cause)

    def group_scored(self, task: str, group: str, rewards: Sequence[float], cause: int, *, filtered: bool) -> None:
        """Its environments and rewards work, whatever becomes of the group."""
        if filtered:
            self._tallies[task].filtered.add(f"all members earned {rewards[0]:.4g}")
        if self._breaker.well(task, group):
            self._log.emit(schema.BreakerClose(task=task, group=group, cause=cause))
            self._set_out()
        self._watch_flat(task, rewards)

    def group_ended(self, task: str, group: str, now_s: float) -> None:
        """It ended in a way that says nothing about its task."""
        self._breaker.ended(task, group, now_s)

    def batch_formed(self) -> None:
        self._tallies = {task: _Tally() for task in self._tasks}

    def swapped(self, version_s: float, bound: int) -> None:
        """A version was served for `version_s`, under this bound."""
        for task, needed in self._mix.starving(version_s):
            if task not in self._told_starving:
                self._told_starving[task] = None
                self._warn(
                    f"task {task!r}: nearly all of its groups go stale; it needs rollout.staleness of about "
                    f"{max(needed, bound + 1)}, shorter trajectories, or more engines"
                )

    # --- probes -----------------------------------------------------------------------------------------------

    def to_probe(self, now_s: float) -> str | None:
        """A task that is out, and due to be tried again."""
        return self._breaker.due(now_s)

    def probing(self, task: str, group: str) -> None:
        """This group tries it."""
        self._breaker.probing(task, group)
        self._log.emit(schema.BreakerProbe(task=task, group=group))

    # --- words ------------------------------------------------------------------------------------------------

    def why(self) -> str:
        """What became of each task since the last batch, with the most frequent reason."""
        told = []
        for task, tally in self._tallies.items():
            words = tally.words()
            if self._breaker.is_open(task):
                words.insert(0, f"out of the mix after {self._breaker.failures(task)} failures in a row")
            if words:
                told.append(f"task {task!r}: {', '.join(words)}")
        return "; ".join(told) or "nothing was played"

    def last_words(self, filtered: int, batches: int) -> str:
        """Why the job stops, after this many filtered groups and short batches."""
        if self.hopeless:
            return f"no task is left, and none came back when it was tried again: {self.why()}"
        return (
            f"{filtered} groups in a row were filtered (all members earned the same), {batches} batches running: the "
            "tasks are too hard or too easy for this model, or their rewards do not tell answers apart. " + self.why()
        )

    # --- checkpoints ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, BreakerState]:
        return self._breaker.state()

    def restore(self, state: Mapping[str, BreakerState], now_s: float) -> None:
        self._breaker.restore(state, now_s)
        if self.out:
            self._set_out()

    @property
    def out(self) -> list[str]:
        """Tasks that are out of the mix."""
        return [task for task in self._tasks if self._breaker.is_open(task)]

    def _failed(self, task: str, group: str, now_s: float, cause: int) -> float | None:
        was_open = self._breaker.is_open(task)
        wait_s = self._breaker.failed(task, group, now_s)
        if wait_s is not None:
            reason = self._tallies[task].causes.words()
            self._log.emit(
                schema.BreakerOpen(
                    task=task,
                    failures=self._breaker.failures(task),
                    probes=self._breaker.probes(task),
                    wait_s=wait_s,
                    reason=reason,
                    cause=cause,
                ),
            )
            if not was_open:
                self._set_out()
                self._warn(
                    f"task {task!r} is out of the mix: {self._breaker.failures(task)} failures in a row, most often "
                    f"{reason or 'for no reason given'}; it is tried again after {wait_s:g} s"
                )
        return wait_s

    def _set_out(self) -> None:
        self._mix.put_out(self.out)

    def _watch_flat(self, task: str, rewards: Sequence[float]) -> None:
        flat = self._flat[task]
        flat.append(zero_variance(rewards))
        if not flat[-1]:
            self._told_flat.pop(task, None)
        elif len(flat) == flat.maxlen and all(flat) and task not in self._told_flat:
            self._told_flat[task] = None
            self._warn(
                f"task {task!r}: in each of its last {len(flat)} groups all members earned the same (the last: "
                f"{rewards[0]:.4g}), so nothing is learned from it; its problems are too hard or too easy for this "
                "model, or its reward does not tell answers apart"
            )

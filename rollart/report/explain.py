"""Why each task ran where it did: a fold over a run's events. `rollart explain`.

Reads what was decided and what was predicted from the `affinity` events, and what then happened from the rest.
"""

from dataclasses import dataclass, field
from typing import Any

from msgspec import to_builtins

from rollart.events import schema
from rollart.events.schema import Event


@dataclass(slots=True)
class _Task:
    declared: str
    started: dict[str, int] = field(default_factory=dict)
    """Pool -> attempts that were to stay there."""
    calls: dict[str, int] = field(default_factory=dict)
    """Pool -> generate calls it served."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Reason -> calls that another pool served."""
    changes: list[dict[str, Any]] = field(default_factory=list)


class Explain:
    """Feed it every event of a run, in order; `result` may be asked for at any time."""

    def __init__(self) -> None:
        self._job: schema.Run | None = None
        self._tasks: dict[str, _Task] = {}
        self._look: schema.Affinity | None = None
        self._looks = 0
        self._task_of: dict[str, str] = {}
        """Attempt under way -> its task."""

    def read(self, event: Event) -> None:
        match event:
            case schema.Run():
                self._job = event
                self._tasks = {name: _Task(task.affinity) for name, task in event.tasks.items()}
            case schema.Affinity():
                self._on_affinity(event)
            case schema.Start():
                name = event.task.split("/", 1)[0]
                self._task_of[event.id] = name
                _count(self._tasks[name].started, event.pool)
            case schema.Send():
                task = self._tasks[self._task_of[event.id.rpartition("/")[0]]]
                _count(task.calls, event.pool)
                if event.fallback:
                    _count(task.fallbacks, f"{event.fallback}: {event.pool} served instead")
            case schema.End():
                self._task_of.pop(event.id, None)
            case schema.Killed():
                self._task_of.clear()

    def _on_affinity(self, event: schema.Affinity) -> None:
        first = not self._looks
        self._look = event
        self._looks += 1
        for name, task in self._tasks.items():
            if first or name in event.moves:
                task.changes.append({"t": event.t, "pools": event.plan[name], "reason": event.reason})

    def result(self) -> dict[str, Any]:
        """For each task: profile, pools, predictions, reason, changes, fallbacks."""
        job, look = self._job, self._look
        return {
            "name": job and job.name,
            "clock": job and job.clock,
            "looks": self._looks,
            "predicted_step_s": look.step_s if look else {},
            "engines": look.engines if look else {},
            "tasks": {
                name: {
                    "affinity": task.declared,
                    "pools": look.plan[name] if look else {},
                    "reason": self._reason(task),
                    "profile": to_builtins(look.profiles[name]) if look else {},
                    "predicted": to_builtins(look.predicted[name]) if look else {},
                    "last_look": look.reason if look else "",
                    "attempts": task.started,
                    "calls": task.calls,
                    "changes": task.changes,
                    "fallbacks": task.fallbacks,
                }
                for name, task in self._tasks.items()
            },
        }

    def _reason(self, task: _Task) -> str:
        if task.declared != "auto":
            return f"declared: {task.declared}"
        return task.changes[-1]["reason"] if task.changes else ""


def words(result: dict[str, Any]) -> str:
    """The same for people."""
    simulated = ", simulated" if result["clock"] == "virtual" else ""
    lines = [f"{result['name']}{simulated}: {result['looks']} looks at the assignment"]
    steps = ", ".join(f"{pool} {_seconds(value)}" for pool, value in result["predicted_step_s"].items())
    lines.append(f"predicted for a step, by pool: {steps}")
    for name, task in result["tasks"].items():
        profile = task["profile"]
        lines += ["", f"{name} -> {_shares(task['pools'])}   (affinity: {task['affinity']})"]
        lines.append(f"  why         {task['reason']}")
        if profile and profile["trajectories"]:
            hits = profile["cached_tokens"] / max(1.0, profile["prompt_tokens"])
            lines.append(
                f"  profile     {profile['turns']:.1f} turns, {profile['new_tokens']:,.0f} new prompt tokens, "
                f"{profile['decode_tokens']:,.0f} decoded, {hits:.0%} of prompts from the cache, "
                f"{profile['elsewhere_s']:.1f} s elsewhere ({profile['trajectories']} trajectories)"
            )
        else:
            lines.append("  profile     nothing measured")
        for pool, alone in task["predicted"].items():
            lines.append(
                f"  on {pool:<8} {_seconds(alone['trajectory_s'])} a trajectory, {_seconds(alone['step_s'])} a step, "
                "if the task were alone there"
            )
        lines.append(f"  last look   {task['last_look']}")
        lines.append(f"  attempts    {_counts(task['attempts'])}")
        for change in task["changes"]:
            lines.append(f"  t = {change['t']:>9,.1f} s  {_shares(change['pools'])}: {change['reason']}")
        for reason, count in task["fallbacks"].items():
            lines.append(f"  fallback    {count} calls: {reason}")
        if not task["fallbacks"]:
            lines.append("  fallback    none")
    return "\n".join(lines)


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def _shares(pools: dict[str, float]) -> str:
    return ", ".join(name if share == 1.0 else f"{name} {share:.0%}" for name, share in pools.items()) or "no pool yet"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"

"""The summary's books on held-out play. A part of `rollart.report.summary`, fed its `eval` events."""

from typing import Any

from rollart.events import schema


class Evaluations:
    def __init__(self) -> None:
        self.rows: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        """By name, task and play."""

    def read(self, event: schema.Eval) -> None:
        plays = self.rows.setdefault(event.name, {}).setdefault(event.task, {})
        plays[event.play] = {
            "episodes": event.episodes,
            "scored": event.scored,
            "reward": event.reward,
            "std": event.std,
            "rate": event.rate,
            "failed": event.failed,
            "reason": event.reason,
            "versions": event.versions,
        }

    def before_and_after(self) -> dict[str, Any]:
        """The first and the last evaluation of each task."""
        names = list(self.rows)
        if len(names) < 2:
            return {}
        first, last = self.rows[names[0]], self.rows[names[-1]]
        return {task: _change(first[task], plays) for task, plays in last.items() if task in first}


def _change(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """One task's held-out play in the first and the last evaluation: sampled, and beside it greedy where played."""
    rows = {
        play: {
            "before": first[play]["reward"],
            "after": last[play]["reward"],
            "rate": first[play]["rate"] and last[play]["rate"],
            "episodes": last[play]["episodes"],
            "scored": min(first[play]["scored"], last[play]["scored"]),
        }
        for play in last
        if play in first
    }
    return {**rows.pop("sampled", {}), **rows}

"""The summary's books on how long things took: steps, weights on their way, rewards. A part of `summary.py`."""

import statistics
from typing import Any

from rollart.events import schema
from rollart.events.metrics import Last, Metrics


class WeightTimes:
    """Of pushes, pulls and swaps."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._push_began: dict[int, float] = {}
        self._pushes: list[float] = []
        self._pulls: list[float] = []
        self._exposed: list[float] = []
        self._swap_began = 0.0
        self.in_flight = 0
        """Calls that went on over a swap."""

    def push(self, event: schema.Push) -> None:
        self._push_began[event.version] = event.t

    def pushed(self, event: schema.Pushed) -> None:
        began_s = self._push_began.pop(event.version, None)
        if began_s is not None:
            self._pushes.append(event.t - began_s)

    def swap_started(self, event: schema.SwapStart) -> None:
        self._swap_began = event.t

    def swap_ended(self, event: schema.SwapEnd) -> None:
        self._metrics.add("timing_s/swap", Last(event.t - self._swap_began))

    def engine_swapped(self, event: schema.EngineSwap) -> None:
        self._pulls.append(event.pull_s)
        self._exposed.append(event.exposed_s)
        self.in_flight += event.in_flight

    def row(self) -> dict[str, Any]:
        return {
            "push_s": _mean(self._pushes),
            "pull_s": _mean(self._pulls),
            "exposed_s": _mean(self._exposed),
            "swaps": len(self._exposed),
        }


class RewardTimes:
    def __init__(self) -> None:
        self._calls = self._failed = self._cold_starts = 0
        self._seconds = self._cold_start_s = 0.0

    def scored(self, event: schema.Reward) -> None:
        self._calls += 1
        self._seconds += event.busy_s or event.s - event.cold_s
        self._cold_starts += event.cold_s > 0
        self._cold_start_s += event.cold_s

    def failed(self) -> None:
        self._failed += 1

    def row(self, job: schema.Run | None, seconds: float) -> dict[str, Any]:
        workers = job and job.reward_workers
        return {
            "type": job and job.rewards,
            "calls": self._calls,
            "failed": self._failed,
            "mean_s": round(self._seconds / self._calls, 6) if self._calls else 0.0,
            "cold_starts": self._cold_starts,
            "cold_start_s": round(self._cold_start_s, 3),
            "utilisation": round(self._seconds / (seconds * workers), 4) if workers else None,
        }


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0}
    ordered = sorted(values)
    return {
        "mean": round(statistics.fmean(values), 4),
        "p50": round(statistics.median(values), 4),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 4),
    }


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0

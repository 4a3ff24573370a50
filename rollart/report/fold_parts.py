"""Parts of the summary's fold: what fails, each task's sums, held-out play, and how long swaps took.

Bounded: reasons are counted by cause (`rollart.causes`), and only the most frequent are listed.
"""

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from rollart.causes import Causes
from rollart.events import schema
from rollart.events.log import Fold
from rollart.events.metrics import Last, Metrics
from rollart.report import summary

FAILURES = ("engine", "answer", "trainer", "coordinator", "worker", "attempt", "draw", "reward", "sample")
MAX_REASONS = 5
"""Listed for each kind of failure."""


class Failures:
    """How often each kind of thing failed, and why."""

    def __init__(self) -> None:
        self._kinds = {kind: Causes() for kind in FAILURES}

    def add(self, kind: str, who: str, reason: str) -> None:
        self._kinds[kind].add(reason, reason if who in reason else f"{who}: {reason}")

    def rows(self) -> dict[str, summary.Failure]:
        return {
            kind: summary.Failure(count=causes.total, reasons=_reasons(causes)) for kind, causes in self._kinds.items()
        }


def _reasons(causes: Causes) -> list[str]:
    """The most frequent ones, each with its count."""
    return [f"{cause.times} x {cause.text}" for cause in causes.top(MAX_REASONS)]


@dataclass(slots=True)
class LengthSums:
    """Of some trajectories."""

    count: int = 0
    tokens: int = 0
    turns: int = 0

    def add(self, tokens: int, turns: int) -> None:
        self.count += 1
        self.tokens += tokens
        self.turns += turns

    @property
    def mean_tokens(self) -> float:
        return round(self.tokens / max(1, self.count), 1)

    @property
    def mean_turns(self) -> float:
        return round(self.turns / max(1, self.count), 2)


@dataclass(slots=True)
class TaskSums:
    """What is counted for one task. `turns`, `tokens`, `prefill` and `rewards` are sums over its scored attempts."""

    share: float
    pool: str = ""
    trajectories: int = 0
    turns: int = 0
    tokens: int = 0
    prefill: int = 0
    rewards: float = 0.0
    rewarded: int = 0
    cost: float = 0.0
    wasted_cost: float = 0.0
    causes: Causes = field(default_factory=Causes)
    """Of its failed attempts and draws."""
    failed_at: Counter[str] = field(default_factory=Counter)
    """The same, by stage and kind."""
    trained_lengths: LengthSums = field(default_factory=LengthSums)
    admitted_lengths: LengthSums = field(default_factory=LengthSums)
    stopped: int = 0
    with_gradient: int = 0
    state: str = "in"
    taken_out: int = 0
    probes: int = 0
    out_reason: str = ""

    def row(self, ends: Mapping[str, int], *, admitted: int, trained: int) -> summary.TaskSummary:
        """`ends`: how many of its groups ended how. `trained`: groups of all tasks."""
        count = max(1, self.rewarded)
        return summary.TaskSummary(
            pool=self.pool,
            share=round(self.share, 4),
            trained_share=round(ends["trained"] / trained, 4) if trained else 0.0,
            admitted=admitted,
            stale_share=round(ends["stale"] / admitted, 4) if admitted else 0.0,
            **ends,
            trajectories=self.trajectories,
            reward=round(self.rewards / count, 4),
            turns=round(self.turns / count, 2),
            sampled_tokens=round(self.tokens / count, 1),
            prefill_tokens=round(self.prefill / count, 1),
            with_gradient=self.with_gradient,
            state=self.state,
            taken_out=self.taken_out,
            probes=self.probes,
            out_reason=self.out_reason,
            lengths=summary.Lengths(
                trained_tokens=self.trained_lengths.mean_tokens,
                admitted_tokens=self.admitted_lengths.mean_tokens,
                trained_turns=self.trained_lengths.mean_turns,
                admitted_turns=self.admitted_lengths.mean_turns,
                admitted=self.admitted_lengths.count,
                stopped=self.stopped,
            ),
            failures=self.causes.total,
            failed_at=dict(self.failed_at.most_common()),
            reasons=_reasons(self.causes),
        )


class EvaluationFold(Fold):
    """Held-out play."""

    def __init__(self) -> None:
        self.plays: dict[str, summary.Plays] = {}
        super().__init__()

    def _on_eval(self, event: schema.Eval) -> None:
        tasks = self.plays.setdefault(event.name, {})
        tasks.setdefault(event.task, {})[event.play] = msgspec.convert(event, summary.Play, from_attributes=True)

    def progress(self) -> dict[str, summary.Progress]:
        """From the first to the last evaluation of each task."""
        if len(self.plays) < 2:
            return {}
        first, *_, last = self.plays.values()
        return {task: _progress(first[task], plays) for task, plays in last.items() if task in first}


def _progress(first: Mapping[str, summary.Play], last: Mapping[str, summary.Play]) -> summary.Progress:
    """One task: sampled play, with greedy play inside where there is any."""
    rows = {
        play: summary.Progress(
            before=first[play].reward,
            after=last[play].reward,
            rate=first[play].rate and last[play].rate,
            episodes=last[play].episodes,
            scored=min(first[play].scored, last[play].scored),
        )
        for play in last
        if play in first
    }
    return msgspec.structs.replace(rows["sampled"], greedy=rows.get("greedy", msgspec.UNSET))


class SwapFold(Fold):
    """How long each swap of all engines took."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._swap_began = 0.0
        super().__init__()

    def _on_swap_start(self, event: schema.SwapStart) -> None:
        self._swap_began = event.t

    def _on_swap_end(self, event: schema.SwapEnd) -> None:
        self._metrics.add("timing_s/swap", Last(event.t - self._swap_began))


def step_times(values: list[float]) -> summary.StepTimes:
    if not values:
        return summary.StepTimes()
    return summary.StepTimes(
        mean=round(statistics.fmean(values), 4),
        p50=round(statistics.median(values), 4),
        p95=round(sorted(values)[min(len(values) - 1, int(0.95 * len(values)))], 4),
    )

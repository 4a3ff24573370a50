"""What trajectories of a task need, measured as they end: a long average, begun anew when the task has changed.

A long average keeps noise from moving tasks about; alone it would follow a real change too late. So each window of the
newest trajectories is held against the average, and replaces it where the two differ by more than chance allows.

Groups start in waves, one a step, and the short trajectories of a wave end first. So both the window and the average
are of whole steps: a part of a step is of short ones or of long ones.
"""

import math
import statistics
from dataclasses import dataclass, fields

MEMORY = 256
"""Trajectories that the average is of, or `MEMORY_STEPS` steps' worth where that is more; the newest count most."""
MEMORY_STEPS = 4
WINDOW = 16
"""Trajectories that are held against the average together, or a step's worth where that is more."""
SURPRISE = 4.0
"""Standard errors by which a window must differ: once in sixteen thousand by chance."""
ENOUGH = 0.1
"""A change of less than this share is none, however certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProfile:
    """What one trajectory of a task needs, on average over those measured."""

    prompt_tokens: float
    """Of all its calls together: each turn's prompt is the whole history."""
    new_tokens: float
    """Of these, not part of an earlier call: what must be prefilled even with a perfect cache."""
    cached_tokens: float
    """Of these, found in a cache."""
    prefill_tokens: float
    """Prompt tokens that were computed where it ran, caches rebuilt after a swap included."""
    decode_tokens: float
    decode_squares: float
    """Mean of its square: how unlike each other trajectories are."""
    turns: float
    context_tokens: float
    """Held in the cache by one call, answer included, on average over its calls."""
    elsewhere_s: float
    """Seconds of its life outside the engines: environment, reward, their queues."""
    trajectories: int = 0
    """How many the average is of."""

    def straggle(self, members: int) -> float:
        """About how much longer the slowest of `members` takes than the mean trajectory, from the spread of tokens."""
        return 1.0 + self.decode_spread * math.sqrt(math.log(max(1, members)))

    @property
    def decode_spread(self) -> float:
        """Standard deviation of the tokens of a trajectory, as a share of their mean."""
        return math.sqrt(max(0.0, self.decode_squares / self.decode_tokens**2 - 1.0)) if self.decode_tokens else 0.0

    def seen(self, other: "TaskProfile", memory: float = MEMORY) -> "TaskProfile":
        """With one more trajectory; the first ones count evenly, each later one for one of `memory`."""
        weight = max(1.0 / memory, 1.0 / (self.trajectories + 1))

        def mixed(name: str) -> float:
            mine: float = getattr(self, name)
            its: float = getattr(other, name)
            return mine + weight * (its - mine)

        return TaskProfile(**{name: mixed(name) for name in MEANS}, trajectories=self.trajectories + 1)


MEANS = tuple(one.name for one in fields(TaskProfile) if one.name != "trajectories")

UNKNOWN = TaskProfile(
    prompt_tokens=3000.0,
    new_tokens=2000.0,
    cached_tokens=1000.0,
    prefill_tokens=2000.0,
    decode_tokens=1000.0,
    decode_squares=1.2e6,
    turns=3.0,
    context_tokens=2000.0,
    elsewhere_s=1.0,
)
"""Before anything was measured."""


class Meter:
    """Measures one task."""

    def __init__(self, step: float = 1.0) -> None:
        """`step`: trajectories of the task in a step."""
        self._memory = max(MEMORY, MEMORY_STEPS * step)
        self._size = max(WINDOW, math.ceil(step))
        self.profile = UNKNOWN
        self._window: list[TaskProfile] = []
        self._logs: dict[str, tuple[float, float]] = {}
        """Of the average: mean and variance of the logarithm, by what is compared."""

    def add(self, needed: TaskProfile) -> bool:
        """One trajectory ended. True when the task turns out to have changed."""
        self._window.append(needed)
        changed = len(self._window) == self._size and self._surprising()
        if changed:
            self.profile, self._logs = UNKNOWN, {}
            for one in self._window:
                self._count(one)
        else:
            self._count(needed)
        if len(self._window) == self._size:
            self._window = []
        return changed

    def _count(self, needed: TaskProfile) -> None:
        weight = max(1.0 / self._memory, 1.0 / (self.profile.trajectories + 1))
        for name, value in _compared(needed).items():
            mean, variance = self._logs.get(name, (value, 0.0))
            off = value - mean
            self._logs[name] = (mean + weight * off, (1.0 - weight) * (variance + weight * off * off))
        self.profile = self.profile.seen(needed, self._memory)

    def _surprising(self) -> bool:
        if self.profile.trajectories < 2 * self._size:
            return False
        for name, (mean, variance) in self._logs.items():
            values = [_compared(one)[name] for one in self._window]
            spread = max(variance, statistics.pvariance(values)) / self._size
            if abs(statistics.fmean(values) - mean) > max(ENOUGH, SURPRISE * math.sqrt(spread)):
                return True
        return False


def _compared(one: TaskProfile) -> dict[str, float]:
    """What shows that a task has changed, as logarithms: token counts have long tails."""
    return {
        "new_tokens": math.log(max(1.0, one.new_tokens)),
        "decode_tokens": math.log(max(1.0, one.decode_tokens)),
        "turns": math.log(max(1.0, one.turns)),
    }

"""How the chance of success rises in a run, from its rewards: success + gain x (1 - e^(-version / steps)).

Least squares over the groups of a task, as members of one have a problem in common. A rise that chance may have made is
none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SURE = 12.0
"""Variance that the curve explains for each of its two further numbers, by what is left for each group: an F of this
size is chance once in ten thousand runs or less."""
FEWEST = 12
"""Groups that a curve needs."""
TRIED = 60
LONGEST = 5.0
"""Curves that take longer than this many times the run are not told apart by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The keys of `sim.tasks` that have these names."""

    success: float
    success_gain: float = 0.0
    success_steps: float | None = None
    """None where nothing rises."""
    last: int = 0
    """The newest version that was seen: what the curve says beyond is not measured."""

    def at(self, version: float) -> float:
        if self.success_steps is None:
            return self.success
        return self.success - self.success_gain * math.expm1(-version / self.success_steps)


def fit_curve(groups: Sequence[tuple[int, float]]) -> Curve:
    """`groups`: version that began it, and mean reward."""
    versions: Array = np.array([version for version, _ in groups], dtype=np.float64)
    rewards: Array = np.clip(np.array([reward for _, reward in groups], dtype=np.float64), 0.0, 1.0)
    flat = Curve(success=float(rewards.mean()), last=int(versions.max()))
    span = float(versions.max())
    if len(groups) < FEWEST or span <= float(versions.min()):
        return flat
    found, least = flat, float(np.square(rewards - flat.success).sum())
    spread = least
    for steps in np.geomspace(max(1.0, span / 50), LONGEST * span, TRIED):
        risen = -np.expm1(-versions / steps)
        gain, success = np.polyfit(risen, rewards, 1)
        success = min(1.0, max(0.0, float(success)))
        gain = min(1.0 - success, max(0.0, float(gain)))
        left = float(np.square(rewards - success - gain * risen).sum())
        if left < least:
            least = left
            found = Curve(success=success, success_gain=gain, success_steps=float(steps), last=flat.last)
    surely = (spread - least) / 2 > SURE * max(least, 1e-12) / (len(groups) - 3)
    return found if surely else flat

"""How fast a pool's engines are beside what the tables of `rollart.hardware` say: two factors, learnt from steps.

An engine tells what its steps had in them and how long they took. Steps in which nobody's prompt is computed give the
factor of decoding; what other steps take beyond their decoding gives that of prefill. Each window of steps is one
ratio, and the median of the newest windows is the factor: kernels that compile, or a process that took the device for a
moment, do not move it.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.hardware import EngineCosts, Learnt
from rollart.types import EngineWork, StepSums

WINDOW_STEPS = 64.0
"""Steps without prompts that make one window."""
WINDOW_TOKENS = 1024.0
"""Prompt tokens that make one window: so a long prompt counts more than a short one."""
WINDOWS = 32
"""That the median is of."""
ENOUGH = 8
"""Windows before a factor is believed."""
LIMIT = 30.0
"""No factor is beyond this, either way: then something else is wrong than a table."""
NEWS = 0.2
"""A factor that has moved by this share since it was last taken is worth a look at the assignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One of the two: what the table says of the work that was seen, what it took, and what follows."""

    table_s: float
    """Of one decode step, or of one prompt token, at the batch and context that were met."""
    measured_s: float
    factor: float
    """Median of the windows. It is used from `ENOUGH` of them on."""
    units: float
    """Steps, or prompt tokens, since the beginning."""
    windows: int

    @property
    def believed(self) -> bool:
        return self.windows >= ENOUGH


@dataclass(slots=True)
class _Windows:
    """The newest windows of one kind, and the one that is being filled."""

    size: float
    kept: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    """(units, seconds by the table, seconds measured)"""
    units: float = 0.0
    seen: int = 0
    open_units: float = 0.0
    open_table_s: float = 0.0
    open_measured_s: float = 0.0

    def add(self, units: float, table_s: float, measured_s: float) -> None:
        self.units += units
        self.open_units += units
        self.open_table_s += table_s
        self.open_measured_s += measured_s
        if self.open_units >= self.size:
            self.kept.append((self.open_units, self.open_table_s, self.open_measured_s))
            self.seen += 1
            self.open_units = self.open_table_s = self.open_measured_s = 0.0

    @property
    def rate(self) -> Rate | None:
        if not self.kept:
            return None
        units, table_s, measured_s = (sum(column) for column in zip(*self.kept, strict=True))
        ratios = [min(LIMIT, max(1.0 / LIMIT, took_s / says_s)) for _, says_s, took_s in self.kept]
        return Rate(
            table_s=table_s / units,
            measured_s=measured_s / units,
            factor=statistics.median(ratios),
            units=self.units,
            windows=self.seen,
        )


class Gauge:
    """Measures the engines of one pool."""

    def __init__(self) -> None:
        self._decode = _Windows(WINDOW_STEPS)
        self._prefill = _Windows(WINDOW_TOKENS)

    @property
    def decode(self) -> Rate | None:
        return self._decode.rate

    @property
    def prefill(self) -> Rate | None:
        return self._prefill.rate

    def add(self, before: EngineWork | None, now: EngineWork, costs: EngineCosts, prefill_costs: EngineCosts) -> None:
        """What one engine did between two of its reports, beside what the tables say of it."""
        decode, mixed, prefill = _between(before, now)
        if not _sensible(decode) or not _sensible(mixed) or not _sensible(prefill):
            return
        if decode.steps:
            says_s = decode.steps * costs.step_s(decode.sequences / decode.steps, decode.cached / decode.steps)
            self._decode.add(decode.steps, says_s, decode.seconds)
        if mixed.steps:
            self._mixed(mixed, costs)
        if prefill.steps:
            self._prefill.add(prefill.tokens, prefill.steps * _mean_step_s(prefill, prefill_costs), prefill.seconds)

    def _mixed(self, sums: StepSums, costs: EngineCosts) -> None:
        """What those who decode are known to take is not the prompts'. Until it is known, both are taken to be as far
        from the table as the whole step is."""
        whole_s = sums.steps * _mean_step_s(sums, costs)
        decode_s = sums.steps * costs.step_s(sums.sequences / sums.steps, sums.cached / sums.steps)
        known = self.decode
        ratio = known.factor if known is not None else sums.seconds / whole_s
        self._prefill.add(sums.tokens, whole_s - decode_s, max(0.0, sums.seconds - ratio * decode_s))

    @property
    def factors(self) -> tuple[float | None, float | None]:
        """Of prefill and of decode; None while too little was seen. Where every step had prompts in it, decoding is as
        far from the table as these."""
        prefill, decode = self.prefill, self.decode
        computed = prefill.factor if prefill is not None and prefill.believed else None
        if decode is None:
            return computed, computed
        return computed, decode.factor if decode.believed else None


def learnt(gauges: Mapping[str, Gauge]) -> dict[str, Learnt]:
    """What predictions use, by pool. A pool of which too little was seen is taken to be as far from its table as the
    others are: the table is often wrong for all of them alike, and who was measured first must not look slow for it."""
    found = {pool: gauge.factors for pool, gauge in gauges.items()}
    prefill, decode = (_middle([factors[kind] for factors in found.values()]) for kind in range(2))
    return {pool: Learnt(prefill=own[0] or prefill, decode=own[1] or decode) for pool, own in found.items()}


def _middle(factors: Sequence[float | None]) -> float:
    """Geometric mean of those that are known; the table where none is."""
    return statistics.geometric_mean([factor for factor in factors if factor is not None] or [1.0])


def is_news(pool: str, taken: Learnt, found: Learnt) -> str:
    """What has moved by enough to be worth a look, in words; empty where nothing has."""
    moved = [
        f"{now:.2f} times the table's seconds in {kind}"
        for kind, now, before in (("prefill", found.prefill, taken.prefill), ("decode", found.decode, taken.decode))
        if abs(math.log(now / before)) > math.log1p(NEWS)
    ]
    return f"{pool} is measured to take {' and '.join(moved)}" if moved else ""


def _mean_step_s(sums: StepSums, costs: EngineCosts) -> float:
    steps = sums.steps
    seen = sums.pairs / sums.tokens
    return costs.step_s(sums.sequences / steps, sums.cached / steps, sums.tokens / steps, seen, sums.prompts / steps)


def _between(before: EngineWork | None, now: EngineWork) -> EngineWork:
    if before is None:
        return now
    parts = zip(before, now, strict=True)
    return EngineWork(*(StepSums(*(b - a for a, b in zip(old, new, strict=True))) for old, new in parts))


def _sensible(sums: StepSums) -> bool:
    """Not of an engine that counts wrongly, nor of one that was started anew."""
    whole = all(math.isfinite(value) and value >= 0.0 for value in sums)
    return whole and (sums.seconds > 0.0 or not sums.steps) and (sums.tokens > 0.0 or not sums.prompts)

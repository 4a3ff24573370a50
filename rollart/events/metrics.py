"""Metric values that know how to reduce, collected by name between two rows of `metrics.jsonl`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    total: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class Max:
    value: float


@dataclass(frozen=True, slots=True)
class Sum:
    value: float


@dataclass(frozen=True, slots=True)
class Last:
    value: float


Metric = Mean | Max | Sum | Last


def reduce(before: Metric, after: Metric) -> Metric:
    """Combine two values of one metric; both must be of one kind."""
    match before, after:
        case Mean(), Mean():
            return Mean(before.total + after.total, before.count + after.count)
        case Max(), Max():
            return Max(max(before.value, after.value))
        case Sum(), Sum():
            return Sum(before.value + after.value)
        case Last(), Last():
            return after
    raise TypeError(f"one metric, two kinds: {before!r} and {after!r}")


class Metrics:
    """Metric values since the last `row`, by name: `reward/mean`, `staleness/max`, ..."""

    def __init__(self) -> None:
        self._values: dict[str, Metric] = {}

    def add(self, name: str, value: Metric) -> None:
        before = self._values.get(name)
        self._values[name] = value if before is None else reduce(before, value)

    def row(self) -> Mapping[str, float]:
        """The reduced values, sorted by name. Starts over."""
        row: dict[str, float] = {}
        for name in sorted(self._values):
            value = self._values[name]
            row[name] = value.total / value.count if isinstance(value, Mean) else value.value
        self._values.clear()
        return row

"""What the cost model says of steps on one core, and which of a core's figures explain measured ones best.

Knows no torch: `benchmarks.anchors` compares with what `benchmarks.cpu_steps` has measured.
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.engine_workload import STEP_TOKENS
from rollart.hardware import Hardware, ModelShape, Runtime, engine_costs

ANSWER = 48
"""Tokens that each sequence of a batch decodes; the steps of the second half count."""
CORNERS = {
    "decode": {(1, 128), (1, 1536), (16, 128), (16, 1536), (48, 128), (48, 512)},
    "prefill": {(1, 256), (1, 1900), (8, 1024)},
}
"""What the model is fitted on: the least and the most, and the batch for which reading the weights takes as long as
multiplying. All between is predicted."""
STARTS, GUESSES = 8, 4000
"""Of the search for shares and overheads: where it begins anew, and points that it tries, each near the best so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something an engine was asked for."""

    kind: str
    """decode or prefill"""
    count: int
    tokens: int
    """Context, or length of each prompt."""

    @property
    def fitted(self) -> bool:
        return (self.count, self.tokens) in CORNERS[self.kind]

    @property
    def what(self) -> str:
        return f"{self.kind} {self.count} x {self.tokens:,}"


def predicted_s(case: Case, shape: ModelShape, core: Hardware, runtime: Runtime) -> float:
    costs = engine_costs(shape, core, 1, runtime)
    if case.kind == "decode":
        return costs.step_s(case.count, case.count * (case.tokens + 0.75 * ANSWER))
    total = case.count * case.tokens
    steps = math.ceil(total / STEP_TOKENS)
    each = total / steps
    return steps * costs.step_s(0, 0, each, case.tokens / 2, case.count / steps)


def made(values: Mapping[str, float], peak: Mapping[str, float]) -> tuple[Hardware, Runtime]:
    core = Hardware(
        name="core",
        tflops=peak["tflops"],
        memory_gb=8,
        bandwidth_gb_s=peak["copy_gb_s"],
        cost=1.0,
        matmul=values["matmul"],
        attention=values["attention"],
        read=values["read"],
        read_kv=values["read_kv"],
    )
    return core, Runtime(step_s=values["step_s"], layer_s=values["layer_s"], sequence_s=values["sequence_s"])


def fit(rows: Sequence[tuple[Case, float]], shape: ModelShape, peak: Mapping[str, float]) -> dict[str, float]:
    """The values whose predictions of these rows are furthest off by least: a search that draws near its best."""

    def worst(values: Mapping[str, float]) -> float:
        core, runtime = made(values, peak)
        off = [abs(math.log(predicted_s(case, shape, core, runtime) / taken_s)) for case, taken_s in rows]
        return max(off) + statistics.fmean(off)

    rng = random.Random(0)
    first = {"matmul": 0.7, "attention": 0.5, "read": 0.7, "read_kv": 0.5}
    first |= {"step_s": 2e-4, "layer_s": 1e-4, "sequence_s": 2e-5}
    found: list[tuple[float, dict[str, float]]] = []
    for _ in range(STARTS):
        best = _moved(first, 1.0, rng)
        least = worst(best)
        for number in range(GUESSES):
            tried = _moved(best, 0.5 * 0.999**number + 0.01, rng)
            if (off := worst(tried)) < least:
                best, least = tried, off
        found.append((least, best))
    return {name: float(f"{value:.4g}") for name, value in min(found, key=lambda one: one[0])[1].items()}


def _moved(values: Mapping[str, float], width: float, rng: random.Random) -> dict[str, float]:
    moved = {name: value * math.exp(rng.gauss(0.0, width)) for name, value in values.items()}
    return moved | {name: min(1.0, moved[name]) for name in ("read", "read_kv")}

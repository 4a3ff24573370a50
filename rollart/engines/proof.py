"""Whether a server serves the weights it was told to load, judged by its log-probabilities of the manifest's probe.

Pure: numbers in, a verdict out. Two questions, since each alone misses something:
- Are they the trainer's? Other weights are far off: the mean square of the differences says so at once. But a server
  in bfloat16 is off by its own rounding, by more than one step of training moves anything.
- Did they move as the trainer's did? Rounding hides a step in one token, not in two thousand. So the change of the
  server's answer since its last swap is held against the change of the trainer's. A server that loaded nothing, or half
  of it, has moved by less than half. What speaks for that is added up over swaps, as in a sequential test (CUSUM): it
  falls to 0 with each swap that clearly took place. The trainer's answer is computed in float32, also where it trains
  in bfloat16: rounding of its own would drown the direction of a step.

A step that moves nothing says nothing, and raises no doubt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollart.types import WeightVersion

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How far a server of one number format may be from the trainer. Root mean squares over the probe's tokens."""

    noise: float
    """What its rounding does. A smaller one is not believed: changes below it may not show in the server at all."""
    limit: float
    """Beyond this it serves other weights."""


PRECISIONS = {
    "float32": Precision(noise=1e-4, limit=1e-2),
    "bfloat16": Precision(noise=0.025, limit=0.25),
}
"""`benchmarks/probe_noise.py` measures the noise; docs/vllm.md has the figures."""
EFFECTIVE_SHARE = 0.5
"""Errors of neighbouring tokens are alike: this many of them count as independent."""
ALARM = 14.0
"""Doubt at which a server is said not to have loaded. With an honest one it gets there once in e^14 swaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """What is known of a server since its last swap."""

    answer: Values
    """Its own log-probabilities."""
    expected: Values
    """The trainer's."""
    sure: WeightVersion
    """The newest version that it surely served."""
    doubt: float = 0.0
    """Log-likelihood ratio of "it moves by half of what it should" against "it moves as it should", never below 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    off: float
    """Root mean square of its differences from the trainer; infinite where they cannot be compared."""
    wrong: bool
    """It serves other weights."""
    stuck: bool
    """It does not follow the weights it is told to load; it may still serve those of `state.sure`."""
    state: Proven


def judge(
    version: WeightVersion,
    answer: Sequence[float],
    expected: Sequence[float],
    before: Proven | None,
    precision: Precision,
) -> ProofResult:
    """`answer` is the server's, `expected` the trainer's for `version`; `before` is the state after its last swap."""
    ours, theirs = np.asarray(expected, dtype=np.float64), np.asarray(answer, dtype=np.float64)
    comparable = ours.shape == theirs.shape and len(ours) > 0 and bool(np.isfinite(theirs).all())
    off = _rms(theirs - ours) if comparable else float("inf")
    doubt = 0.0
    if comparable and before is not None and before.expected.shape == ours.shape:
        found = _evidence(theirs - before.answer, ours - before.expected, precision.noise)
        doubt = max(0.0, before.doubt + found)
    sure = version if before is None or not doubt else before.sure
    return ProofResult(
        off=off,
        wrong=not off <= precision.limit,
        stuck=doubt > ALARM,
        state=Proven(answer=theirs, expected=ours, sure=sure, doubt=doubt),
    )


def _evidence(moved: Values, should: Values, noise: float) -> float:
    """That it moved by half of what it should, or less: positive for, negative against."""
    variance = max(_rms(moved - should), noise) ** 2
    return float(EFFECTIVE_SHARE * (0.375 * (should @ should) - 0.5 * (moved @ should)) / variance)


def _rms(values: Values) -> float:
    return float(np.sqrt(np.mean(values * values)))

"""What an engine's step costs, from when calls were sent and answered: a linear model by least squares.

One step takes `step_s` + `sequence_s` for each sequence in it + `kv_token_s` for each cached token of these +
`prefill_token_s` for each prompt token computed in it; a call takes as many steps as it has tokens, and `call_s` on the way.
Which calls were in the engine together is known from their times, so each call is one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FAR = 4.0
"""Calls whose error is more than so many times the typical one are left out of a second fit."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One generate call as the coordinator saw it."""

    engine: str
    pool: str
    sent_s: float
    said_s: float = 0.0
    tokens: int = 0
    prefill: int = 0
    prompt: int = 0
    whole: bool = False
    """Answered in full, under one version of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    call_s: float
    step_s: float
    sequence_s: float
    kv_token_s: float
    prefill_token_s: float
    calls: int
    error: float
    """Median of |predicted - measured| / measured, over the calls."""


def fit_steps(calls: Sequence[Call]) -> StepCosts:
    """`calls` of engines of one kind."""
    rows, seconds = _rows(calls)
    weights = _not_negative(rows, seconds)
    error = np.abs(rows @ weights - seconds)
    near = error <= FAR * max(float(np.median(error)), 1e-9)
    weights = _not_negative(rows[near], seconds[near])
    relative = np.abs(rows @ weights - seconds) / np.maximum(seconds, 1e-9)
    call_s, step_s, sequence_s, kv_token_s, prefill_token_s = (float(weight) for weight in weights)
    if step_s + sequence_s <= 0:  # too few calls to tell: all of a call's time is in its steps
        step_s = float(np.sum(seconds) / np.sum(rows[:, 1]))
    return StepCosts(
        call_s=call_s,
        step_s=step_s,
        sequence_s=sequence_s,
        kv_token_s=kv_token_s,
        prefill_token_s=prefill_token_s,
        calls=len(seconds),
        error=float(np.median(relative)),
    )


def _rows(calls: Sequence[Call]) -> tuple[Array, Array]:
    """For each whole call: [1, tokens, tokens x sequences beside it, tokens x their cached tokens, prompt tokens
    computed while it was there], and its seconds."""
    rows: list[list[float]] = []
    seconds: list[float] = []
    for engine in dict.fromkeys(call.engine for call in calls):
        own = [call for call in calls if call.engine == engine]
        sent = np.array([call.sent_s for call in own])
        said = np.array([call.said_s for call in own])
        context = np.array([call.prompt + call.tokens / 2 for call in own], dtype=np.float64)
        prefill = np.array([call.prefill for call in own], dtype=np.float64)
        for call in own:
            length_s = call.said_s - call.sent_s
            if not call.whole or length_s <= 0:
                continue
            beside = np.clip(np.minimum(said, call.said_s) - np.maximum(sent, call.sent_s), 0.0, None) / length_s
            came = (sent >= call.sent_s) & (sent < call.said_s)
            rows.append(
                [
                    1.0,
                    call.tokens,
                    call.tokens * float(beside.sum()),
                    call.tokens * float(beside @ context),
                    float(prefill[came].sum()),
                ]
            )
            seconds.append(length_s)
    return np.array(rows, dtype=np.float64).reshape(-1, 5), np.array(seconds, dtype=np.float64)


def _not_negative(rows: Array, seconds: Array) -> Array:
    """Least squares with no negative weight: the most negative one is left out until there is none."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    left = list(range(rows.shape[1]))
    weights = np.zeros(rows.shape[1])
    while left:
        found = np.linalg.lstsq(rows[:, left] / scale[left], seconds, rcond=None)[0]
        if (found >= 0).all():
            weights[left] = found / scale[left]
            break
        del left[int(np.argmin(found))]
    return weights

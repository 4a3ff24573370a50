"""From the rewards of a group to advantages. Called by the buffer; `train/samples.py` flattens what is trained on."""

from collections.abc import Sequence

import numpy as np

SAME = 1e-8
"""Rewards closer than this are the same reward."""


def advantages(rewards: Sequence[float], kind: str) -> tuple[float, ...]:
    """One advantage per member: `grpo` (normalised), `dr_grpo` (centred) or `rloo` (against the others' mean)."""
    if zero_variance(rewards):
        return (0.0,) * len(rewards)  # not what rounding leaves of them
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    match kind:
        case "grpo":
            result = centred / (values.std() + 1e-6)
        case "dr_grpo":
            result = centred
        case "rloo":
            result = centred * (len(values) / (len(values) - 1))
        case _:
            raise AssertionError(f"unknown advantage {kind}")
    return tuple(float(value) for value in result)


def zero_variance(rewards: Sequence[float]) -> bool:
    """Nothing to learn: all members earned the same."""
    return max(rewards) - min(rewards) <= SAME

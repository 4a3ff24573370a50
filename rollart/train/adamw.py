"""AdamW for one tensor at a time, whose state may be coarser than float32, or elsewhere.

Owns: how moments and weights are rounded to bfloat16. That is at random, up or down in proportion to what is nearer:
rounding to the nearest would lose every update that is smaller than half the last place, and most updates of
reinforcement learning are, as are nearly all changes of the second moment. What is drawn follows from the step, the
tensor and the element alone, so that a step done again gives the same bits. Called by the optimizer.
"""

import math

import torch
from torch import Tensor

BETA1, BETA2 = 0.9, 0.999
LOW_BITS = 16
"""What float32 has beyond bfloat16."""


def factors(step: int, *, lr: float, weight_decay: float, eps: float, clip: float) -> Tensor:
    """(5,) what all tensors of an update are computed with: as a tensor, so that compiled code is the same for all
    steps. `step` counts from 1; `clip` is what gradients are multiplied with."""
    undone = math.sqrt(1 - BETA2**step)
    values = [1 - lr * weight_decay, lr / (1 - BETA1**step), 1 / undone, eps, clip]
    return torch.tensor(values, dtype=torch.float32)


def adamw_(
    weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, factors: Tensor, seed: Tensor, copy: Tensor
) -> None:
    """One update in place, of flat tensors. `weight` is the master, float32, or the network's own bfloat16; `copy` is
    what the network computes with, and gets the weight rounded to the nearest (or is `weight` itself)."""
    keep, rate, correct, eps, clip = factors[0], factors[1], factors[2], factors[3], factors[4]
    slope = grad.float() * clip
    first = exp_avg.float()
    first = first + (slope - first) * (1 - BETA1)
    second = exp_avg_sq.float() * BETA2 + slope * slope * (1 - BETA2)
    moved = weight.float() * keep - rate * first / (second.sqrt() * correct + eps)
    one, other = _noise(len(weight), seed, weight.device), _noise(len(weight), seed + 1, weight.device)
    exp_avg.copy_(_rounded(first, exp_avg.dtype, one & 0xFFFF))
    exp_avg_sq.copy_(_rounded(second, exp_avg_sq.dtype, (one >> LOW_BITS) & 0xFFFF))
    weight.copy_(_rounded(moved, weight.dtype, other & 0xFFFF))
    if copy is not weight:
        copy.copy_(moved)


def _rounded(value: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """To bfloat16 at random; to float32 not at all."""
    if dtype != torch.bfloat16:
        return value
    bits = (value.view(torch.int32) + noise) & -(1 << LOW_BITS)
    return bits.view(torch.float32).to(torch.bfloat16)


def _noise(count: int, seed: Tensor, device: torch.device) -> Tensor:
    """(count,) int32, every bit of which is a coin toss: a hash of the element's number and the seed (int32)."""
    hashed = torch.arange(count, dtype=torch.int32, device=device) ^ (seed * -1640531527)
    hashed = (hashed ^ ((hashed >> 16) & 0xFFFF)) * 2146121005
    hashed = (hashed ^ ((hashed >> 15) & 0x1FFFF)) * -2073254261
    return hashed ^ ((hashed >> 16) & 0xFFFF)

"""AdamW for one tensor at a time, whose state may be coarser than float32, or elsewhere.

Owns: how float32 is kept in 16-bit types. A float32 master of a bfloat16 weight is that weight and 16 more bits beside
it (`low`), whose sum, as integers, is the master's bits: exact, in 2 bytes more than the weight itself. Moments and
weights that are kept in bfloat16 alone are rounded at random, up or down in proportion to what is nearer: rounding to
the nearest would lose every update that is smaller than half the last place, and most updates of reinforcement
learning are, as are nearly all changes of the second moment. What is drawn follows from the step, the tensor and the
element alone, so that a step done again gives the same bits. Called by the optimizer.
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
    weight: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    factors: Tensor,
    seed: Tensor,
) -> None:
    """One update in place, of flat tensors. `weight` is the network's own; `low` (int16) is what its master has beside
    it, or None: then it is float32, or bfloat16 without a master."""
    keep, rate, correct, eps, clip = factors[0], factors[1], factors[2], factors[3], factors[4]
    slope = grad.float() * clip
    first = exp_avg.float()
    first = first + (slope - first) * (1 - BETA1)
    second = exp_avg_sq.float() * BETA2 + slope * slope * (1 - BETA2)
    master = weight.float() if low is None else joined(weight, low)
    moved = master * keep - rate * first / (second.sqrt() * correct + eps)
    bits = noise(len(weight), seed, weight.device)
    exp_avg.copy_(rounded(first, exp_avg.dtype, bits & 0xFFFF))
    exp_avg_sq.copy_(rounded(second, exp_avg_sq.dtype, (bits >> LOW_BITS) & 0xFFFF))
    if low is not None:
        high, rest = split(moved)
        weight.copy_(high)
        low.copy_(rest)
    elif weight.dtype == torch.bfloat16:
        weight.copy_(rounded(moved, weight.dtype, noise(len(weight), seed + 1, weight.device) & 0xFFFF))
    else:
        weight.copy_(moved)


def joined(weight: Tensor, low: Tensor) -> Tensor:
    """The float32 of a bfloat16 and what it lacks."""
    return ((weight.view(torch.int16).to(torch.int32) << LOW_BITS) + low.to(torch.int32)).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16 to a float32, and what that lacks (int16)."""
    bits = master.view(torch.int32)
    high = (bits + (1 << (LOW_BITS - 1))) >> LOW_BITS
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << LOW_BITS)).to(torch.int16)


def rounded(value: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """To bfloat16 at random; to float32 not at all."""
    if dtype != torch.bfloat16:
        return value
    bits = (value.view(torch.int32) + noise) & -(1 << LOW_BITS)
    return bits.view(torch.float32).to(torch.bfloat16)


def noise(count: int, seed: Tensor, device: torch.device) -> Tensor:
    """(count,) int32, every bit of which is a coin toss: a hash of the element's number and the seed (int32)."""
    hashed = torch.arange(count, dtype=torch.int32, device=device) ^ (seed * -1640531527)
    hashed = (hashed ^ ((hashed >> 16) & 0xFFFF)) * 2146121005
    hashed = (hashed ^ ((hashed >> 15) & 0x1FFFF)) * -2073254261
    return hashed ^ ((hashed >> 16) & 0xFFFF)

"""From hidden states to log-probabilities and entropies: the vocabulary projection, some rows at a time.

Logits of a whole micro-batch would be the largest tensor of a step by far, so they exist in chunks. On a CPU the
backward pass computes each chunk again. On a GPU logits are kept for it, in the network's own type, while they take a
small share of its memory; chunks are larger there, and what is done to each element is compiled into two kernels.

Shapes in names: S scored tokens, V vocabulary, H hidden.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.model.compiled import compiled_on_cuda

LOGITS_PER_CHUNK = 1 << 22
"""On a CPU: elements of one (rows, V) block of logits. Bounds what scoring a packed batch holds in memory at once."""
CHUNK_SHARE = 1 / 128
"""On a GPU: the share of its memory that one block of logits would take in float32. Some 2,000 rows of 150,000 on a
card of 140 GB; with 30 rows the same takes eight times as long."""
KEPT_SHARE = 1 / 24
"""On a GPU: the share of its memory that logits kept for the backward pass may take."""


class _Cut(NamedTuple):
    """How the vocabulary projection of some tokens is cut."""

    rows: int
    """Of one chunk."""
    keep: bool
    """Its logits, for the backward pass."""


def _cut(hidden_SH: Tensor, vocab_size: int) -> _Cut:
    if hidden_SH.device.type != "cuda":
        return _Cut(max(1, LOGITS_PER_CHUNK // vocab_size), keep=False)
    total_bytes = _memory_bytes(hidden_SH.device)
    logits_bytes = len(hidden_SH) * vocab_size * hidden_SH.element_size()
    rows = int(total_bytes * CHUNK_SHARE) // (4 * vocab_size)
    return _Cut(max(64, rows), keep=torch.is_grad_enabled() and logits_bytes <= total_bytes * KEPT_SHARE)


@functools.cache
def _memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def score(
    hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chosen_S: Tensor, inverse_temperature: float
) -> tuple[Tensor, Tensor]:
    """The log-probability of each chosen token, and the entropy of the distribution it was drawn from."""
    rows, keep = _cut(hidden_SH, len(weight_VH))
    if hidden_SH.device.type != "cuda" and len(hidden_SH) <= rows:
        return _at_once(hidden_SH, weight_VH, bias_V, chosen_S, inverse_temperature)
    logprobs_S, entropy_S = _in_chunks(hidden_SH, weight_VH, bias_V, chosen_S, inverse_temperature, rows, keep)
    return logprobs_S, entropy_S


def _at_once(
    hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chosen_S: Tensor, inverse_temperature: float
) -> tuple[Tensor, Tensor]:
    """As autograd does it: the quickest where all of it fits a CPU's cache."""
    logits_SV = F.linear(hidden_SH, weight_VH, bias_V).float() * inverse_temperature
    logprobs_SV = F.log_softmax(logits_SV, dim=-1)
    entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
    return logprobs_SV.gather(1, chosen_S[:, None])[:, 0], entropy_S


def _measure(logits_SV: Tensor, chosen_S: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the chosen, entropy, and the logarithm of the sum that the former were divided by."""
    scaled_SV = logits_SV.float() * inverse_temperature
    logsums_S = scaled_SV.logsumexp(-1)
    logprobs_SV = scaled_SV - logsums_S[:, None]
    entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
    return logprobs_SV.gather(1, chosen_S[:, None])[:, 0], entropy_S, logsums_S


def _slope(
    logits_SV: Tensor,
    chosen_S: Tensor,
    entropy_S: Tensor,
    logsums_S: Tensor,
    logprobs_grad_S: Tensor,
    entropy_grad_S: Tensor,
    inverse_temperature: float,
) -> Tensor:
    """The gradient of the logits, in their type."""
    logprobs_SV = logits_SV.float() * inverse_temperature - logsums_S[:, None]
    chosen_SV = torch.arange(logits_SV.shape[1], device=logits_SV.device) == chosen_S[:, None]
    by_logprob_SV = chosen_SV.float() * logprobs_grad_S[:, None]
    shares_SV = logprobs_grad_S[:, None] + entropy_grad_S[:, None] * (logprobs_SV + entropy_S[:, None])
    return ((by_logprob_SV - logprobs_SV.exp() * shares_SV) * inverse_temperature).to(logits_SV.dtype)


class _InChunks(torch.autograd.Function):
    """Some rows at a time. The backward pass adds up the head's gradients in float32: autograd would add them up in
    the head's own type, and in bfloat16 round late chunks away."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        chosen_S: Tensor,
        inverse_temperature: float,
        rows: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        measure = compiled_on_cuda(_measure, hidden_SH.device)
        kept: list[Tensor] = []
        pieces: list[tuple[Tensor, Tensor, Tensor]] = []
        for hidden, chosen in zip(torch.split(hidden_SH, rows), torch.split(chosen_S, rows), strict=True):
            logits = F.linear(hidden, weight_VH, bias_V)
            pieces.append(measure(logits, chosen, inverse_temperature))
            if keep:
                kept.append(logits)
        logprobs_S, entropy_S, logsums_S = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden_SH, weight_VH, bias_V, chosen_S, entropy_S, logsums_S)
        ctx.kept, ctx.inverse_temperature, ctx.rows = kept, inverse_temperature, rows
        return logprobs_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *grads_S: Tensor) -> tuple[Tensor | None, ...]:
        hidden_SH, weight_VH, bias_V, chosen_S, entropy_S, logsums_S = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        slope = compiled_on_cuda(_slope, hidden_SH.device)
        weight_sum = torch.zeros_like(weight_VH, dtype=torch.float32) if for_weight else None
        bias_sum = torch.zeros_like(bias_V, dtype=torch.float32) if for_bias else None
        hidden_grad_SH = torch.empty_like(hidden_SH) if for_hidden else None
        kept: list[Tensor] = ctx.kept
        ctx.kept = []
        kept.reverse()
        for first in range(0, len(hidden_SH), ctx.rows):
            part = slice(first, first + ctx.rows)
            logits = kept.pop() if kept else F.linear(hidden_SH[part], weight_VH, bias_V)
            chosen, entropy, logsums = chosen_S[part], entropy_S[part], logsums_S[part]
            slopes = slope(
                logits, chosen, entropy, logsums, grads_S[0][part], grads_S[1][part], ctx.inverse_temperature
            )
            del logits
            if hidden_grad_SH is not None:
                torch.mm(slopes, weight_VH, out=hidden_grad_SH[part])
            if weight_sum is not None:
                weight_sum += slopes.mT @ hidden_SH[part]
            if bias_sum is not None:
                bias_sum += slopes.float().sum(0)
        weight_grad_VH = None if weight_sum is None else weight_sum.to(weight_VH.dtype)
        bias_grad_V = None if bias_sum is None else bias_sum.to(bias_V.dtype)
        return hidden_grad_SH, weight_grad_VH, bias_grad_V, None, None, None, None


_in_chunks = cast(
    Callable[[Tensor, Tensor, Tensor | None, Tensor, float, int, bool], tuple[Tensor, Tensor]], _InChunks.apply
)

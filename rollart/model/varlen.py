"""Attention over sequences of different lengths laid end to end, in one call and without padding.

On CUDA it is torch's own flash attention, for 16-bit types; the kernels for a CPU are the formula, one sequence at a
time, so that all around them is tested without a GPU. As operators of our own they pass through `torch.compile` whole:
what changes from batch to batch (how many sequences, how long) is in tensors, which no compiled code depends on.

Shapes in names: Q query tokens, K key tokens, H heads, D head size, B1 sequences + 1.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

HEAD_MULTIPLE, HEAD_MIN, HEAD_MAX = 8, 64, 256
"""Head sizes that flash attention takes; none smaller than was compared with the formula on a GPU."""


def flash_runs(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether a GPU has flash attention for such heads."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_size % HEAD_MULTIPLE == 0
        and HEAD_MIN <= head_size <= HEAD_MAX
    )


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor there, without waiting for what the device is doing."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class VarlenPlan:
    """Causal attention of pieces laid end to end; an `AttentionPlan`.

    A piece sees itself, and before that what it goes on from, if anything: `keys[i]` are the flat rows of its keys, of
    which the last are its own. Its queries are at the end of its keys. It is made where no window is shorter than that.
    """

    def __init__(
        self, lengths: Sequence[int], positions_T: Tensor, device: torch.device, keys: Sequence[Tensor] | None = None
    ) -> None:
        self.positions_T = on_device(positions_T, device)
        self._queries_B1 = on_device(_starts(lengths), device)
        self._longest = torch.tensor([max(lengths), max(lengths)])
        """Of queries and keys; on the CPU, where the kernel needs it."""
        self._keys_B1, self._rows_K = self._queries_B1, None
        if keys is not None:
            counts = [len(rows) for rows in keys]
            self._keys_B1, self._rows_K = on_device(_starts(counts), device), on_device(torch.cat(list(keys)), device)
            self._longest = torch.tensor([max(lengths), max(counts)])

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        return self.attend_in_any_layer(query_THD, key_THD, value_THD, scaling)

    def attend_in_any_layer(self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scaling: float) -> Tensor:
        """As `attend`. Code compiled for one layer would not serve another if it were told the layer's number."""
        if self._rows_K is not None:
            key_THD, value_THD = (_repeat_rows(tensor, self._rows_K) for tensor in (key_THD, value_THD))
        arguments = (self._queries_B1, self._keys_B1, self._longest, scaling)
        out_THD: Tensor = _varlen(query_THD.contiguous(), key_THD.contiguous(), value_THD.contiguous(), *arguments)[0]
        return out_THD


def _starts(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


# --- the operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op("rollart::varlen_attention", mutates_args=(), device_types="cuda")
def _varlen(
    query_QHD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    queries_B1: Tensor,
    keys_B1: Tensor,
    longest: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The output (Q, H, D), and the logarithms of the sums (H, Q) for the backward pass."""
    out_QHD, logsums_HQ, *_ = torch.ops.aten._flash_attention_forward(
        query_QHD,
        key_KHD,
        value_KHD,
        queries_B1,
        keys_B1,
        int(longest[0]),
        int(longest[1]),
        0.0,
        True,
        False,
        scale=scaling,
    )
    return out_QHD.contiguous(), logsums_HQ


@torch.library.custom_op("rollart::varlen_attention_backward", mutates_args=(), device_types="cuda")
def _varlen_backward(
    grad_QHD: Tensor,
    query_QHD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    out_QHD: Tensor,
    logsums_HQ: Tensor,
    queries_B1: Tensor,
    keys_B1: Tensor,
    longest: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.ops.aten._flash_attention_backward(
        grad_QHD.contiguous(),
        query_QHD,
        key_KHD,
        value_KHD,
        out_QHD,
        logsums_HQ,
        queries_B1,
        keys_B1,
        int(longest[0]),
        int(longest[1]),
        0.0,
        True,
        torch.zeros(2, dtype=torch.uint64, device=query_QHD.device),  # the state of dropout, of which there is none
        torch.empty(0, device=query_QHD.device),
        scale=scaling,
    )
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


@_varlen.register_kernel("cpu")
def _varlen_plainly(
    query_QHD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    queries_B1: Tensor,
    keys_B1: Tensor,
    longest: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    out_QHD = torch.empty_like(query_QHD)
    logsums_HQ = torch.empty((query_QHD.shape[1], query_QHD.shape[0]), dtype=torch.float32)
    for queries, keys in _sequences(queries_B1, keys_B1):
        scores_HQK = _scores(query_QHD[queries], key_KHD[keys], scaling)
        values_HKD = _heads_first(value_KHD[keys], query_QHD.shape[1])
        out_QHD[queries] = (scores_HQK.softmax(-1) @ values_HKD).transpose(0, 1).to(out_QHD.dtype)
        logsums_HQ[:, queries] = scores_HQK.logsumexp(-1)
    return out_QHD, logsums_HQ


@_varlen_backward.register_kernel("cpu")
def _varlen_backward_plainly(
    grad_QHD: Tensor,
    query_QHD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    out_QHD: Tensor,
    logsums_HQ: Tensor,
    queries_B1: Tensor,
    keys_B1: Tensor,
    longest: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = query_QHD.shape[1], key_KHD.shape[1]
    grads = [torch.empty_like(tensor) for tensor in (query_QHD, key_KHD, value_KHD)]

    def by_kv_head(grad_HKD: Tensor) -> Tensor:
        return grad_HKD.unflatten(0, (kv_heads, heads // kv_heads)).sum(1).transpose(0, 1)

    for queries, keys in _sequences(queries_B1, keys_B1):
        own_HQD, out_HQD, seen_HQD = (
            tensor[queries].transpose(0, 1).float() for tensor in (query_QHD, out_QHD, grad_QHD)
        )
        shares_HQK = (_scores(query_QHD[queries], key_KHD[keys], scaling) - logsums_HQ[:, queries, None]).exp()
        values_HKD, keys_HKD = _heads_first(value_KHD[keys], heads), _heads_first(key_KHD[keys], heads)
        slopes_HQK = shares_HQK * (seen_HQD @ values_HKD.mT - (seen_HQD * out_HQD).sum(-1, keepdim=True)) * scaling
        grads[0][queries] = (slopes_HQK @ keys_HKD).transpose(0, 1).to(query_QHD.dtype)
        grads[1][keys] = by_kv_head(slopes_HQK.mT @ own_HQD).to(key_KHD.dtype)
        grads[2][keys] = by_kv_head(shares_HQK.mT @ seen_HQD).to(value_KHD.dtype)
    return grads[0], grads[1], grads[2]


def _sequences(queries_B1: Tensor, keys_B1: Tensor) -> Iterator[tuple[slice, slice]]:
    queries, keys = queries_B1.tolist(), keys_B1.tolist()
    for place in range(len(queries) - 1):
        yield slice(queries[place], queries[place + 1]), slice(keys[place], keys[place + 1])


def _scores(query_QHD: Tensor, key_KHD: Tensor, scaling: float) -> Tensor:
    """(H, Q, K) in float32; -inf where a key comes after the query."""
    scores_HQK = query_QHD.transpose(0, 1).float() @ _heads_first(key_KHD, query_QHD.shape[1]).mT * scaling
    queries, keys = scores_HQK.shape[1:]
    return scores_HQK.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries), -torch.inf)


def _heads_first(tensor_KHD: Tensor, heads: int) -> Tensor:
    """(all heads, K, D) in float32, those of keys repeated for the query heads that share them."""
    return tensor_KHD.transpose(0, 1).float().repeat_interleave(heads // tensor_KHD.shape[1], 0)


@_varlen.register_fake
def _varlen_shapes(query_QHD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    logsums = query_QHD.new_empty((query_QHD.shape[1], query_QHD.shape[0]), dtype=torch.float32)
    return query_QHD.new_empty(query_QHD.shape), logsums


@_varlen_backward.register_fake
def _varlen_backward_shapes(
    grad_QHD: Tensor, query_QHD: Tensor, key_KHD: Tensor, value_KHD: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    like = [tensor.new_empty(tensor.shape) for tensor in (query_QHD, key_KHD, value_KHD)]
    return like[0], like[1], like[2]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)


def _grads(ctx: Any, grad_QHD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query_QHD, key_KHD, value_KHD, queries_B1, keys_B1, longest, out_QHD, logsums_HQ = ctx.saved_tensors
    kept = (query_QHD, key_KHD, value_KHD, out_QHD, logsums_HQ, queries_B1, keys_B1, longest)
    return *_varlen_backward(grad_QHD, *kept, ctx.scaling), None, None, None, None


_varlen.register_autograd(_grads, setup_context=_keep)


# --- rows that several sequences see --------------------------------------------------------------------------------


@torch.library.custom_op("rollart::repeat_rows", mutates_args=())
def _repeat_rows(tensor_THD: Tensor, rows_K: Tensor) -> Tensor:
    """`index_select`, whose gradients add up in float32: in bfloat16 late ones would be rounded away."""
    return tensor_THD.index_select(0, rows_K)


@torch.library.custom_op("rollart::repeat_rows_backward", mutates_args=())
def _add_rows(grad_KHD: Tensor, rows_K: Tensor, count: int) -> Tensor:
    sums_THD = torch.zeros((count, *grad_KHD.shape[1:]), dtype=torch.float32, device=grad_KHD.device)
    return sums_THD.index_add_(0, rows_K, grad_KHD.float()).to(grad_KHD.dtype)


@_repeat_rows.register_fake
def _repeat_rows_shape(tensor_THD: Tensor, rows_K: Tensor) -> Tensor:
    return tensor_THD.new_empty((rows_K.shape[0], *tensor_THD.shape[1:]))


@_add_rows.register_fake
def _add_rows_shape(grad_KHD: Tensor, rows_K: Tensor, count: int) -> Tensor:
    return grad_KHD.new_empty((count, *grad_KHD.shape[1:]))


def _keep_rows(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.count = inputs[0].shape[0]
    ctx.save_for_backward(inputs[1])


def _rows_grads(ctx: Any, grad_KHD: Tensor) -> tuple[Tensor, None]:
    (rows_K,) = ctx.saved_tensors
    return _add_rows(grad_KHD.contiguous(), rows_K, ctx.count), None


_repeat_rows.register_autograd(_rows_grads, setup_context=_keep_rows)

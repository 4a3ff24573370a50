"""Sequences laid end to end in one flat row: who sees whom, and what need not be computed twice.

`fold` finds what sequences have in common at their beginning (a group's prompt, a system message that all tasks
begin with) and lays it down once; each sequence then goes on from it. `PackedPlan` is the attention over the result,
or `VarlenPlan` where there is a kernel for it.

Shapes in names: T flat tokens, F folded ones, P padded ones, H heads, D head size.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.model.varlen import VarlenPlan, on_device

MIN_FILL = 0.75
"""Sequences share one padded attention call while the shortest is at least this part of the longest."""
SHORT_TOKENS = 64
"""Below this length a call costs more than its padding: all such sequences share one."""
MIN_SAVED = 0.2
"""A common beginning is computed once where that saves at least this part of the tokens: attention from one sequence
into another cannot leave out the half that causal attention within one can."""
ALIGNED_TOKENS = 128
"""`VarlenPlan`: the flat row is a multiple of it long, which matrix products on a GPU are fastest with."""
ALONE = -1


class Folded(NamedTuple):
    """A packed batch without repeated beginnings."""

    tokens_F: Tensor
    plan: "PackedPlan | VarlenPlan"
    place_T: Tensor
    """Where in F each token of the batch is."""
    first_tokens: Tensor
    """Where in T each sequence begins; on the CPU."""


def fold(
    tokens_T: Tensor, lengths: Sequence[int], device: torch.device | None = None, *, varlen: bool = False
) -> Folded:
    """Lay common beginnings down once, for a device (default: the tokens' own). Every sequence keeps at least its last
    token to itself. Tokens on the CPU are the quickest: to look at others, all that their device does is waited for.
    """
    device = device or tokens_T.device
    counts = np.array(lengths, dtype=np.int64)
    firsts = counts.cumsum() - counts
    tokens = tokens_T.cpu().numpy()
    rows = [tokens[first : first + count] for first, count in zip(firsts, counts, strict=True)]
    pieces: list[npt.NDArray[Any]] = []
    follows: list[int] = []
    places: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * len(rows)
    end = 0
    for members, common in _families(rows, list(range(len(rows))), 0):
        beginning, before = ALONE, np.arange(end, end + common)
        if common:
            beginning = len(pieces)
            pieces.append(rows[members[0]][:common])
            follows.append(ALONE)
            end += common
        for member in members:
            pieces.append(rows[member][common:])
            follows.append(beginning)
            places[member] = np.concatenate([before, np.arange(end, end + len(pieces[-1]))])
            end += len(pieces[-1])
    if varlen and (missing := -end % ALIGNED_TOKENS):
        pieces.append(np.zeros(missing, dtype=tokens.dtype))  # a sequence that nobody asks for
        follows.append(ALONE)
    plan = (_varlen_plan if varlen else PackedPlan)([len(piece) for piece in pieces], device, follows)
    tokens_F = on_device(torch.from_numpy(np.concatenate(pieces)), device)
    place_T = on_device(torch.from_numpy(np.concatenate(places)), device)
    return Folded(tokens_F, plan, place_T, torch.from_numpy(firsts))


def _varlen_plan(lengths: Sequence[int], device: torch.device, follows: Sequence[int]) -> VarlenPlan:
    counts = np.array(lengths, dtype=np.int64)
    starts = counts.cumsum() - counts
    begins = np.array([0 if other == ALONE else lengths[other] for other in follows])
    positions = torch.from_numpy(np.arange(counts.sum()) + np.repeat(begins - starts, counts))
    if all(other == ALONE for other in follows):
        return VarlenPlan(lengths, positions, device)
    rows = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    keys = [own if other == ALONE else torch.cat((rows[other], own)) for own, other in zip(rows, follows, strict=True)]
    return VarlenPlan(lengths, positions, device, keys)


def _families(rows: Sequence[npt.NDArray[Any]], members: list[int], known: int) -> list[tuple[list[int], int]]:
    """These sequences, which agree in `known` tokens, as families, each with the length of its common beginning.

    One family with all they have in common, or the families of those that go on alike: whichever saves more.
    """
    if len(members) == 1:
        return [(members, 0)]
    shortest = min(len(rows[member]) for member in members) - 1
    pile = np.stack([rows[member][:shortest] for member in members])
    differs = (pile[:, known:] != pile[:1, known:]).any(0)
    common = known + int(differs.argmax()) if differs.any() else shortest
    saved = common * (len(members) - 1)
    if saved < MIN_SAVED * sum(len(rows[member]) for member in members):
        common = saved = 0
    apart: list[tuple[list[int], int]] = []
    if differs.any():
        at = known + int(differs.argmax())
        ordered = sorted(members, key=lambda member: int(rows[member][at]))
        for _, alike in groupby(ordered, key=lambda member: int(rows[member][at])):
            apart += _families(rows, list(alike), at)
    if sum(length * (len(family) - 1) for family, length in apart) > saved:
        return apart
    return [(members, common)] if common else [([member], 0) for member in members]


class _Call(NamedTuple):
    """One attention call: sequences, padded to `length`, that go on from the same beginning, if any."""

    sequences: int
    length: int
    beginning: slice | None
    """Its flat rows."""

    @property
    def begins(self) -> int:
        """Tokens that are before its own."""
        return 0 if self.beginning is None else self.beginning.stop - self.beginning.start


class PackedPlan:
    """Block-diagonal causal attention over sequences laid end to end; an `AttentionPlan`.

    `follows[i]` is the sequence that sequence i goes on from, and sees whole, or ALONE; one that is gone on from is
    itself alone. Sequences of similar length share one padded call: padding stands after a sequence's last token, so
    no real token sees it. Moving between flat and padded rows is a permutation, with a backward pass of the same cost.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, follows: Sequence[int] | None = None) -> None:
        assert all(length > 0 for length in lengths), "an empty sequence in a packed batch"
        follows = [ALONE] * len(lengths) if follows is None else follows
        counts = torch.tensor(list(lengths), dtype=torch.long)
        starts = counts.cumsum(0) - counts
        total = int(counts.sum())
        begins = torch.tensor([0 if other == ALONE else lengths[other] for other in follows])
        self.positions_T = (torch.arange(total) + (begins - starts).repeat_interleave(counts)).to(device)
        self._calls: list[_Call] = []
        """In padded order."""
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        order = sorted(range(len(lengths)), key=lambda i: (follows[i], -lengths[i], i))
        sources: list[Tensor] = []
        first = 0
        while first < len(order):
            longest, follow = lengths[order[first]], follows[order[first]]
            last = first
            while (
                last < len(order)
                and follows[order[last]] == follow
                and (longest <= SHORT_TOKENS or lengths[order[last]] >= MIN_FILL * longest)
            ):
                last += 1
            members = torch.tensor(order[first:last])
            columns = torch.arange(longest)
            source = starts[members, None] + torch.minimum(columns, counts[members, None] - 1)
            sources.append(torch.where(columns < counts[members, None], source, -1).flatten())
            if follow == ALONE:
                self._calls.append(_Call(last - first, longest, None))
            else:
                beginning = slice(int(starts[follow]), int(starts[follow]) + lengths[follow])
                self._calls.append(_Call(last - first, longest, beginning))
            first = last
        source_P = torch.cat(sources)
        real = (source_P >= 0).nonzero()[:, 0]
        place_T = torch.empty(total, dtype=torch.long)
        place_T[source_P[real]] = real
        self._identity = len(source_P) == total and bool((place_T == torch.arange(total)).all())
        self._source_P = source_P.clamp(min=0).to(device)
        self._place_T = place_T.to(device)

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        padded = [self._pad(tensor) for tensor in (query_THD, key_THD, value_THD)]
        grouped = query_THD.shape[1] != key_THD.shape[1]
        outs: list[Tensor] = []
        first = 0
        for number, call in enumerate(self._calls):
            rows = slice(first, first + call.sequences * call.length)
            first = rows.stop
            query, key, value = (
                tensor[rows].view(call.sequences, call.length, *tensor.shape[1:]).transpose(1, 2) for tensor in padded
            )
            if call.beginning is not None:
                key, value = _after(key_THD[call.beginning], key), _after(value_THD[call.beginning], value)
            mask = self.mask(number, window)
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        out_PHD = torch.cat(outs) if len(outs) > 1 else outs[0]
        return out_PHD if self._identity else _unpad(out_PHD, self._place_T)

    def mask(self, number: int, window: int | None) -> Tensor | None:
        """(length, beginning + length); None: plain causal."""
        call = self._calls[number]
        keys = call.begins + call.length
        if window is None or window >= keys:
            if call.beginning is None:
                return None
            window = None
        if (number, window) not in self._masks:
            seen = torch.ones(call.length, keys, dtype=torch.bool).tril(call.begins)
            if window is not None:
                seen = seen.triu(call.begins - window + 1)
            self._masks[number, window] = seen.to(self._place_T.device)
        return self._masks[number, window]

    def _pad(self, tensor_THD: Tensor) -> Tensor:
        if self._identity:
            return tensor_THD
        return _pad(tensor_THD, self._source_P, self._place_T)


def _after(beginning_THD: Tensor, own: Tensor) -> Tensor:
    """What each of these sequences (count, heads, tokens, size) sees: the beginning, and its own."""
    return torch.cat((beginning_THD.transpose(0, 1).expand(len(own), -1, -1, -1), own), dim=2)


class _Pad(torch.autograd.Function):
    """Flat rows to padded rows. What stands in the padding has no gradient: nothing real sees it."""

    @staticmethod
    def forward(ctx: Any, tensor_THD: Tensor, source_P: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        return tensor_THD.index_select(0, source_P)

    @staticmethod
    def backward(ctx: Any, grad_PHD: Tensor) -> tuple[Tensor, None, None]:
        (place_T,) = ctx.saved_tensors
        return grad_PHD.index_select(0, place_T), None, None


class _Unpad(torch.autograd.Function):
    """Padded rows to flat rows."""

    @staticmethod
    def forward(ctx: Any, tensor_PHD: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        ctx.num_padded = len(tensor_PHD)
        return tensor_PHD.index_select(0, place_T)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None]:
        (place_T,) = ctx.saved_tensors
        zeros = grad_THD.new_zeros(ctx.num_padded, *grad_THD.shape[1:])
        return zeros.index_copy_(0, place_T, grad_THD), None


_pad = cast(Callable[[Tensor, Tensor, Tensor], Tensor], _Pad.apply)
_unpad = cast(Callable[[Tensor, Tensor], Tensor], _Unpad.apply)

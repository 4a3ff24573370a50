"""Attention of one engine step: new tokens of many sessions against their slots in the cache.

The T flat tokens of a step are ordered by slab; within a slab first the short queries, in slot order, then the long
chunks. Short are decode tokens, and chunks that cost less padded than with calls of their own: one batched call per
slab reads all its slots in place. A long prefill chunk gets a call of its own. Built once per step, used by all layers.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.engines.embedded.kv import KvShape, Slab
from rollart.engines.embedded.sequence import Sequence

RIDE_MAX_TOKENS = 16
"""A chunk longer than this never rides."""
RIDE_FLOPS = 2_000_000
"""A chunk may ride if that adds no more than this much arithmetic: about what a call of its own costs on a CPU."""


@dataclass(slots=True)
class _ShortQueries:
    """One batched call: `num_rows` slots x `num_queries` padded queries, keys up to `num_keys`."""

    num_tokens: int
    num_rows: int
    num_queries: int
    num_keys: int
    place: Tensor | None
    """Where each token stands in the padded (rows x queries); None where there is no padding."""
    positions: Tensor
    """(rows, queries), of each query in its sequence; on the CPU."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By window, (rows, 1, queries x group or 1, keys), 0 or -inf."""


@dataclass(slots=True)
class _Chunk:
    """One call of its own: flat tokens [begin, end) of one slot."""

    begin: int
    end: int
    slot: int
    num_keys: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By window, (queries, keys), where it is not the plain causal one."""


@dataclass(slots=True)
class _SlabWork:
    slab: Slab
    begin: int
    end: int
    rows: Tensor
    """Cache row of each (new token, KV head)."""
    short: _ShortQueries | None
    chunks: list[_Chunk]


class StepPlan:
    """An `AttentionPlan` over slabs. `seqs` are the step's sequences in flat order, each with its `take` > 0."""

    def __init__(self, slabs: list[Slab], shape: KvShape, num_query_heads: int) -> None:
        self._shape = shape
        self._group = num_query_heads // shape.heads
        self._dot_products = shape.device.type == "cpu" and shape.dtype == torch.float32
        self.seqs: list[Sequence] = []
        self._work: list[_SlabWork] = []
        tokens: list[npt.NDArray[np.int64]] = []
        positions: list[npt.NDArray[np.int64]] = []
        begin = 0
        for slab in slabs:
            work = self._plan_slab(slab, begin, tokens, positions)
            if work is not None:
                self._work.append(work)
                begin = work.end
        self.num_tokens = begin
        self.tokens_T = self._to_device(np.concatenate(tokens))
        self.positions_T = self._to_device(np.concatenate(positions))

    def _plan_slab(
        self,
        slab: Slab,
        begin: int,
        tokens: list[npt.NDArray[np.int64]],
        positions: list[npt.NDArray[np.int64]],
    ) -> _SlabWork | None:
        seqs = slab.seqs
        longest_ride = self._longest_ride(slab)
        riding = [seq for seq in seqs if 0 < seq.take <= longest_ride]
        chunked = [seq for seq in seqs if seq.take > longest_ride] if len(riding) < len(seqs) else []
        ordered = riding + chunked
        if not ordered:
            return None
        self.seqs += ordered
        takes = np.array([seq.take for seq in ordered])
        starts = np.array([seq.length for seq in ordered])
        slots = np.array([seq.slot for seq in ordered])
        if takes.max() == 1:
            tokens.append(np.array([seq.last_token if seq.pending == 1 else seq.buffer[seq.length] for seq in ordered]))
            positions.append(starts)
            token_slots = slots
        else:
            tokens += [seq.buffer[seq.length : seq.length + seq.take] for seq in ordered]
            offsets = np.arange(takes.sum()) - np.repeat(takes.cumsum() - takes, takes)
            positions.append(np.repeat(starts, takes) + offsets)
            token_slots = np.repeat(slots, takes)
        heads = np.arange(self._shape.heads) * slab.capacity
        first_rows = token_slots * (self._shape.heads * slab.capacity) + positions[-1]
        chunks: list[_Chunk] = []
        end = begin + int(takes[: len(riding)].sum())
        short = self._plan_short(len(seqs), takes, starts, slots, len(riding)) if riding else None
        for seq in chunked:
            num_keys = seq.length + seq.take
            chunks.append(_Chunk(end, end + seq.take, seq.slot, num_keys))
            end += seq.take
        rows = self._to_device((first_rows[:, None] + heads).ravel())
        return _SlabWork(slab, begin, end, rows, short, chunks)

    def _longest_ride(self, slab: Slab) -> int:
        """The longest chunk that rides: all of the short ones do, or only decode tokens."""
        takes = [seq.take for seq in slab.seqs if 1 < seq.take <= RIDE_MAX_TOKENS]
        if takes:
            num_keys = max(seq.length + seq.take for seq in slab.seqs if 0 < seq.take <= RIDE_MAX_TOKENS)
            width = self._shape.heads * self._group * self._shape.head_size
            if 4 * len(slab.seqs) * max(takes) * num_keys * width <= RIDE_FLOPS * len(takes):
                return RIDE_MAX_TOKENS
        return 1

    def _plan_short(
        self,
        num_rows: int,
        takes: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        count: int,
    ) -> _ShortQueries:
        takes, starts, slots = takes[:count], starts[:count], slots[:count]
        num_queries, num_keys = int(takes.max()), int((starts + takes).max())
        if num_queries == 1 and count == num_rows:
            return _ShortQueries(count, num_rows, 1, num_keys, None, torch.from_numpy(starts)[:, None])
        # A row that does not ride in this step is computed as if at position 0, and thrown away.
        row_starts = np.zeros(num_rows, dtype=np.int64)
        row_starts[slots] = starts
        at = torch.from_numpy(row_starts)[:, None] + torch.arange(num_queries)
        offsets = np.arange(takes.sum()) - np.repeat(takes.cumsum() - takes, takes)
        place = self._to_device(np.repeat(slots * num_queries, takes) + offsets)
        return _ShortQueries(int(takes.sum()), num_rows, num_queries, num_keys, place, at)

    def _short_mask(self, short: _ShortQueries, window: int | None) -> Tensor:
        if window not in short.masks:
            hidden = _hidden(short.positions[:, :, None], short.num_keys, window)
            times = 1 if short.place is None else self._group
            short.masks[window] = self._additive(hidden.repeat_interleave(times, dim=1)[:, None])
        return short.masks[window]

    def _chunk_mask(self, chunk: _Chunk, window: int | None) -> Tensor | None:
        start = chunk.num_keys - (chunk.end - chunk.begin)
        if start == 0 and (window is None or window >= chunk.num_keys):
            return None
        if window not in chunk.masks:
            positions = torch.arange(start, chunk.num_keys)[:, None]
            chunk.masks[window] = self._additive(_hidden(positions, chunk.num_keys, window))
        return chunk.masks[window]

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._shape.dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self._shape.device)

    def _to_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._shape.device)

    # --- once per layer

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        query_THD = query_THD * scaling
        outs: list[Tensor] = []
        for work in self._work:
            slab, tokens = work.slab, slice(work.begin, work.end)
            slab.key_rows[layer].index_copy_(0, work.rows, key_THD[tokens].flatten(0, 1))
            slab.value_rows[layer].index_copy_(0, work.rows, value_THD[tokens].flatten(0, 1))
            if work.short is not None:
                own_THD = query_THD[work.begin : work.begin + work.short.num_tokens]
                outs.append(self._attend_short(work.short, slab, layer, own_THD, window))
            for chunk in work.chunks:
                outs.append(self._run_chunk(chunk, slab, layer, query_THD[chunk.begin : chunk.end], window))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _attend_short(
        self, short: _ShortQueries, slab: Slab, layer: int, query_THD: Tensor, window: int | None
    ) -> Tensor:
        mask = self._short_mask(short, window)
        rows, queries, keys = short.num_rows, short.num_queries, short.num_keys
        heads, group, size = self._shape.heads, self._group, self._shape.head_size
        if short.place is not None:
            padded = query_THD.new_zeros(rows * queries, heads * group, size)
            query_THD = padded.index_copy_(0, short.place, query_THD)
        # Query heads of one KV head become further queries of it: no key is read, or copied, twice.
        query = query_THD.reshape(rows, queries * heads, group, size)
        if queries > 1:
            query = query.view(rows, queries, heads, group, size).transpose(1, 2).reshape(rows, heads, -1, size)
        key, value = slab.keys[layer][:rows, :, :keys], slab.values[layer][:rows, :, :keys]
        if self._dot_products:
            # On a CPU in float32 this is up to twice as fast as the fused kernel for so few queries.
            out = torch.matmul(torch.matmul(query, key.transpose(2, 3)).add_(mask).softmax(-1), value)
        else:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
        if queries > 1:
            out = out.view(rows, heads, queries, group, size).transpose(1, 2)
        out_THD = out.reshape(rows * queries, heads * group, size)
        return out_THD if short.place is None else out_THD.index_select(0, short.place)

    def _run_chunk(self, chunk: _Chunk, slab: Slab, layer: int, query_THD: Tensor, window: int | None) -> Tensor:
        mask = self._chunk_mask(chunk, window)
        key = slab.keys[layer][chunk.slot, None, :, : chunk.num_keys]
        value = slab.values[layer][chunk.slot, None, :, : chunk.num_keys]
        query = query_THD.transpose(0, 1).unsqueeze(0)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=self._group > 1
        )
        return out[0].transpose(0, 1)


def _hidden(positions: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Which of a sequence's first keys tokens at these positions do not see; the last dimension is theirs."""
    keys = torch.arange(num_keys)
    hidden = keys > positions
    return hidden if window is None else hidden | (keys <= positions - window)

"""What the paged back end computes, one function each: by a Triton kernel on CUDA, in plain torch elsewhere.

The torch versions are the meaning; they run in the fast tests. The kernels (`kernels.py`) do the same in fewer passes
over memory, and nothing in them waits for the host, so that they can stand in a CUDA graph.

Shapes in names: T flat tokens, B rows that sample, H heads, D head size, V vocabulary, L lanes, P pages.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 128
"""Tokens of a prompt chunk that one program of the attention kernel works on."""
DRAW_CHUNK, DRAW_BLOCK = 8192, 512
"""Logits that one program looks through, and a quarter of how many at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One layer's keys and values, and which pages belong to whom."""

    keys_PHSD: Tensor
    """(pages, KV heads, page tokens, head size)."""
    values_PHSD: Tensor
    tables_LN: Tensor
    """Page of each part of a lane's sequence, int32."""

    @property
    def page_tokens(self) -> int:
        return self.keys_PHSD.shape[2]


class Where(NamedTuple):
    """Where the flat tokens of a step stand."""

    lanes_T: Tensor
    positions_T: Tensor
    decoding: int
    """The first this many tokens are single ones; what follows are chunks of prompts."""
    splits: int
    """Parts into which the context of a single token is cut, so that few long ones fill the device."""
    blocks_N4: Tensor
    """Pieces of the chunks: first flat token, number of tokens (at most CHUNK_ROWS), first position, lane."""


def rms_norm(hidden_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None) -> Tensor:
    """The normalised rows; with a residual, of the sum, which is written back into the residual."""
    if hidden_TH.is_cuda:
        return _kernels().rms_norm(hidden_TH, weight_H, eps, residual_TH)
    if residual_TH is not None:
        hidden_TH = residual_TH.add_(hidden_TH)
    wide = hidden_TH.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(hidden_TH.dtype) * weight_H


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    if gate_up_TI.is_cuda:
        return _kernels().silu_mul(gate_up_TI)
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return F.silu(gate) * up


class Rotation(NamedTuple):
    """What a model does to its queries and keys before attention."""

    cos_PD: Tensor
    sin_PD: Tensor
    query_norm_D: Tensor | None
    key_norm_D: Tensor | None
    eps: float


def rotate_and_keep(qkv_TX: Tensor, cache: Cache, where: Where, rotation: Rotation, query_heads: int) -> Tensor:
    """Rotated queries (T, heads, D); rotated keys, and values, go into the cache."""
    if qkv_TX.is_cuda:
        return _kernels().rotate_and_keep(qkv_TX, cache, where, rotation, query_heads)
    kv_heads, size = cache.keys_PHSD.shape[1], cache.keys_PHSD.shape[3]
    heads_THD = qkv_TX.view(len(qkv_TX), -1, size)
    query, key, value = heads_THD.split([query_heads, kv_heads, kv_heads], dim=1)
    positions = where.positions_T.long()
    cos, sin = (table.index_select(0, positions)[:, None] for table in (rotation.cos_PD, rotation.sin_PD))

    def turned(rows: Tensor, norm_D: Tensor | None) -> Tensor:
        if norm_D is not None:
            rows = rms_norm(rows, norm_D, rotation.eps)
        low, high = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat((-high, low), dim=-1) * sin

    keep(turned(key, rotation.key_norm_D), value, cache, where)
    return turned(query, rotation.query_norm_D)


def keep(key_THD: Tensor, value_THD: Tensor, cache: Cache, where: Where) -> None:
    """Write keys and values of the flat tokens into the cache."""
    positions = where.positions_T.long()
    pages = cache.tables_LN[where.lanes_T.long(), positions // cache.page_tokens].long()
    slots = positions % cache.page_tokens
    cache.keys_PHSD[pages, :, slots] = key_THD
    cache.values_PHSD[pages, :, slots] = value_THD


def attend(query_THD: Tensor, cache: Cache, where: Where, scaling: float, window: int | None = None) -> Tensor:
    """Attention of the flat tokens over what the cache holds of their sequences, themselves included; of the last
    `window` where it is given, which the kernels do not know: `PagedBackend` has them see none that is shorter than a
    sequence."""
    if query_THD.is_cuda:
        return _kernels().attend(query_THD, cache, where, scaling)
    out_THD = torch.empty_like(query_THD)
    singles = zip(range(where.decoding), where.positions_T.tolist(), where.lanes_T.tolist(), strict=False)
    pieces = [(token, 1, position, lane) for token, position, lane in singles]
    for first, count, position, lane in [*pieces, *where.blocks_N4.tolist()]:
        if not count:  # fills up the step's shape
            continue
        own = slice(first, first + count)
        out_THD[own] = _seen(query_THD[own], cache, lane, position, scaling, window)
    return out_THD


def _seen(query_THD: Tensor, cache: Cache, lane: int, first: int, scaling: float, window: int | None = None) -> Tensor:
    """Attention of consecutive tokens of one sequence, the first of them at position `first`."""
    length = first + len(query_THD)
    pages = cache.tables_LN[lane, : -(-length // cache.page_tokens)].long()
    key, value = (
        store[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for store in (cache.keys_PHSD, cache.values_PHSD)
    )
    keys = torch.arange(length, device=query_THD.device)
    queries = keys[first:, None]
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    query = query_THD.transpose(0, 1)[None]
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped)
    return out[0].transpose(0, 1)


class Draws(NamedTuple):
    """How the rows of a step are sampled."""

    temperatures_B: Tensor
    """float32; 0 means greedy."""
    seeds_B: Tensor
    """int64, another one for each token of each request."""
    lanes_B: Tensor
    """Whose next input the drawn token is."""


def draw(logits_BV: Tensor, draws: Draws, lane_tokens_L: Tensor) -> tuple[Tensor, Tensor]:
    """A token and its log-probability for each row, on CUDA. The tokens become the next input of their lanes.

    The log-probability is that of the temperature-scaled full distribution, at temperature 0 of the plain one.
    `sampler.draw` is the same for any device, with other random numbers, and with top-k and top-p.
    """
    drawn: tuple[Tensor, Tensor] = _kernels().draw(logits_BV, draws, lane_tokens_L)
    return drawn


def _kernels() -> Any:
    """Imported where it is needed: Triton comes with torch's CUDA builds only."""
    from rollart.engines.embedded.paged import launches

    return launches

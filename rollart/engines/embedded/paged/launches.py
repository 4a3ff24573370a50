"""The Triton kernels, launched: grids, block sizes, the memory of their results. `ops.py` says what they mean."""

import torch
import triton
from torch import Tensor

from rollart.engines.embedded.paged import kernels
from rollart.engines.embedded.paged.ops import CHUNK_ROWS, DRAW_BLOCK, DRAW_CHUNK, Cache, Draws, Rotation, Where

DECODE_STAGES = 2
"""Pages on their way at a time."""
NORM_WARPS = {True: 4, False: 8}
"""By whether a row has at most 2,048 numbers."""


def rms_norm(hidden_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None) -> Tensor:
    width = hidden_TH.shape[-1]
    out = torch.empty_like(hidden_TH)
    rows = hidden_TH.numel() // width
    if rows:
        kernels.rms_norm_kernel[(rows,)](
            hidden_TH, hidden_TH if residual_TH is None else residual_TH, weight_H, out, eps,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=residual_TH is not None,
            num_warps=NORM_WARPS[width <= 2048],
        )  # fmt: skip
    return out


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    width = gate_up_TI.shape[-1] // 2
    out = gate_up_TI.new_empty(len(gate_up_TI), width)
    block = min(2048, triton.next_power_of_2(width))
    if len(out):
        kernels.silu_mul_kernel[(len(out), triton.cdiv(width, block))](
            gate_up_TI, out, WIDTH=width, BLOCK=block, num_warps=4
        )
    return out


def rotate_and_keep(qkv_TX: Tensor, cache: Cache, where: Where, rotation: Rotation, query_heads: int) -> Tensor:
    _, kv_heads, page_tokens, size = cache.keys_PHSD.shape
    query = qkv_TX.new_empty(len(qkv_TX), query_heads, size)
    norm = rotation.query_norm_D
    kernels.rotate_and_keep_kernel[(len(qkv_TX),)](
        qkv_TX, query, cache.keys_PHSD, cache.values_PHSD, cache.tables_LN, where.lanes_T, where.positions_T,
        rotation.cos_PD, rotation.sin_PD,
        qkv_TX if norm is None else norm, qkv_TX if norm is None else rotation.key_norm_D,
        rotation.eps, cache.tables_LN.shape[1],
        QUERY_HEADS=query_heads, QUERY_BLOCK=triton.next_power_of_2(query_heads),
        KV_HEADS=kv_heads, KV_BLOCK=triton.next_power_of_2(kv_heads),
        SIZE=size, HALF_BLOCK=triton.next_power_of_2(size // 2), PAGE=page_tokens, NORM=norm is not None,
        num_warps=4,
    )  # fmt: skip
    return query


def attend(query_THD: Tensor, cache: Cache, where: Where, scaling: float) -> Tensor:
    _, kv_heads, page_tokens, size = cache.keys_PHSD.shape
    query_heads = query_THD.shape[1]
    group, size_block = query_heads // kv_heads, max(16, triton.next_power_of_2(size))
    query_THD = query_THD.contiguous()
    out = torch.empty_like(query_THD)
    width = cache.tables_LN.shape[1]
    if where.decoding:
        splits = where.splits
        parts = where.decoding * query_heads * splits if splits > 1 else 1
        partial = torch.empty(parts, size, dtype=torch.float32, device=out.device)
        stats = torch.empty(parts, 2, dtype=torch.float32, device=out.device)
        kernels.decode_kernel[(where.decoding, kv_heads, splits)](
            query_THD, cache.keys_PHSD, cache.values_PHSD, out, partial, stats, cache.tables_LN,
            where.lanes_T, where.positions_T, scaling, width,
            GROUP=group, GROUP_BLOCK=max(16, triton.next_power_of_2(group)), KV_HEADS=kv_heads,
            SIZE=size, SIZE_BLOCK=size_block, PAGE=page_tokens, SPLITS=splits, num_warps=4, num_stages=DECODE_STAGES,
        )  # fmt: skip
        if splits > 1:
            kernels.combine_kernel[(where.decoding * query_heads,)](
                partial, stats, out, SIZE=size, SIZE_BLOCK=size_block, SPLITS=splits, num_warps=2
            )
    if len(where.blocks_N4):
        kernels.chunk_kernel[(query_heads, len(where.blocks_N4))](
            query_THD, cache.keys_PHSD, cache.values_PHSD, out, cache.tables_LN, where.blocks_N4, scaling, width,
            GROUP=group, KV_HEADS=kv_heads, SIZE=size, SIZE_BLOCK=size_block, PAGE=page_tokens, ROWS=CHUNK_ROWS,
            num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


def draw(logits_BV: Tensor, draws: Draws, lane_tokens_L: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits_BV.shape
    chunks = triton.cdiv(vocab, DRAW_CHUNK)
    scores, logits, peaks, totals = torch.empty(4, rows, chunks, dtype=torch.float32, device=logits_BV.device)
    candidates = torch.empty(rows, chunks, dtype=torch.int32, device=logits_BV.device)
    tokens_B = torch.empty(rows, dtype=torch.int32, device=logits_BV.device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    kernels.draw_parts_kernel[(rows, chunks)](
        logits_BV, draws.temperatures_B, draws.seeds_B, scores, candidates, logits, peaks, totals,
        VOCAB=vocab, CHUNK=DRAW_CHUNK, BLOCK=DRAW_BLOCK, CHUNKS=chunks, num_warps=4,
    )  # fmt: skip
    kernels.draw_kernel[(rows,)](
        scores, candidates, logits, peaks, totals, draws.lanes_B, lane_tokens_L, tokens_B, logprobs_B,
        CHUNKS=chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return tokens_B, logprobs_B

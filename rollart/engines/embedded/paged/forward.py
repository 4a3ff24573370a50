"""The forward pass over pages, in few kernels: dense decoders (Llama, Qwen2, Qwen3) and Qwen3's mixture of experts.

The same computation as transformers' own code on the same weights, as in `dense.py`. Where projections are fused, the
model's parameters become views of that, so that a weight swap in place needs nothing more. No step waits for the
host, so the whole pass can be captured in a CUDA graph. Other architectures run through transformers' code.

Shapes in names: T flat tokens, H hidden, E experts, K experts of one token, I their inner width.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollart.engines.embedded.dense import fixed_rope, plain_decoder
from rollart.engines.embedded.paged.ops import Cache, Rotation, Where, attend, rms_norm, rotate_and_keep, silu_mul
from rollart.model.network import window_of
from rollart.model.products import prove_products

EXPERTS = "qwen3_moe"


def fuse(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor with all their rows; they become views of it, so that writing to them writes to it."""
    fused = torch.cat([parameter.detach() for parameter in parameters])
    first = 0
    for parameter in parameters:
        parameter.data = fused[first : first + len(parameter)]
        first += len(parameter)
    return fused


class _Experts:
    """A layer's mixture of experts: each token goes through the few that its router names."""

    def __init__(self, module: Any) -> None:
        self._router_EH: Tensor = module.gate.weight
        self._gate_up_EIH: Tensor = module.experts.gate_up_proj
        self._down_EHI: Tensor = module.experts.down_proj
        self._chosen: int = module.gate.top_k
        self._normed = bool(module.gate.norm_topk_prob)
        one = self._gate_up_EIH[0].numel() + self._down_EHI[0].numel()
        self.weights = self._router_EH.numel() + self._chosen * one

    def __call__(self, rows_TH: Tensor) -> Tensor:
        scores_TE = F.linear(rows_TH, self._router_EH).softmax(-1, dtype=torch.float)
        weights_TK, experts_TK = scores_TE.topk(self._chosen, dim=-1)
        if self._normed:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        # Sorted by expert, the rows of one lie side by side, and all are multiplied in one grouped product.
        experts_N, order_N = experts_TK.flatten().sort(stable=True)
        sizes_E = torch.zeros(len(self._router_EH), dtype=torch.int32, device=rows_TH.device)
        sizes_E.index_add_(0, experts_N, torch.ones_like(experts_N, dtype=torch.int32))
        ends_E = sizes_E.cumsum(0, dtype=torch.int32)
        inner_NI = silu_mul(_grouped(rows_TH.index_select(0, order_N // self._chosen), self._gate_up_EIH, ends_E))
        out_NH = _grouped(inner_NI, self._down_EHI, ends_E)
        own_TKH = torch.empty_like(out_NH).index_copy_(0, order_N, out_NH).view(*experts_TK.shape, -1)
        return (own_TKH * weights_TK[..., None].to(own_TKH.dtype)).sum(1)


def _grouped(rows_NX: Tensor, weights_EYX: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of each expert times its own matrix."""
    if rows_NX.is_cuda and rows_NX.dtype == torch.bfloat16:
        return torch._grouped_mm(rows_NX, weights_EYX.transpose(1, 2), offs=ends_E)
    ends = [0, *ends_E.tolist()]
    parts = [F.linear(rows_NX[begin:end], weights_EYX[expert]) for expert, (begin, end) in enumerate(pairwise(ends))]
    return torch.cat(parts)


class _Mlp:
    def __init__(self, module: Any) -> None:
        self.gate_up = fuse([module.gate_proj.weight, module.up_proj.weight])
        self._down: Tensor = module.down_proj.weight
        self.weights = self.gate_up.numel() + self._down.numel()

    def __call__(self, rows_TH: Tensor) -> Tensor:
        return F.linear(silu_mul(F.linear(rows_TH, self.gate_up)), self._down)


class _Layer:
    def __init__(self, module: Any, cos_PD: Tensor, sin_PD: Tensor) -> None:
        attention = module.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = fuse([projection.weight for projection in projections])
        self.qkv_bias = None if attention.q_proj.bias is None else fuse([one.bias for one in projections])
        self.out: Tensor = attention.o_proj.weight
        self.scaling: float = attention.scaling
        self.input_norm: Tensor = module.input_layernorm.weight
        self.mlp_norm: Tensor = module.post_attention_layernorm.weight
        self.mlp = _Experts(module.mlp) if hasattr(module.mlp, "experts") else _Mlp(module.mlp)
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.rotation = Rotation(
            cos_PD=cos_PD,
            sin_PD=sin_PD,
            query_norm_D=norms[0].weight if norms else None,
            key_norm_D=norms[1].weight if norms else None,
            eps=norms[0].variance_epsilon if norms else 0.0,
        )


class PagedForward:
    """Hidden states of flat tokens over the pages of a cache."""

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        base: Any = model.base_model
        self._embedding: Tensor = base.embed_tokens.weight
        self._norm: Tensor = base.norm.weight
        self._eps: float = base.norm.variance_epsilon
        self._heads: int = model.config.get_text_config().num_attention_heads
        cos, sin = base.rotary_emb(self._embedding, torch.arange(max_context, device=model.device)[None])
        self._layers = [_Layer(module, cos[0].contiguous(), sin[0].contiguous()) for module in base.layers]
        first = self._layers[0]
        prove_products([first.qkv, *([first.mlp.gate_up] if isinstance(first.mlp, _Mlp) else [])])
        self.weights = sum(layer.qkv.numel() + layer.out.numel() + layer.mlp.weights for layer in self._layers)
        """That one token is multiplied with, without the vocabulary's."""
        self.waits = model.config.model_type == EXPERTS and model.dtype != torch.bfloat16
        """Whether a pass waits for the host: grouped products are there for bfloat16 alone."""

    def __call__(self, tokens_T: Tensor, where: Where, layers: list[Cache]) -> Tensor:
        """The final hidden states (T, H)."""
        residual_TH = F.embedding(tokens_T, self._embedding)
        branch_TH: Tensor | None = None
        for layer, cache in zip(self._layers, layers, strict=True):
            rows_TH = self._normed(residual_TH, branch_TH, layer.input_norm)
            qkv = F.linear(rows_TH, layer.qkv, layer.qkv_bias)
            query = rotate_and_keep(qkv, cache, where, layer.rotation, self._heads)
            seen = attend(query, cache, where, layer.scaling)
            rows_TH = self._normed(residual_TH, F.linear(seen.flatten(1), layer.out), layer.mlp_norm)
            branch_TH = layer.mlp(rows_TH)
        return self._normed(residual_TH, branch_TH, self._norm)

    def _normed(self, residual_TH: Tensor, branch_TH: Tensor | None, weight_H: Tensor) -> Tensor:
        if branch_TH is None:
            return rms_norm(residual_TH, weight_H, self._eps)
        return rms_norm(branch_TH, weight_H, self._eps, residual_TH)


@torch.no_grad()
def paged_forward(model: PreTrainedModel, max_context: int) -> PagedForward | None:
    """The fast forward of a model it is right for; None for any other. The model's weights may become views."""
    config: Any = model.config
    if config.model_type == EXPERTS:
        base: Any = model.base_model
        usual = fixed_rope(config) and config.hidden_act == "silu" and not config.attention_bias
        usual = usual and window_of(config) is None
        return (
            PagedForward(model, max_context)
            if usual and all(hasattr(module.mlp, "experts") for module in base.layers)
            else None
        )
    return PagedForward(model, max_context) if plain_decoder(model) else None

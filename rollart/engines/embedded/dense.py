"""The forward pass of the usual dense decoder (Llama, Qwen2, Qwen3) in as few calls as it takes.

transformers' own model code, which `model/network.py` runs, spends on a small model (or a large GPU) more time in
Python and in small kernels than in arithmetic. This is the same computation on the same weights: projections that share
their input are one matrix, in whose rows the model's own parameters become views, so a weight swap in place needs
nothing more than `refresh`. Every other architecture runs through `rollart.model.network.forward_hidden`.

An instance exists only if it gave what transformers' code gives, checked when it is made.
"""

import warnings
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollart.model.network import AttentionPlan, forward_hidden, window_of
from rollart.model.packed import PackedPlan

KINDS = frozenset({"llama", "qwen2", "qwen3"})
FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend on the position alone: computed once."""
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference from transformers' hidden states, root mean square over root mean square. float32 gives about
1e-6; in bfloat16 two orders of the same sums drift apart layer by layer (28 layers: 0.03), another formula gives 1."""
PACK_MIN = 1 << 17
"""Elements of the smallest matrix that gains by oneDNN's order: below, its calls cost more than they save."""
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class _Matrix:
    """A weight (out, in) to multiply by. On a CPU a large one is also kept in oneDNN's own order, which saves ordering
    it anew in every call: at 8 to 32 rows a third to a fifth of the time."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight.detach()
        self._bias = bias
        self._packs = _ONEDNN and weight.device.type == "cpu" and weight.numel() >= PACK_MIN
        self._packed: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        if self._packs:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(rows, self._weight, self._bias)
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], ""))

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        if self._packed is None:
            return torch.addmm(residual, rows, self._weight.t())
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._packed, None, "add"))


class _Layer:
    """One layer's weights, fused where they share their input."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None if attention.q_proj.bias is None else fuse([projection.bias for projection in projections])
        self.input_norm: Tensor = module.input_layernorm.weight
        self.mlp_norm: Tensor = module.post_attention_layernorm.weight
        self.qkv = _Matrix(fuse([projection.weight for projection in projections]), bias)
        self.out = _Matrix(attention.o_proj.weight)
        self.gate_up = _Matrix(fuse([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.down = _Matrix(mlp.down_proj.weight)
        self.head_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
        self.norm_HD: Tensor | None = None
        """The norms of all query and key heads, one row each."""
        self.scaling: float = attention.scaling

    def matrices(self) -> tuple[_Matrix, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class DenseForward:
    """Hidden states of a dense model's flat tokens. Made by `dense_forward`."""

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        base: Any = model.base_model
        config = model.config.get_text_config()
        self._embedding: Tensor = base.embed_tokens.weight
        self._layers = [_Layer(module) for module in base.layers]
        self._norm: Tensor = base.norm.weight
        self._head = _Matrix(cast(Any, model.get_output_embeddings()).weight)  # type: ignore[no-untyped-call]
        self._eps: float = base.norm.variance_epsilon
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_size: int = base.layers[0].self_attn.head_dim
        positions = torch.arange(max_context, device=model.device)
        cos, sin = base.rotary_emb(self._embedding, positions[None])
        self._cos_PD: Tensor = cos[0]
        # Half of the head is negated as it changes sides; the sign is kept here instead.
        self._sin_PD: Tensor = sin[0].clone()
        self._sin_PD[:, : self._head_size // 2].neg_()
        self.join_norms()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over weights that were changed in place."""
        self.join_norms()
        self._head.refresh()
        for layer in self._layers:
            for matrix in layer.matrices():
                matrix.refresh()

    def join_norms(self) -> None:
        counts = (self._heads, self._kv_heads)
        for layer in self._layers:
            if layer.head_norms is not None:
                rows = [norm.expand(count, -1) for norm, count in zip(layer.head_norms, counts, strict=True)]
                layer.norm_HD = torch.cat(rows)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """The final hidden states (T, H)."""
        hidden_TH = F.embedding(tokens_T, self._embedding)
        width, eps = hidden_TH.shape[1:], self._eps
        cos = self._cos_PD.index_select(0, positions_T).unsqueeze(1)
        sin = self._sin_PD.index_select(0, positions_T).unsqueeze(1)
        rotated, half = self._heads + self._kv_heads, self._head_size // 2
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(F.rms_norm(hidden_TH, width, layer.input_norm, eps))
            heads_THD = qkv.view(len(qkv), -1, self._head_size)
            qk = heads_THD[:, :rotated]
            if layer.norm_HD is not None:
                qk = F.rms_norm(qk, (self._head_size,), None, eps).mul_(layer.norm_HD)
            other_side = torch.cat((qk[..., half:], qk[..., :half]), dim=-1)
            qk = (qk * cos).addcmul_(other_side, sin)
            query, key = qk[:, : self._heads], qk[:, self._heads :]
            out_THD = plan.attend(index, query, key, heads_THD[:, rotated:], layer.scaling)
            hidden_TH = layer.out.added_to(hidden_TH, out_THD.reshape(len(qkv), -1))
            gate, up = layer.gate_up(F.rms_norm(hidden_TH, width, layer.mlp_norm, eps)).chunk(2, dim=1)
            hidden_TH = layer.down.added_to(hidden_TH, F.silu(gate).mul_(up))
        return F.rms_norm(hidden_TH, width, self._norm, eps)

    def project(self, hidden_TH: Tensor) -> Tensor:
        """Logits (T, V) in float32."""
        return self._head(hidden_TH).float()


def fixed_rope(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") in FIXED_ROPES


def plain_decoder(model: PreTrainedModel) -> bool:
    """Whether a model is of the usual dense kind, which is computed here and in `paged/forward.py`."""
    config: Any = model.config
    base: Any = model.base_model
    return (
        config.model_type in KINDS
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and fixed_rope(config)
        and window_of(config) is None
        and base.layers[0].self_attn.o_proj.bias is None
    )


@torch.no_grad()
def dense_forward(model: PreTrainedModel, max_context: int) -> DenseForward | None:
    """The fast forward of a model it is right for; None for any other. The model's weights may become views."""
    if not plain_decoder(model):
        return None
    dense = DenseForward(model, max_context)
    config = model.config
    tokens_T = torch.arange(min(8, config.vocab_size, max_context), device=model.device)
    plan = PackedPlan([len(tokens_T)], model.device)
    ours, theirs = dense(tokens_T, plan.positions_T, plan), forward_hidden(model, tokens_T, plan.positions_T, plan)
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-9))
    if not difference <= AGREEMENT.get(theirs.dtype, 1e-4):
        warnings.warn(
            f"{config.model_type}: the fast forward is off by {difference:.2g} and is not used; "
            "this version of transformers computes something else, please report it",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return dense


def fuse(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor with all their rows; they become views of it, so that writing to them writes to it."""
    fused = torch.cat([parameter.detach() for parameter in parameters])
    first = 0
    for parameter in parameters:
        parameter.data = fused[first : first + len(parameter)]
        first += len(parameter)
    return fused

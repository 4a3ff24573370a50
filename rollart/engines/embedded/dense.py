"""The forward pass of the usual dense decoder (Llama, Qwen2, Qwen3) in as few calls as it takes.

transformers' own model code, which `model/network.py` runs, spends on a small model (or a large GPU) more time in
Python and in small kernels than in arithmetic. This is the same computation on the same weights: projections that share
their input are one matrix. What a pass reads is one object, `DenseWeights`, which is made beside the passes and then
exchanged (`exchange.py`). Every other architecture runs through `rollart.model.network.forward_hidden`.

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


class Matrix:
    """A weight (out, in) to multiply by. On a CPU a large one is kept in oneDNN's own order, which saves ordering it
    anew in every call: at 8 to 32 rows a third to a fifth of the time."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = packs(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(rows, self._weight, self._bias)
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], ""))

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        if not self._packed:
            return torch.addmm(residual, rows, self._weight.t())
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._weight, None, "add"))


def packs(weight: Tensor) -> bool:
    return _ONEDNN and weight.device.type == "cpu" and weight.numel() >= PACK_MIN


class _Given:
    """The tensors that a model's parameters are, or will be."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._tensors = tensors

    def __call__(self, parameter: nn.Parameter) -> Tensor:
        found = self._tensors.get(self._names[id(parameter)])
        return parameter.detach() if found is None else found

    def fused(self, parameters: list[nn.Parameter]) -> Tensor:
        """One tensor with all their rows. Where it is kept as it is, they become views of it."""
        fused = torch.cat([self(parameter) for parameter in parameters])
        if not packs(fused):
            parts = fused.split([len(parameter) for parameter in parameters])
            self._tensors |= {self._names[id(one)]: part for one, part in zip(parameters, parts, strict=True)}
        return fused


class _Layer:
    """One layer's weights, fused where they share their input."""

    def __init__(self, module: Any, given: _Given) -> None:
        attention, mlp = module.self_attn, module.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None if attention.q_proj.bias is None else given.fused([projection.bias for projection in projections])
        self.input_norm = given(module.input_layernorm.weight)
        self.mlp_norm = given(module.post_attention_layernorm.weight)
        self.qkv = Matrix(given.fused([projection.weight for projection in projections]), bias)
        self.out = Matrix(given(attention.o_proj.weight))
        self.gate_up = Matrix(given.fused([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.down = Matrix(given(mlp.down_proj.weight))
        self.norm_HD: Tensor | None = None
        """The norms of all query and key heads, one row each."""
        if hasattr(attention, "q_norm"):
            query_heads, key_heads = (len(one.weight) // attention.head_dim for one in projections[:2])
            norms = ((attention.q_norm, query_heads), (attention.k_norm, key_heads))
            self.norm_HD = torch.cat([given(norm.weight).expand(heads, -1) for norm, heads in norms])
        self.scaling: float = attention.scaling


class DenseWeights:
    """All weights that a forward pass reads."""

    def __init__(self, model: PreTrainedModel, given: _Given) -> None:
        base: Any = model.base_model
        self.embedding = given(base.embed_tokens.weight)
        self.layers = [_Layer(module, given) for module in base.layers]
        self.norm = given(base.norm.weight)
        self.head = Matrix(given(cast(Any, model.get_output_embeddings()).weight))  # type: ignore[no-untyped-call]


class DenseForward:
    """Hidden states of a dense model's flat tokens. Made by `dense_forward`."""

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        base: Any = model.base_model
        config = model.config.get_text_config()
        self._model = model
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.weights = self.made_of(tensors)
        for name, parameter in model.named_parameters():
            parameter.data = tensors[name]
        self._eps: float = base.norm.variance_epsilon
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_size: int = base.layers[0].self_attn.head_dim
        positions = torch.arange(max_context, device=model.device)
        cos, sin = base.rotary_emb(self.weights.embedding, positions[None])
        self._cos_PD: Tensor = cos[0]
        # Half of the head is negated as it changes sides; the sign is kept here instead.
        self._sin_PD: Tensor = sin[0].clone()
        self._sin_PD[:, : self._head_size // 2].neg_()

    def made_of(self, tensors: dict[str, Tensor]) -> DenseWeights:
        """What a pass reads where these, by name, are the model's parameters, and the others are as they are. Small
        ones that are fused become views of what they are fused into, also in `tensors`."""
        return DenseWeights(self._model, _Given(self._model, tensors))

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """The final hidden states (T, H)."""
        weights = self.weights
        hidden_TH = F.embedding(tokens_T, weights.embedding)
        width, eps = hidden_TH.shape[1:], self._eps
        cos = self._cos_PD.index_select(0, positions_T).unsqueeze(1)
        sin = self._sin_PD.index_select(0, positions_T).unsqueeze(1)
        rotated, half = self._heads + self._kv_heads, self._head_size // 2
        for index, layer in enumerate(weights.layers):
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
        return F.rms_norm(hidden_TH, width, weights.norm, eps)

    def project(self, hidden_TH: Tensor) -> Tensor:
        """Logits (T, V) in float32."""
        return self.weights.head(hidden_TH).float()


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
    """The fast forward of a model it is right for; None for any other. The model's parameters may become views."""
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

"""The size of a model, read from its Hugging Face directory without loading it: what the roofline needs.

Parameters are counted in the files' headers; where there are none yet, they follow from config.json. How many of them
a token uses, and what it leaves in the cache, config.json says.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from rollart.errors import JobError
from rollart.hardware import MODELS, ModelShape
from rollart.types import ParsedJson

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0, "float8_e5m2": 1.0}
GATED = 3
"""Matrices of an MLP: gate, up and down."""

OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "decoder_attention_heads"),
    "intermediate_size": ("n_inner", "dff", "ffn_hidden_size", "decoder_ffn_dim"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "max_position_embeddings": ("n_positions", "max_target_positions"),
}
"""What some architectures (GPT-2, CTRL, LongCat, Whisper) call what most call by the first name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts in a model's layers; all zero where it has none."""

    num: int = 0
    """That a router chooses from, in each of `layers`."""
    per_token: int = 0
    layers: int = 0
    params_each: int = 0
    shared_params: int = 0
    """Of those that every token uses, in each of `layers`."""

    @property
    def unused(self) -> int:
        """Parameters that a token does not use."""
        return self.layers * (self.num - self.per_token) * self.params_each


@lru_cache
def known_shape(name: str) -> ModelShape:
    """One of `rollart.hardware`, or that of the model in this folder."""
    return MODELS[name] if name in MODELS else shape_of(Path(name))


def is_known(name: str) -> bool:
    return name in MODELS or (Path(name) / "config.json").is_file()


def shape_of(model_path: Path) -> ModelShape:
    """The shape of the model in a Hugging Face directory, in the precision that its config names."""
    config = json.loads((model_path / "config.json").read_text())
    return shape_from(config, params=saved_params(model_path))


def shape_from(config: ParsedJson, params: int = 0) -> ModelShape:
    """The shape of a model of this config. `params`: how many it has, where that is known."""
    config = usual_names(config)
    experts = experts_in(config)
    total = params or _params(config, experts)
    num_bytes = DTYPE_BYTES[config.get("dtype") or config.get("torch_dtype") or "float32"]
    heads = config["num_attention_heads"]
    head_params = float(config["vocab_size"] * config["hidden_size"])
    return ModelShape(
        params=total,
        active_params=total - experts.unused,
        kv_bytes_per_token=config["num_hidden_layers"] * _kv_values(config) * num_bytes,
        bytes_per_param=num_bytes,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        attention_width=heads * _head_size(config),
        kv_heads=config.get("num_key_value_heads") or heads,
        head_params=head_params,
        lookup_params=0.0 if config.get("tie_word_embeddings") else head_params,
        experts=experts.num,
        experts_per_token=experts.per_token,
        expert_params=float(experts.layers * experts.num * experts.params_each),
    )


def usual_names(config: ParsedJson) -> ParsedJson:
    """The config of the language model, with each size under the name that most architectures give it."""
    found = {**config, **(config.get("text_config") or {})}
    for name, others in OTHER_NAMES.items():
        if found.get(name) is None and (size := _first(found, *others)):
            found[name] = size
    return found


def saved_params(model_path: Path) -> int:
    """How many parameters the files of a directory hold, by their headers; 0 where it has no such files.
    JobError for a file that is not whole."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for path in sorted(model_path.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as opened:
                total += sum(prod(opened.get_slice(key).get_shape()) for key in opened.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise JobError(
                f"{path} is not a whole safetensors file ({type(error).__name__}: {error}); fetch it again (git lfs "
                "pull)"
            ) from None
    return total


def experts_in(config: ParsedJson) -> Experts:
    """Of the names that architectures have for it."""
    config = usual_names(config)
    num = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if not num:
        return Experts()
    hidden = config["hidden_size"]
    inner = _first(config, "moe_intermediate_size", "intermediate_size")
    dense = {*(config.get("mlp_only_layers") or ()), *range(config.get("first_k_dense_replace") or 0)}
    every = _first(config, "decoder_sparse_step", "moe_layer_freq") or 1
    layers = [at for at in range(config["num_hidden_layers"]) if (at + 1) % every == 0 and at not in dense]
    shared = (config.get("n_shared_experts") or 0) * inner + (config.get("shared_expert_intermediate_size") or 0)
    return Experts(
        num=num,
        per_token=_first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") or 1,
        layers=len(layers),
        params_each=GATED * hidden * inner,
        shared_params=GATED * hidden * shared,
    )


def _kv_values(config: ParsedJson) -> int:
    """What one token leaves in the cache of one layer: keys and values."""
    heads = config["num_attention_heads"]
    if config.get("kv_lora_rank"):  # latent attention; held as the keys and values that it stands for
        return int(heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]))
    return int(2 * (config.get("num_key_value_heads") or heads) * _head_size(config))


def _params(config: ParsedJson, experts: Experts) -> int:
    """Of a decoder with gated MLPs; norms and biases are left out."""
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * (heads + kv_heads) * _head_size(config)
    sparse = experts.num * (experts.params_each + hidden) + experts.shared_params
    dense = GATED * hidden * (config.get("intermediate_size") or 0)
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    total: int = embeddings + layers * attention + experts.layers * sparse + (layers - experts.layers) * dense
    return total


def _head_size(config: ParsedJson) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _first(config: ParsedJson, *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)

"""A model of the same architecture, small enough to be run in a moment: what an architecture's proof is made on.

`reduced` takes a model's config and makes one of the same class with the same structure (kinds of layers, norms,
biases, position embeddings, experts, grouped heads), a few layers, and sizes of a few dozen. Windows, chunks and top-k
selections become a few tokens long: a real one reaches further than any sequence that a quick check could run.
Invariant: nothing is read but the config. A config that cannot be reduced gives None: see `rollart.model.agreement`.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rollart.types import ParsedJson

VOCAB = 64
WINDOW = 8
"""Reach of a window, in tokens."""
MAX_LAYERS = 6
MAX_PARAMETERS = 2_000_000
"""Larger than any reduced model should be: then some size was not recognised."""
TRIAL_TOKENS = 40
"""A reduced model counts only if transformers itself can run it over this many."""
SPREAD = 0.3
"""Deviation of random weights: with the usual 0.02 a network says nearly the same of everything."""
NOISE = 0.1
"""Added to every parameter, so that none is left at a neutral 0 or 1."""

_HIDDEN, _HEADS, _HEAD, _INNER, _EXPERTS = 32, 4, 8, 48, 8
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "n_words", "vocab_size_per_layer_input", "ngram_vocab_size_base"), VOCAB),
    **dict.fromkeys(
        (
            *("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_dim", "embedding_size", "lru_width"),
            *("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "ple_embed_dim"),
        ),
        _HIDDEN,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
            *("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"),
            *(
                "index_n_heads",
                "indexer_n_heads",
                "linear_num_heads",
                "linear_num_value_heads",
                "swa_num_attention_heads",
            ),
        ),
        _HEADS,
    ),
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(
        (
            *("head_dim", "kv_channels", "dim_head", "d_head", "v_head_dim", "qk_nope_head_dim", "swa_head_dim"),
            *("swa_v_head_dim", "global_head_dim", "attention_head_size", "index_head_dim", "indexer_head_dim"),
            *(
                "linear_head_dim",
                "linear_key_head_dim",
                "linear_value_head_dim",
                "mamba_d_head",
                "mamba_head_dim",
                "mamba_headdim",
            ),
            *("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "ssm_state_size", "state_size"),
            *("hidden_size_per_layer_input", "hc_lowrank"),
        ),
        _HEAD,
    ),
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "rotary_dim": 4,
    "attention_head_dim": 16,
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank", "router_hidden_size", "position_bias_num_buckets"), 16),
    "q_lora_rank": 24,
    **dict.fromkeys(("laurel_rank", "adapter_rank", "gated_norm_rank", "mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp"),
            *("ffn_hidden_size", "dff", "d_inner", "dim_ff", "feed_forward_size", "dense_intermediate_size"),
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
            *("shared_intermediate_size", "expert_ffn_hidden_size"),
        ),
        24,
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), _EXPERTS),
    "zero_expert_num": 2,
    "mamba_d_ssm": 2 * _HIDDEN,
    "num_blocks": 2,
}
"""By name of the key: what it becomes where it is a positive number."""
AT_MOST: dict[str, int] = {
    "floor_scale": WINDOW,
    "index_block_size": WINDOW // 2,
    **dict.fromkeys(("local_attention", "indexer_budget"), 2 * WINDOW),
    **dict.fromkeys(("index_topk_blocks", "indexer_compress_ratio"), 2),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "n_groups", "mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("attn_layer_period", "no_rope_layer_interval", "layer_group_size", "sliding_window_pattern"), 2),
    **dict.fromkeys(("_sliding_window_pattern", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(("topk_group", "attn_layer_offset", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_layer_start_index", "num_kv_shared_layers", "max_window_layers", "num_layers_per_stack"), 1),
    "split_ngram_parts": 4,
}
REACHES = ("window", "topk", "chunk_size", "chunk_length", "block_size", "budget")
"""Parts of the names of keys that say how far, or to how many tokens, attention reaches: they become WINDOW at most."""
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_decoder_layers", "num_encoder_layers"),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads")
SPREADS = ("initializer_range", "init_std", "initializer_factor")
GROWING_ROPES = frozenset({"dynamic", "longrope"})
"""Position embeddings that change when a sequence, any in the batch, grows beyond a limit."""
ROPE_LIMITS = ("original_max_position_embeddings", "max_position_embeddings")
ROPE_LIMIT = 24
BY_LAYER = "per_layer_config"
"""Overrides of single layers, by the layer's number."""


def reduced(config: PreTrainedConfig) -> PreTrainedConfig:
    """The reduced config of a causal LM. Raises whatever its class says of one
    that does not fit together."""
    text = config.get_text_config()
    given: ParsedJson = text.to_dict()
    found = deepcopy(given)
    kept = _kept_layers(given)
    heads = next((given[key] for key in HEADS if isinstance(given.get(key), int)), 1)
    for key, value in given.items():
        found[key] = _reduced_value(key, value, heads, kept, given)
    if isinstance(given.get("sliding_window"), int):
        found["sliding_window"] = min(WINDOW, given["sliding_window"])
    if "expand" in given and "num_heads" in given:  # Mamba2: all heads together are the inner width
        found["num_heads"] = given["expand"] * _HIDDEN // _HEAD
    if given.get("head_dim") and given.get("head_dim") == given.get("qk_rope_head_dim"):
        found["head_dim"] = SIZES["qk_rope_head_dim"]
    if isinstance(wide := given.get("attention_hidden_size"), int):
        found["attention_hidden_size"] = max(1, wide // int(given["hidden_size"])) * _HIDDEN
    if isinstance(rope := given.get("rope_parameters"), dict):
        found["rope_parameters"] = _reduced_rope(rope, found)
        if rope.get("rope_type") in GROWING_ROPES:
            found |= {key: ROPE_LIMIT for key in ROPE_LIMITS if given.get(key)}
    return type(text).from_dict(found)


def reduced_model(config: PreTrainedConfig) -> PreTrainedModel | None:
    """A random model of the reduced config, float32 on the CPU, as transformers runs it; None where it cannot be."""
    try:
        small = reduced(config)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in _build(small).parameters())
        if size > MAX_PARAMETERS:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _build(small)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=NOISE)
                model.train(False)
                logits = cast(Any, model)(
                    input_ids=torch.ones((1, TRIAL_TOKENS), dtype=torch.long), use_cache=False
                ).logits
    except Exception:  # whatever some architecture's own code says of sizes that it was never meant for
        return None
    return model if logits.shape[:2] == (1, TRIAL_TOKENS) and torch.isfinite(logits).all() else None


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
        return model
    raise ValueError(f"{config.model_type}: not a causal LM by itself")


def _kept_layers(given: ParsedJson) -> list[int]:
    """Which layers stay: one of each kind, and at least two."""
    count = next((given[key] for key in LAYERS if isinstance(given.get(key), int)), 0)
    columns = [value for value in given.values() if _is_by_layer(value, count)]
    overrides = {int(layer): value for layer, value in (given.get(BY_LAYER) or {}).items()}
    kept: list[int] = []
    seen: list[Any] = []
    for layer in range(count):
        kind = [column[layer] for column in columns], overrides.get(layer)
        if kind not in seen and len(kept) < MAX_LAYERS:
            seen.append(kind)
            kept.append(layer)
    others = [layer for layer in reversed(range(count)) if layer not in kept]
    return sorted(kept + others[: max(0, 2 - len(kept))])


def _is_by_layer(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and count > 2 and len(value) == count


def _reduced_value(key: str, value: Any, heads: int, kept: Sequence[int], given: ParsedJson) -> Any:
    count = next((given[name] for name in LAYERS if isinstance(given.get(name), int)), 0)
    if isinstance(value, bool) or value is None:
        return value
    if key == BY_LAYER:
        return {
            str(kept.index(int(layer))): {
                name: _reduced_value(name, item, heads, kept, given) for name, item in own.items()
            }
            for layer, own in value.items()
            if int(layer) in kept
        }
    if _is_by_layer(value, count):
        return [_reduced_value(_singular(key), value[layer], heads, kept, given) for layer in kept]
    if isinstance(value, (list, tuple)):
        if key.endswith("token_id"):
            return [1]
        if key.endswith(("ids", "idxs", "layers", "indices")) and all(isinstance(item, int) for item in value):
            return [kept.index(layer) for layer in value if layer in kept]
        return value
    if isinstance(value, float):
        return SPREAD if key in SPREADS else 0.0 if "drop" in key else value
    if not isinstance(value, int) or value <= 0:
        return value
    if key in LAYERS:
        return len(kept)
    if key in KV_HEADS:
        return _HEADS if value >= heads else min(value, 2)
    if key.endswith("token_id"):
        return value if value < VOCAB else 1
    if key in SIZES:
        return SIZES[key]
    return min(value, AT_MOST.get(key, WINDOW if any(part in key for part in REACHES) else value))


def _singular(key: str) -> str:
    """`num_attention_heads_per_layer` is a list of `num_attention_heads`."""
    return key.removesuffix("_per_layer")


def _reduced_rope(rope: ParsedJson, found: ParsedJson) -> ParsedJson:
    """Factors by frequency are as many as frequencies."""
    if any(isinstance(value, dict) for value in rope.values()):  # by kind of layer
        return {kind: _reduced_rope(value, found) if isinstance(value, dict) else value for kind, value in rope.items()}
    size = found.get("head_dim") or found.get("hidden_size", _HIDDEN) // found.get("num_attention_heads", _HEADS)
    count = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
    changed = dict(rope)
    if rope.get("rope_type") in GROWING_ROPES:
        changed |= {key: ROPE_LIMIT for key in ROPE_LIMITS if rope.get(key)}
    for key in ("long_factor", "short_factor"):
        if isinstance(value := rope.get(key), list):
            changed[key] = value[:count]
    if isinstance(rope.get("mrope_section"), list):
        changed["mrope_section"] = [count - 2 * (count // 3), count // 3, count // 3]
    return changed

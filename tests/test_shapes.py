"""What the roofline is told of a real model: its own precision, its own cache, and the experts that a token uses."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.config.shapes import experts_in, shape_from, shape_of
from rollart.hardware import HARDWARE, RUNTIMES, engine_costs
from rollart.launch.pools import build_affinity

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "params_b", "active_b", "kv_bytes"),
    [
        (LLAMA_8B, 8.03, 8.03, 2 * 32 * 8 * 128 * 2),
        (QWEN3_0_6B, 0.596, 0.596, 2 * 28 * 8 * 128 * 2),
        (QWEN3_30B, 30.5, 3.35, 2 * 48 * 4 * 128 * 2),
    ],
    ids=["llama", "qwen3", "qwen3-moe"],
)
def test_published_models_have_their_published_size(
    config: dict[str, Any], params_b: float, active_b: float, kv_bytes: int
) -> None:
    shape = shape_from(config)
    assert shape.params == pytest.approx(params_b * 1e9, rel=0.005)
    assert shape.active_params == pytest.approx(active_b * 1e9, rel=0.01)
    assert (shape.bytes_per_param, shape.kv_bytes_per_token) == (2.0, kv_bytes)


@pytest.mark.parametrize("config", [LLAMA_8B, QWEN3_0_6B, QWEN3_30B], ids=["llama", "qwen3", "qwen3-moe"])
def test_parameters_are_as_many_as_transformers_builds(config: dict[str, Any]) -> None:
    built = transformers.CONFIG_MAPPING[config["model_type"]](**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    assert shape_from(config).params == pytest.approx(model.num_parameters(), rel=0.001)


TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
SAVED: list[tuple[str, dict[str, Any], int, int]] = [
    ("llama", {"num_hidden_layers": 2, "intermediate_size": 48}, 0, 2 * 2 * 2 * 8),
    ("qwen3", {"num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}, 0, 2 * 2 * 2 * 16),
    (
        "qwen3_moe",
        {
            **{"num_hidden_layers": 4, "intermediate_size": 48, "head_dim": 16, "moe_intermediate_size": 24},
            **{"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
        },
        3 * 6 * 3 * 32 * 24,
        2 * 4 * 2 * 16,
    ),
    (
        "qwen2_moe",
        {
            **{"num_hidden_layers": 4, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 8},
            **{"num_experts_per_tok": 2, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 40},
        },
        2 * 6 * 3 * 32 * 24,
        2 * 4 * 2 * 8,
    ),
    (
        "mixtral",
        {"num_hidden_layers": 2, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 1},
        2 * 3 * 3 * 32 * 48,
        2 * 2 * 2 * 8,
    ),
    (
        "deepseek_v3",
        {
            **{"num_hidden_layers": 3, "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8},
            **{"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1},
            **{"topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
            **{"v_head_dim": 8, "num_key_value_heads": 4},
        },
        2 * 6 * 3 * 32 * 24,
        3 * 4 * (4 + 8 + 8),
    ),
]


@pytest.mark.parametrize(("kind", "settings", "unused", "kv_values"), SAVED, ids=[kind for kind, *_ in SAVED])
@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_saved_model_is_counted_as_it_is(
    kind: str, settings: dict[str, Any], unused: int, kv_values: int, dtype: str, num_bytes: int, tmp_path: Path
) -> None:
    config = transformers.CONFIG_MAPPING[kind](**{**TINY, **settings, "tie_word_embeddings": False})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    shape = shape_of(tmp_path)
    counted = sum(param.numel() for param in model.parameters())
    assert shape.params == pytest.approx(counted, abs=64), "buffers apart"
    assert shape.params - shape.active_params == unused
    assert (shape.bytes_per_param, shape.kv_bytes_per_token) == (num_bytes, kv_values * num_bytes)


@pytest.mark.parametrize(
    ("kind", "kv_values"),
    [("gpt2", 2 * 12 * 768), ("ctrl", 2 * 48 * 1280), ("gpt_bigcode", 2 * 12 * 64), ("whisper", 2 * 4 * 384)],
)
def test_sizes_are_found_under_other_names(kind: str, kv_values: int) -> None:
    shape = shape_from(transformers.CONFIG_MAPPING[kind]().to_dict(), params=1000)
    assert (shape.params, shape.active_params) == (1000, 1000)
    assert shape.kv_bytes_per_token == kv_values * shape.bytes_per_param


def test_a_text_model_inside_another_is_found() -> None:
    whole = {"model_type": "some_vision", "text_config": QWEN3_0_6B}
    assert shape_from(whole) == shape_from(QWEN3_0_6B)


def test_a_dense_model_has_no_experts() -> None:
    assert experts_in(LLAMA_8B).num == 0


def test_an_engine_holds_the_model_in_its_own_precision(tmp_path: Path) -> None:
    """A bfloat16 file in a float32 engine is read at four bytes a parameter: affinity is told by pool."""
    job = build_job(
        {
            "name": "job",
            "tasks": [{"name": "a"}],
            "pools": [
                {"name": "one", "hardware": "h20", "engines": {"count": 1}},
                {"name": "two", "hardware": "h20", "engines": {"count": 1}},
                {"name": "rooms", "slots": 8},
            ],
        }
    )
    shape = shape_from(LLAMA_8B)
    speeds = {speed.name: speed.model for speed in build_affinity(job, shape, {"one": 4.0}).pools}
    assert speeds["two"] == shape
    assert speeds["one"].weight_bytes == 2 * shape.weight_bytes
    assert speeds["one"].kv_bytes_per_token == 2 * shape.kv_bytes_per_token
    twice, once = (engine_costs(model, HARDWARE["h20"], 1, RUNTIMES["embedded"]) for model in (speeds["one"], shape))
    assert twice.dense_read_s == pytest.approx(2 * once.dense_read_s)
    assert twice.kv_token_s == pytest.approx(2 * once.kv_token_s)


def test_a_config_that_does_not_say_its_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8}))
    with pytest.raises(KeyError):
        shape_of(tmp_path)

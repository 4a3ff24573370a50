"""Shapes of models that the GPU benchmarks build with random weights, and what the card can do at most.

    python benchmarks/gpu_shapes.py 8b models/8b --tokenizer models/smollm2

writes a model directory of such a shape, for whole jobs, with the tokenizer of another; without `--tokenizer` with one
that has a token for each word of `noise_task.py` and none that ends an answer.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.endless import endless_tokenizer
from benchmarks.noise_task import WORDS

COPY_BYTES_S = 4.3e12
"""Measured copy rate of an H200, bytes read and written."""
MATRIX_FLOPS = 790e12
"""Measured bf16 matrix rate of an H200, on random numbers."""

_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
SHAPES: dict[str, dict[str, int]] = {
    "135m": {  # SmolLM2's sizes
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
        **{"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152},
    },
    "0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "30b-a3b": _QWEN3
    | {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    },
    "small": {
        **{"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500},
    },
    "wide": {
        **{"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 151_936},
    },
}
TIED = frozenset({"135m", "0.6b", "4b", "small", "wide"})


def build(shape: str, device: str, dtype: torch.dtype, positions: int = 40_960) -> PreTrainedModel:
    """A model of this shape with random weights, made on the device."""
    more = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    sizes = SHAPES[shape]
    config: Qwen3Config | Qwen3MoeConfig
    if "num_experts" in sizes:
        config = Qwen3MoeConfig(
            **sizes, **more, max_position_embeddings=positions, tie_word_embeddings=False, norm_topk_prob=True
        )
    else:
        config = Qwen3Config(**sizes, **more, max_position_embeddings=positions, tie_word_embeddings=shape in TIED)
    torch.manual_seed(0)
    kind = Qwen3MoeForCausalLM if "num_experts" in sizes else Qwen3ForCausalLM
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: PreTrainedModel = kind(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def active_parameters(model: PreTrainedModel) -> int:
    """Numbers that one token is multiplied by: without the input embedding, and of experts only those it goes to."""
    config = model.config
    total = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        total -= config.vocab_size * config.hidden_size
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    if experts:
        total -= experts * (config.num_experts - config.num_experts_per_tok) // config.num_experts
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a model directory (default: words, without an end token)")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    model = build(options.shape, options.device, torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(options.folder, max_shard_size="4GB")
    if options.tokenizer is None:
        endless_tokenizer([form for word in WORDS for form in (word, f" {word}")]).save_pretrained(options.folder)
        return
    for file in options.tokenizer.iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, options.folder)


if __name__ == "__main__":
    main()

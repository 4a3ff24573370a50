"""Samples and a tiny model for the trainer's tests."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rollart.types import Batch, Sample, TrajectoryId

VOCAB = 24


def make_sample(
    name: str,
    tokens: list[int],
    mask: list[int],
    *,
    logprobs: list[float] | None = None,
    advantage: float = 1.0,
    version: int = 0,
    domain: str = "bandit",
    member: int = 0,
) -> Sample:
    mask_T = np.array(mask, dtype=np.bool_)
    return Sample(
        trajectory=TrajectoryId(name, member, 0),
        domain=domain,
        tokens=np.array(tokens, dtype=np.int32),
        mask=mask_T,
        logprobs=np.array(logprobs or [-1.0] * len(tokens), dtype=np.float32) * mask_T,
        versions=np.where(mask_T, version, -1).astype(np.int32),
        advantages=(mask_T * advantage).astype(np.float32),
    )


def random_samples(seed: int, count: int, longest: int = 20) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        size = int(rng.integers(2, longest + 1))
        mask = rng.random(size) < 0.5
        mask[0], mask[1] = False, True
        samples.append(
            make_sample(
                f"g{index:04d}",
                rng.integers(0, VOCAB, size).tolist(),
                mask.tolist(),
                logprobs=(-3.2 + rng.normal(0, 0.3, size)).tolist(),
                advantage=float(rng.normal()),
            )
        )
    return samples


def make_batch(step: int, samples: list[Sample]) -> Batch:
    return Batch(step=step, serving=step, groups=(), samples=tuple(samples))


def tiny_model(path: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """A random Qwen3 directory, with a file such as a tokenizer would have beside it."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    auto: Any = AutoModelForCausalLM  # transformers does not type `from_config`
    auto.from_config(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path

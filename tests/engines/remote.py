"""A model, its versions in a file store, and what a remote engine must give for them."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config

from rollart.model.network import adopt, named_weights, probe
from rollart.store.files import FileStore
from rollart.types import Completion, GenerateRequest, WeightManifest
from rollart_recipes.tiny import tiny_tokenizer
from tests.engines.reference import build, check, our_model

CONTEXT_TOKENS = 256
HEAD_SIZE = 32
"""The smallest that vLLM computes on a CPU."""


class Versions:
    """Weights by version, 0 the initial ones, as a trainer would publish them."""

    def __init__(self, directory: Path, *, tied: bool = False) -> None:
        self.path = directory / "model"
        tokenizer = tiny_tokenizer()
        self.config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=HEAD_SIZE,
            intermediate_size=96,
            max_position_embeddings=1024,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=2,
        )
        self.plain: dict[int, PreTrainedModel] = {}
        tokenizer.save_pretrained(self.path)
        self.model(0).save_pretrained(self.path)
        self.store = FileStore(directory / "weights", bucket_bytes=100_000, model_path=self.path, patience_s=0.0)

    def model(self, version: int) -> PreTrainedModel:
        if version not in self.plain:
            torch.manual_seed(version)
            model = self.plain[version] = build(self.config)
            model.train(False)
        return self.plain[version]

    def put(self, version: int) -> WeightManifest:
        ours = adopt(our_model(self.model(version)))
        return self.store.push(version, named_weights(ours), probe(ours))

    def lose(self, manifest: WeightManifest) -> None:
        (self.store.folder(manifest.version).parent / manifest.buckets[0].name).unlink()

    def check(self, asked: GenerateRequest, got: Completion) -> None:
        check(asked, got, self.plain)

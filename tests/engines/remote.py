"""A model, its versions in a store, and what a remote engine must give for them."""

import uuid
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from rollart.model.adapters import Lora, adapter_tensors, add_adapters
from rollart.model.network import adopt, load_weights_, named_weights, probe
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.shm import ShmStore
from rollart.types import Completion, GenerateRequest, WeightManifest
from rollart_recipes.tiny import tiny_tokenizer
from tests.engines.reference import build, check, our_model

CONTEXT_TOKENS = 256
HEAD_SIZE = 32
"""The smallest that vLLM computes on a CPU."""
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LORA = Lora(rank=8, alpha=16.0, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


class Versions:
    """Weights by version, 0 the initial ones, as a trainer would publish them."""

    def __init__(
        self,
        directory: Path,
        *,
        tied: bool = False,
        experts: bool = False,
        lora: Lora | None = None,
        in_memory: bool = False,
    ) -> None:
        """`lora`: versions are adapters of the initial weights. `in_memory`: the store is."""
        self.path = directory / "model"
        self.lora = lora
        tokenizer = tiny_tokenizer()
        kind: Any = Qwen3MoeConfig if experts else Qwen3Config
        self.config: PreTrainedConfig = kind(
            **(EXPERTS if experts else {}),
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
        self.store: BucketStore = (
            ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=100_000)
            if in_memory
            else FileStore(directory / "weights", bucket_bytes=100_000, model_path=self.path, patience_s=0.0)
        )

    def model(self, version: int) -> PreTrainedModel:
        if version not in self.plain:
            torch.manual_seed(version)
            model = self.plain[version] = build(self.config)
            model.train(False)
        return self.plain[version]

    def put(self, version: int) -> WeightManifest:
        if self.lora is not None:
            return self._put_adapters(version, self.lora)
        ours = adopt(our_model(self.model(version)))
        return self.store.push(version, named_weights(ours), probe(ours))

    def _put_adapters(self, version: int, lora: Lora) -> WeightManifest:
        """Drawn at random; the model that is compared with has them merged into its weights."""
        ours = adopt(our_model(self.model(0)))
        add_adapters(ours, lora, seed=version)
        tensors = adapter_tensors(ours)
        torch.manual_seed(version)
        for name, tensor in tensors.items():
            if name.endswith("lora_B"):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
        self.plain[version] = deepcopy(self.model(0))
        load_weights_(self.plain[version], tensors)
        return self.store.push(version, tensors, probe(ours))

    def lose(self, manifest: WeightManifest) -> None:
        (self.store.folder(manifest.version).parent / manifest.buckets[0].name).unlink()

    def check(self, asked: GenerateRequest, got: Completion) -> None:
        check(asked, got, self.plain)

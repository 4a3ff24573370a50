"""What of a training step fits a GPU's memory, estimated before the first one. Called by the trainers."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rollart.config.settings import TrainSettings
from rollart.model.compiled import worth_compiling
from rollart.model.scoring import CHUNK_SHARE, KEPT_SHARE
from rollart.train.optimizer import MANY_WEIGHTS

SPARE = 0.04
"""The share of the card that is left to fragments, libraries and kernels."""
EAGER = 1.6
"""How much more an uncompiled layer keeps for its backward pass."""


def compiles(train: TrainSettings, network: PreTrainedModel) -> bool:
    if train.compile == "auto":
        return train.type == "single" and worth_compiling(network, network.device)
    return train.compile == "on"


def recomputed_layers(train: TrainSettings, network: PreTrainedModel) -> int:
    """How many layers compute their activations again. To be asked when the network is loaded, and not the optimizer:
    those of the others have to fit beside what that will hold."""
    on_gpu = network.device.type == "cuda"
    layers = int(network.config.get_text_config().num_hidden_layers)
    choice = train.recompute or ("selective" if on_gpu and hasattr(network.base_model, "layers") else "none")
    if choice == "none":
        return 0
    if choice == "full":
        return layers
    if not on_gpu:
        return layers // 2
    room = room_bytes(train, network.device) - _optimizer_bytes(train, network) - _head_bytes(train, network)
    kept, again = _layer_bytes(train, network)
    room -= kept + layers * again  # one is computed again at a time
    return max(0, min(layers, layers - int(max(0.0, room) // (kept - again))))


def keep_to_share(train: TrainSettings, device: torch.device) -> None:
    """This process takes no more of the card's memory than `train.memory` says."""
    if train.memory is not None:
        torch.cuda.set_per_process_memory_fraction(train.memory, device)


def room_bytes(train: TrainSettings, device: torch.device) -> float:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    room = float(free_bytes + reserved - allocated)
    if train.memory is not None:
        room = min(room, train.memory * total_bytes - allocated)
    return room - SPARE * total_bytes


def _optimizer_bytes(train: TrainSettings, network: PreTrainedModel) -> int:
    """Gradients, moments, and what masters have beyond bfloat16."""
    own = [param for param in network.parameters() if param.requires_grad]
    weights = sum((param.to_local() if isinstance(param, DTensor) else param).numel() for param in own)
    each = 4
    if train.offload == "none":
        each += 8 if train.moments == "float32" else 4
        if network.dtype != torch.float32 and train.master == "float32":
            each += 2 if weights >= MANY_WEIGHTS else 4
    return each * weights


def _head_bytes(train: TrainSettings, network: PreTrainedModel) -> float:
    """Logits that are kept, a block of them with its gradient, and the head's gradient twice."""
    config: Any = network.config.get_text_config()
    total_bytes = torch.cuda.mem_get_info(network.device)[1]
    logits = min(train.microbatch_tokens * config.vocab_size * _itemsize(train), KEPT_SHARE * total_bytes)
    gradients = 2 * config.vocab_size * config.hidden_size * _itemsize(train)
    return float(logits + 1.5 * CHUNK_SHARE * total_bytes + gradients)


def _layer_bytes(train: TrainSettings, network: PreTrainedModel) -> tuple[float, float]:
    """What a layer keeps of one micro-batch, and what one keeps that is computed again: its input."""
    config: Any = network.config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_size = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    whole = 6 * hidden + 2 * head_size * (heads + 2 * kv_heads) + 3 * inner
    tokens_bytes = train.microbatch_tokens * _itemsize(train)
    return float(tokens_bytes * whole * (1 if compiles(train, network) else EAGER)), float(tokens_bytes * hidden)


def _itemsize(train: TrainSettings) -> int:
    """Of what is computed in, which sharded weights are cast to."""
    return 2 if train.uses_bf16 else 4

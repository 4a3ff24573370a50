"""What of a training step fits a GPU's memory, estimated before the first one. Called by the trainers."""

from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rollart.config.settings import TrainSettings
from rollart.model.compiled import EVERY, worth_compiling
from rollart.model.scoring import CHUNK_SHARE, KEPT_SHARE

Recompute = Literal["none", "selective", "full"]
SPARE = 0.06
"""The share of the card that is left to fragments, libraries and kernels."""
EAGER = 1.6
"""How much more an uncompiled layer keeps for its backward pass."""
CHUNK_COPIES = 6
"""Blocks of logits that exist at a time."""


def compiles(train: TrainSettings, network: PreTrainedModel) -> bool:
    if train.compile == "auto":
        return worth_compiling(network, network.device)
    return train.compile == "on"


def chosen_recompute(train: TrainSettings, network: PreTrainedModel) -> Recompute:
    """As the job says; else the least whose activations fit beside what the optimizer will hold."""
    if train.recompute is not None:
        return train.recompute
    if network.device.type != "cuda" or not hasattr(network.base_model, "layers"):
        return "none"
    free_bytes, total_bytes = torch.cuda.mem_get_info(network.device)
    room = free_bytes - SPARE * total_bytes - _optimizer_bytes(train, network)
    room -= (KEPT_SHARE + CHUNK_COPIES * CHUNK_SHARE) * total_bytes
    choices: tuple[Recompute, ...] = ("none", "selective")
    fits = (choice for choice in choices if _activation_bytes(train, network, choice) <= room)
    return next(fits, "full")


def _optimizer_bytes(train: TrainSettings, network: PreTrainedModel) -> int:
    """Gradients, moments and masters: before the optimizer is made."""
    each = 4
    if train.offload == "none":
        each += 8 if train.moments == "float32" else 4
        each += 4 if network.dtype != torch.float32 and train.master == "float32" else 0
    own = [param for param in network.parameters() if param.requires_grad]
    sizes = [(param.to_local() if isinstance(param, DTensor) else param).numel() for param in own]
    return each * sum(sizes)


def _activation_bytes(train: TrainSettings, network: PreTrainedModel, recompute: Recompute) -> float:
    """Of one micro-batch: what layers keep, in a 16-bit type, beside the one that is computed again."""
    config: Any = network.config.get_text_config()
    heads, hidden, layers = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    head_size = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    whole = 2 * (6 * hidden + 2 * head_size * (heads + 2 * kv_heads) + 3 * inner)
    whole *= (1 if compiles(train, network) else EAGER) * network.dtype.itemsize / 2
    again = len(range(0, layers, EVERY[recompute])) if EVERY[recompute] else 0
    per_token = (layers - again + bool(again)) * whole + again * hidden * network.dtype.itemsize
    return float(per_token * train.microbatch_tokens)

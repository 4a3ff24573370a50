"""LoRA: low-rank adapters on the linear layers of a network, W + scaling * B A, of which only A and B are trained.

Owns: how adapters are put on, read and written (peft's format), and merged into weights. A linear layer with an adapter
keeps its own weight under its own name; `lora_A` (rank, in) and `lora_B` (out, rank) stand beside it.
Invariant: weights are merged from the base as it was loaded, in float32, whatever was merged before: versions that
follow each other do not drift. Called by the trainer, and by whoever loads weights (`rollart.model.network`).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollart.errors import JobError, WeightError
from rollart.types import ParsedJson

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""peft's names."""
PREFIX = "base_model.model."
"""What peft puts before the name of a module."""
A, B, SCALING = ".lora_A", ".lora_B", "lora_scaling"
"""Ends of the names of adapter tensors in a live model, and the name of the factor that travels with them."""
UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Of peft's settings: what changes the meaning of an adapter, where it is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """What adapters look like."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of linear layers, without what stands before the last dot."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer that was given an adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scaling: float

    def forward(self, input: Tensor) -> Tensor:
        low = F.linear(input, self.lora_A)
        return F.linear(input, self.weight, self.bias) + F.linear(low, self.lora_B) * self.lora_scaling

    @classmethod
    def put_on(cls, linear: nn.Linear, lora: Lora, generator: torch.Generator) -> Self:
        """A is drawn, B is 0: at first the layer gives what it gave before."""
        linear.__class__ = cls
        adapted = cast(Self, linear)
        bound = 1 / math.sqrt(linear.in_features)
        first = torch.empty(lora.rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        adapted.lora_A = nn.Parameter(first.to(linear.weight))
        adapted.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, lora.rank))
        adapted.lora_scaling = lora.scaling
        return adapted


def add_adapters(model: PreTrainedModel, lora: Lora, *, seed: int = 0) -> None:
    """Freeze the model, and put adapters on its linear layers. JobError where it has none of a name."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    known = sorted({name.rpartition(".")[2] for name in linears})
    if missing := [target for target in lora.targets if target not in known]:
        raise JobError(
            f"train.lora.targets: {model.config.model_type} has no linear layer {missing[0]!r}; it has "
            f"{', '.join(known) or 'none'}"
        )
    generator = torch.Generator().manual_seed(seed)
    for name, linear in linears.items():
        if name.rpartition(".")[2] in lora.targets:
            LoraLinear.put_on(linear, lora, generator)


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """All that travels at a swap: adapters by their names in the live model, and what they are multiplied with."""
    found: dict[str, Tensor] = {}
    for name, layer in _adapted(model):
        found |= {name + A: layer.lora_A.detach(), name + B: layer.lora_B.detach()}
        found[SCALING] = torch.tensor([layer.lora_scaling], dtype=torch.float32)
    return found


def _adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


# --- merging --------------------------------------------------------------------------------------------------------

_bases: "WeakKeyDictionary[nn.Module, dict[str, Tensor]]" = WeakKeyDictionary()
"""Of models that adapters were merged into: those weights as they were before, in host memory."""


def are_adapters(weights: Mapping[str, Tensor]) -> bool:
    return SCALING in weights.keys()  # noqa: SIM118 - asking a mapping whether it has a name may ask for the tensor


def forget_base(model: nn.Module) -> None:
    """Other weights were loaded: what comes is merged into those."""
    _bases.pop(model, None)


@torch.no_grad()
def merge_adapters_(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Make a model's weights base + scaling * B A, in place, whatever was merged before. All or nothing: adapters that
    do not fit are a WeightError before the first byte is written."""
    params = dict(model.named_parameters())
    for name, merged in merged_weights(model, weights):
        params[name].copy_(merged)


def merged_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model that differs from what was loaded, or did: base + scaling * B A, in memory of its own.
    Raises WeightError before the first one."""
    params = dict(model.named_parameters())
    modules = {name.removesuffix(A) for name in weights if name.endswith(A)}
    if unknown := sorted(name for name in modules if f"{name}.weight" not in params):
        raise WeightError(f"{len(unknown)} adapters are not of this model, the first is on {unknown[0]}")
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(modules):
        if name + B not in weights.keys():  # noqa: SIM118 - see above
            raise WeightError(f"the adapter on {name} has no lora_B")
        pairs[name] = weights[name + A], weights[name + B]
        shape = (len(pairs[name][1]), pairs[name][0].shape[1])
        if shape != tuple(params[f"{name}.weight"].shape):
            raise WeightError(f"the adapter on {name} is of shape {shape}")
    scaling = float(weights[SCALING])
    bases = _bases.setdefault(model, {})
    for name, base in bases.items():
        if name not in pairs:  # an earlier version had an adapter here
            yield f"{name}.weight", base.to(params[f"{name}.weight"].device, copy=True)
    for name, (first, second) in pairs.items():
        weight = params[f"{name}.weight"]
        if name not in bases:
            bases[name] = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda).copy_(weight)
        base = bases[name].to(weight.device, non_blocking=True).float()
        change = second.to(weight.device).float() @ first.to(weight.device).float()
        yield f"{name}.weight", base.add(change, alpha=scaling).to(weight.dtype)


# --- peft's format --------------------------------------------------------------------------------------------------


def write_adapters(folder: Path, model: PreTrainedModel, lora: Lora, base: str) -> None:
    """As peft does. `base` is where the model was read from."""
    _write_peft(folder, adapter_tensors(model), lora, base)


def write_adapter_tensors(folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
    """As `write_adapters`, of what travels at a swap."""
    firsts = {name.removesuffix(A): tensor for name, tensor in tensors.items() if name.endswith(A)}
    rank = len(next(iter(firsts.values())))
    targets = tuple(sorted({name.rpartition(".")[2] for name in firsts}))
    lora = Lora(rank=rank, alpha=float(tensors[SCALING]) * rank, targets=targets)
    _write_peft(folder, tensors, lora, base)


def _write_peft(folder: Path, tensors: Mapping[str, Tensor], lora: Lora, base: str) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    named = {f"{PREFIX}{name}.weight": tensor.cpu().contiguous() for name, tensor in tensors.items() if name != SCALING}
    save_file(named, folder / WEIGHTS, {"format": "pt"})


def read_adapters(folder: Path) -> tuple[Lora, dict[str, Tensor]]:
    """Adapters that peft, or we, have written: what they look like, and their tensors by our names. JobError where they
    are of a kind that we do not compute."""
    config: ParsedJson = json.loads((folder / CONFIG).read_text())
    odd = [key for key in UNSUPPORTED if config.get(key)]
    if config.get("peft_type") != "LORA" or odd or config.get("bias", "none") != "none":
        what = odd[0] if odd else f"peft_type {config.get('peft_type')}, bias {config.get('bias')}"
        raise JobError(f"{folder}: {what} is not supported in an adapter; give a plain LoRA one")
    targets = config["target_modules"]
    if not isinstance(targets, list):
        raise JobError(f"{folder}: target_modules is a pattern ({targets}); give a list of the layers' names")
    lora = Lora(rank=int(config["r"]), alpha=float(config["lora_alpha"]), targets=tuple(targets))
    tensors = {
        name.removeprefix(PREFIX).removesuffix(".weight"): tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    return lora, tensors | {SCALING: torch.tensor([lora.scaling])}


@torch.no_grad()
def load_adapters_(model: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Into the adapters that were put on. JobError where they are of another shape."""
    own = {name: tensor for name, tensor in adapter_tensors(model).items() if name != SCALING}
    given = {name: tensor for name, tensor in tensors.items() if name != SCALING}
    wrong = sorted(own.keys() ^ given.keys()) or [name for name in own if own[name].shape != given[name].shape]
    if wrong:
        raise JobError(f"{folder}: its adapters are not those that train.lora describes; the first is {wrong[0]}")
    for name, tensor in own.items():
        tensor.copy_(given[name])


def same_shape(lora: Lora, other: Lora) -> bool:
    return (lora.rank, lora.alpha, set(lora.targets)) == (other.rank, other.alpha, set(other.targets))


def has_adapters(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """The model that adapters are of. JobError where it is not here."""
    base = Path(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"] or "")
    if not (base / "config.json").is_file():
        raise JobError(
            f"{folder}: its adapters are of {base}, which is not there; bring it, or set base_model_name_or_path in "
            f"{folder / CONFIG} to where it is"
        )
    return base

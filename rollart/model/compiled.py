"""`torch.compile` where it pays: the layers of a network, and chains of element-wise operations on a GPU.

Compiling may fail where torch has no compiler for a machine or an architecture does what it cannot follow: then the
code runs uncompiled, with a warning in the log.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rollart.errors import JobError

Function = TypeVar("Function", bound=Callable[..., Any])
WORTH_PARAMETERS = 50_000_000
"""A network smaller than this is trained before its compiling is over."""


def compiled_on_cuda(function: Function, device: torch.device) -> Function:
    """A function of tensors, compiled once for all lengths of their first dimension; itself on a CPU."""
    return _compiled(function) if device.type == "cuda" else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    allow_fallback()
    faster = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.ndim:
                torch._dynamo.maybe_mark_dynamic(argument, 0)  # type: ignore[no-untyped-call]
        return faster(*arguments)

    return call


def allow_fallback() -> None:
    """What cannot be compiled runs as it is; torch says why in its log."""
    torch._dynamo.config.suppress_errors = True


def worth_compiling(model: PreTrainedModel, device: torch.device) -> bool:
    """`train.compile: auto`. Experts are looped over as the data says, and each case would be compiled by itself."""
    size = sum(param.numel() for param in model.parameters())
    experts = getattr(model.config.get_text_config(), "num_experts", None) or 0
    layers = hasattr(model.base_model, "layers")
    return device.type == "cuda" and size >= WORTH_PARAMETERS and layers and not experts


def run_layers(
    model: PreTrainedModel, *, recompute: int = 0, compile_: bool = False, dynamic: bool | None = True
) -> None:
    """Let the layers run compiled, for all lengths at once; and let the first `recompute` of them compute what their
    backward pass needs when that comes. (The first: what the last ones keep is free again the soonest.)

    Each layer gets a `forward` of its own. Hooks, such as those that gather a sharded layer's weights, stay outside.
    """
    if compile_:
        allow_fallback()
    layers = cast(nn.ModuleList, getattr(model.base_model, "layers", ()))
    if not layers and (recompute or compile_):
        raise JobError(
            f"train.{'compile' if compile_ else 'recompute'}: the layers of {model.config.model_type} are not where "
            "they are looked for (`layers` of its base model); remove it, or choose another model"
        )
    for number, layer in enumerate(layers):
        layer.__dict__.pop("forward", None)
        forward = torch.compile(layer.forward, dynamic=dynamic) if compile_ else layer.forward
        if number < recompute:
            forward = _recomputed(forward)
        if forward is not layer.forward:
            layer.__dict__["forward"] = forward


def forget_compiled() -> None:
    """Before other networks are loaded: compiled code may hold on to the ones that it was made for."""
    torch._dynamo.reset()


def run_plainly(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `run_layers`: a copy of a model would otherwise run the layers of the original."""
    for layer in cast(nn.ModuleList, getattr(model.base_model, "layers", ())):
        layer.__dict__.pop("forward", None)
    return model


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **more)
        # Nothing is drawn at random in a layer, so there is no state of a generator to keep.
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **more)

    return call

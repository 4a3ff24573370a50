"""A version of the weights in exchange for the one in use: how an engine on a CPU swaps.

Beside the steps, a version is made ready: each of its tensors either stays where the store has it on this host
(`adopt`: memory that all engines of the host share, and that nobody writes to while one of its tensors lives), or is
converted into memory of this engine. The swap then exchanges references, and copies nothing.
Invariant: nobody writes to a parameter of such a model in place: it may be the store's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollart.engines.embedded.dense import DenseForward, DenseWeights
from rollart.model.adapters import are_adapters, forget_base, merged_weights
from rollart.model.network import matched


class Exchange:
    """A version that is ready: `backend.Ready`."""

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, dense: DenseForward | None, weights: Mapping[str, Tensor], *, adopt: bool
    ) -> None:
        """Raises WeightError."""
        self._model, self._dense = model, dense
        self._whole = not are_adapters(weights)
        self._live = live_tensors(model)
        if self._whole:
            given = matched(model, weights)
            self._tensors = {name: _like(self._live[name], given.pop(name), adopt=adopt) for name in sorted(given)}
        else:
            self._tensors = dict(merged_weights(model, weights))
        self._dense_weights: DenseWeights | None = None if dense is None else dense.made_of(self._tensors)

    def put_in(self) -> None:
        for name, tensor in self._tensors.items():
            live = self._live[name]
            self._tensors[name], live.data = live.data, tensor
        if self._dense is not None and self._dense_weights is not None:
            self._dense.weights, self._dense_weights = self._dense_weights, self._dense.weights
        if self._whole:
            forget_base(self._model)

    def let_go(self) -> None:
        self._tensors.clear()
        self._dense_weights = None


def live_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The objects that hold a model's weights, by the names of `named_weights` and those tied to them."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {**buffers, **dict(model.named_parameters(remove_duplicate=False))}


def _like(live: Tensor, given: Tensor, *, adopt: bool) -> Tensor:
    """In the type and on the device of the live one."""
    made = given.detach().to(live.device, live.dtype)
    return made if adopt or made.data_ptr() != given.data_ptr() else made.clone()

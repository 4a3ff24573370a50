"""AdamW over float32 master weights, with gradient clipping. Weights may be sharded over ranks (DTensor).

Owns: master weights, accumulated gradients and the optimizer's moments.
Invariant: gradients add up in float32 and updates happen in float32, whatever the network computes in. Where the
network is float32 its own parameters are the masters; where it is bfloat16 they are copies, and the network gets
each update rounded. Called by the trainer.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollart.config.settings import TrainSettings

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq", "step")


class MasterAdamW:
    """One optimizer for one network. `accumulated` gradients come from `loss.backward()`, any number of times."""

    def __init__(self, network: nn.Module) -> None:
        self._params = {name: param for name, param in network.named_parameters() if param.requires_grad}
        self._masters: dict[str, Tensor] = dict(self._params)
        self._grad_clip = 0.0
        for name, param in self._params.items():
            if param.dtype != torch.float32:
                master = param.detach().float().clone().requires_grad_()
                self._masters[name] = master
                param.register_post_accumulate_grad_hook(_move_gradient(master))  # type: ignore[no-untyped-call]
        self._adam = torch.optim.AdamW(list(self._masters.values()), lr=0.0, fused=True)

    def tune(self, train: TrainSettings) -> None:
        """For the updates to come; called before the first."""
        self._grad_clip = train.grad_clip
        for group in self._adam.param_groups:
            group["weight_decay"] = train.weight_decay
            group["eps"] = train.adam_eps

    def zero(self) -> None:
        """Forget the accumulated gradients, and what a backward pass that did not come to its end left behind."""
        self._adam.zero_grad(set_to_none=True)
        for param in self._params.values():
            param.grad = None

    def clip(self) -> float:
        """Clip the accumulated gradients; returns their norm before."""
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        if not grads:
            return 0.0
        norm = torch.nn.utils.get_total_norm(grads)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self._grad_clip > 0 and torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(list(self._masters.values()), self._grad_clip, norm)
        return float(norm)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """One AdamW update of the masters, copied into the network."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.zero()
        for name, param in self._params.items():
            master = self._masters[name]
            if master is not param:
                param.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """All that a restore needs beside the network: moments, and masters where they are copies."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._params[name]:
                found[f"{MASTER}/{name}"] = master.detach()
            state = self._adam.state.get(master, {})
            found |= {f"{key}/{name}": state[key].detach() for key in MOMENTS if key in state}
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave. Raises ValueError where it is of another network."""
        known = {f"{key}/{name}" for key in (MASTER, *MOMENTS) for name in self._masters}
        if strange := sorted(set(tensors) - known):
            raise ValueError(f"optimizer state holds {strange[0]!r}, which this network does not have")
        for name, master in self._masters.items():
            if (copy := tensors.get(f"{MASTER}/{name}")) is not None:
                master.copy_(copy)
                if master is not self._params[name]:
                    self._params[name].copy_(master)
            moments = {key: tensors[f"{key}/{name}"] for key in MOMENTS if f"{key}/{name}" in tensors}
            if moments and moments["exp_avg"].shape != master.shape:
                raise ValueError(f"optimizer state of {name!r} is not of shape {tuple(master.shape)}")
            if moments:
                self._adam.state[master] = {key: value.to(master.device).clone() for key, value in moments.items()}


def _move_gradient(master: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's fresh gradient to its master's, in float32."""

    def move(param: Tensor) -> None:
        assert param.grad is not None
        if master.grad is None:
            master.grad = param.grad.float()
        else:
            master.grad.add_(param.grad)
        param.grad = None

    return move

"""AdamW over master weights, with gradient clipping. Weights may be sharded over ranks (DTensor).

Owns: master weights, accumulated gradients and the optimizer's moments.
Invariant: gradients add up in float32 and updates are computed in float32, whatever the network computes in. Where the
network is float32 its own parameters are the masters. Where it is bfloat16 they are copies, and the network gets each
update rounded; or there are none (`train.master: stochastic`), and each update is rounded at random. Called by the
trainer.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollart.config.settings import TrainSettings
from rollart.model.compiled import compiled_on_cuda
from rollart.model.varlen import on_device
from rollart.train.adamw import adamw_, factors
from rollart.train.offload import on_host, stream

MASTER, STEP = "master", "step"
AVERAGES = ("exp_avg", "exp_avg_sq")
"""Adam's first and second moment, as torch calls them."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLIP_EPS = 1e-6
"""Added to the norm, as torch does."""
SEEDS_PER_STEP = 1 << 16
"""More than twice the tensors of any network."""


class MasterAdamW:
    """One optimizer for one network. Gradients come from `loss.backward()`, any number of times."""

    def __init__(self, network: nn.Module, train: TrainSettings) -> None:
        self._params = {name: param for name, param in network.named_parameters() if param.requires_grad}
        self._masters: dict[str, Tensor] = dict(self._params)
        self._sums: dict[str, Tensor] = {}
        """Gradients, of what the network does not hold in float32 itself."""
        self._grad_clip = 0.0
        self._clip = 1.0
        """What the accumulated gradients are to be multiplied with."""
        for name, param in self._params.items():
            if param.dtype != torch.float32:
                param.register_post_accumulate_grad_hook(self._take_gradient(name))  # type: ignore[no-untyped-call]
                if train.master == "float32":
                    self._masters[name] = param.detach().float().clone()
        offload = train.offload == "optimizer"
        if offload:
            own = {name: on_host(master) for name, master in self._masters.items() if master is not self._params[name]}
            self._masters |= own
        self._averages: _Averages
        if train.master == "float32" and train.moments == "float32" and not offload:
            self._averages = _TorchAverages(self._masters)
        else:
            self._averages = _OwnAverages(self._masters, DTYPES[train.moments], offload=offload)

    def tune(self, train: TrainSettings) -> None:
        """For the updates to come; called before the first."""
        self._grad_clip = train.grad_clip
        self._averages.tune(train.weight_decay, train.adam_eps)

    def zero(self) -> None:
        """Forget the accumulated gradients, and what a backward pass that did not come to its end left behind."""
        self._sums.clear()
        for param in self._params.values():
            param.grad = None

    def clip(self) -> float:
        """The norm of the accumulated gradients. The update clips them to what is allowed."""
        grads = list(self._gradients().values())
        if not grads:
            return 0.0
        norm = torch.nn.utils.get_total_norm(grads)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self._clip = min(1.0, self._grad_clip / (value + CLIP_EPS)) if self._grad_clip > 0 else 1.0
        return value

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """One AdamW update of the masters, copied into the network."""
        grads = self._gradients()
        if grads:
            self._averages.update(grads, self._params, lr, self._clip)
        self.zero()

    def tensors(self) -> dict[str, Tensor]:
        """All that a restore needs beside the network: moments, and masters where they are copies."""
        masters = {
            f"{MASTER}/{name}": master.detach()
            for name, master in self._masters.items()
            if master is not self._params[name]
        }
        return masters | self._averages.tensors()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave, whatever precision it was kept in. Raises ValueError where it is of another
        network."""
        known = {f"{key}/{name}" for key in (MASTER, *AVERAGES, STEP) for name in self._masters}
        if strange := sorted(set(tensors) - known):
            raise ValueError(f"optimizer state holds {strange[0]!r}, which this network does not have")
        for name, param in self._params.items():
            if (copy := tensors.get(f"{MASTER}/{name}")) is not None:
                self._masters[name].copy_(copy)
                if self._masters[name] is not param:
                    param.copy_(copy)
            if (first := tensors.get(f"{AVERAGES[0]}/{name}")) is not None:
                if first.shape != param.shape:
                    raise ValueError(f"optimizer state of {name!r} is not of shape {tuple(param.shape)}")
                self._averages.load(name, {key: tensors[f"{key}/{name}"] for key in (*AVERAGES, STEP)})

    def _gradients(self) -> dict[str, Tensor]:
        found = {name: self._sums.get(name, param.grad) for name, param in self._params.items()}
        return {name: grad for name, grad in found.items() if grad is not None}

    def _take_gradient(self, name: str) -> Callable[[Tensor], None]:
        """A hook that adds a parameter's fresh gradient to its sum, in float32."""

        def take(param: Tensor) -> None:
            assert param.grad is not None
            if name in self._sums:
                self._sums[name].add_(param.grad)
            else:
                self._sums[name] = param.grad.float()
            param.grad = None

        return take


class _Averages(Protocol):
    """Adam's moments, where they are, and the update that is made with them."""

    def tune(self, weight_decay: float, eps: float) -> None: ...

    def update(self, grads: Mapping[str, Tensor], params: Mapping[str, Tensor], lr: float, clip: float) -> None:
        """Of the masters, and of the network's parameters where those are others. Gradients count `clip` times."""

    def tensors(self) -> dict[str, Tensor]: ...

    def load(self, name: str, moments: Mapping[str, Tensor]) -> None: ...


class _TorchAverages:
    """In float32 on the masters' device: torch's own fused AdamW."""

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self._masters = masters
        self._adam = torch.optim.AdamW(list(masters.values()), lr=0.0, fused=True)

    def tune(self, weight_decay: float, eps: float) -> None:
        for group in self._adam.param_groups:
            group["weight_decay"], group["eps"] = weight_decay, eps

    def update(self, grads: Mapping[str, Tensor], params: Mapping[str, Tensor], lr: float, clip: float) -> None:
        if clip < 1:
            for grad in grads.values():
                grad.mul_(clip)
        for name, grad in grads.items():
            self._masters[name].grad = grad
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for name, param in params.items():
            if self._masters[name] is not param:
                param.copy_(self._masters[name])

    def tensors(self) -> dict[str, Tensor]:
        held = {name: self._adam.state.get(master, {}) for name, master in self._masters.items()}
        return {
            f"{key}/{name}": state[key].detach() for name, state in held.items() for key in (*AVERAGES, STEP) if state
        }

    def load(self, name: str, moments: Mapping[str, Tensor]) -> None:
        device = self._masters[name].device
        self._adam.state[self._masters[name]] = {
            key: value.to(device, torch.float32, copy=True) for key, value in moments.items()
        }


class _OwnAverages:
    """In the precision that is asked for, on the device or on the host."""

    def __init__(self, masters: Mapping[str, Tensor], dtype: torch.dtype, *, offload: bool) -> None:
        self._masters = masters
        self._dtype = dtype
        self._offload = offload
        self._held: dict[str, tuple[Tensor, Tensor]] = {}
        self._step = 0
        self._weight_decay, self._eps = 0.0, 1e-8
        self._seeds = {name: 2 * place for place, name in enumerate(masters)}

    def tune(self, weight_decay: float, eps: float) -> None:
        self._weight_decay, self._eps = weight_decay, eps

    def update(self, grads: Mapping[str, Tensor], params: Mapping[str, Tensor], lr: float, clip: float) -> None:
        self._step += 1
        for name in grads:
            if name not in self._held:
                self.load(name, {key: torch.zeros_like(params[name], dtype=self._dtype) for key in AVERAGES})
        device = next(iter(params.values())).device
        shared = on_device(
            factors(self._step, lr=lr, weight_decay=self._weight_decay, eps=self._eps, clip=clip), device
        )
        step = compiled_on_cuda(adamw_, device)

        def one(name: str, master: Tensor, first: Tensor, second: Tensor) -> None:
            seed = torch.full((), self._step * SEEDS_PER_STEP + self._seeds[name], dtype=torch.int32, device=device)
            weight = _flat(master)
            copy = weight if master is params[name] else _flat(params[name])
            step(weight, _flat(first), _flat(second), _flat(grads[name]), shared, seed, copy)

        held = {name: (self._masters[name], *self._held[name]) for name in grads}
        if self._offload:
            stream(held, one, device)
            return
        for name, tensors in held.items():
            one(name, *tensors)

    def tensors(self) -> dict[str, Tensor]:
        found = {
            f"{key}/{name}": held[place] for name, held in self._held.items() for place, key in enumerate(AVERAGES)
        }
        return found | {f"{STEP}/{name}": torch.tensor(float(self._step)) for name in self._held}

    def load(self, name: str, moments: Mapping[str, Tensor]) -> None:
        master = self._masters[name]
        first, second = (moments[key].to(master.device, self._dtype, copy=True) for key in AVERAGES)
        self._held[name] = (on_host(first), on_host(second)) if self._offload else (first, second)
        self._step = int(moments[STEP]) if STEP in moments else self._step


def _flat(tensor: Tensor) -> Tensor:
    """What is here of it, in one row."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).reshape(-1)

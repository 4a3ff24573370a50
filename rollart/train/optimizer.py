"""AdamW over master weights, with gradient clipping. Weights may be sharded over ranks (DTensor).

Owns: master weights, accumulated gradients and the optimizer's moments.
Invariant: gradients add up in float32 and updates are computed in float32, whatever the network computes in. Where the
network is float32 its own parameters are the masters. Where it is bfloat16 they are kept beside it, and the network
gets each update rounded; or there are none (`train.master: stochastic`), and each update is rounded at random. Called
by the trainer.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollart.config.settings import TrainSettings
from rollart.model.compiled import compiled_on_cuda
from rollart.model.varlen import on_device
from rollart.train.adamw import adamw_, factors, joined, split
from rollart.train.offload import stream

MASTER, STEP = "master", "step"
AVERAGES = ("exp_avg", "exp_avg_sq")
"""Adam's first and second moment, as torch calls them."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLIP_EPS = 1e-6
"""Added to the norm, as torch does."""
MANY_WEIGHTS = 1 << 30
"""On a GPU in bfloat16: from this many, masters are kept in 2 bytes beside the weights. With fewer the memory matters
less than torch's fused update, which starts a few kernels where ours starts one for each tensor."""
SEEDS_PER_STEP = 1 << 16
"""More than twice the tensors of any network."""


class MasterAdamW:
    """One optimizer for one network. Gradients come from `loss.backward()`, any number of times."""

    def __init__(self, network: nn.Module, train: TrainSettings) -> None:
        self._params = {name: param for name, param in network.named_parameters() if param.requires_grad}
        self._sums: dict[str, Tensor] = {}
        """Gradients, of what the network does not hold in float32 itself."""
        self._grad_clip = 0.0
        self._clip = 1.0
        """What the accumulated gradients are to be multiplied with."""
        for name, param in self._params.items():
            if param.dtype != torch.float32:
                param.register_post_accumulate_grad_hook(_take_gradient(self._sums, name))  # type: ignore[no-untyped-call]
        plain = train.master == "float32" and train.moments == "float32" and train.offload == "none"
        in_bf16 = [param for param in self._params.values() if param.is_cuda and param.dtype != torch.float32]
        many = sum(param.numel() for param in in_bf16) >= MANY_WEIGHTS
        self._averages: _Averages
        if plain and not many:
            self._averages = _TorchAverages(self._params)
        else:
            self._averages = _OwnAverages(self._params, train)

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
            self._averages.update(grads, lr, self._clip)
        self.zero()

    def tensors(self) -> dict[str, Tensor]:
        """All that a restore needs beside the network: moments, and masters where they are more than its weights."""
        return self._averages.tensors()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave, whatever precision it was kept in. Raises ValueError where it is of another
        network."""
        known = {f"{key}/{name}" for key in (MASTER, *AVERAGES, STEP) for name in self._params}
        if strange := sorted(set(tensors) - known):
            raise ValueError(f"optimizer state holds {strange[0]!r}, which this network does not have")
        for name, param in self._params.items():
            if (master := tensors.get(f"{MASTER}/{name}")) is not None:
                self._averages.load_master(name, master)
            if (first := tensors.get(f"{AVERAGES[0]}/{name}")) is not None:
                if first.shape != param.shape:
                    raise ValueError(f"optimizer state of {name!r} is not of shape {tuple(param.shape)}")
                self._averages.load(name, {key: tensors[f"{key}/{name}"] for key in (*AVERAGES, STEP)})

    def _gradients(self) -> dict[str, Tensor]:
        found = {name: self._sums.get(name, param.grad) for name, param in self._params.items()}
        return {name: grad for name, grad in found.items() if grad is not None}


def _take_gradient(sums: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's fresh gradient to its sum, in float32. It knows nothing but the sums: Python
    cannot free a parameter whose hook leads back to it."""

    def take(param: Tensor) -> None:
        assert param.grad is not None
        if name in sums:
            sums[name].add_(param.grad)
        else:
            sums[name] = param.grad.float()
        param.grad = None

    return take


class _Averages(Protocol):
    """Adam's moments and the masters of a network's parameters, and the update that is made with them."""

    def tune(self, weight_decay: float, eps: float) -> None: ...

    def update(self, grads: Mapping[str, Tensor], lr: float, clip: float) -> None:
        """Of the masters, and of the network. Gradients count `clip` times."""

    def tensors(self) -> dict[str, Tensor]: ...

    def load_master(self, name: str, master: Tensor) -> None: ...

    def load(self, name: str, moments: Mapping[str, Tensor]) -> None: ...


class _TorchAverages:
    """All in float32, beside the network: torch's own fused AdamW."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._masters = {
            name: param if param.dtype == torch.float32 else param.detach().float() for name, param in params.items()
        }
        self._adam = torch.optim.AdamW(list(self._masters.values()), lr=0.0, fused=True)

    def tune(self, weight_decay: float, eps: float) -> None:
        for group in self._adam.param_groups:
            group["weight_decay"], group["eps"] = weight_decay, eps

    def update(self, grads: Mapping[str, Tensor], lr: float, clip: float) -> None:
        if clip < 1:
            for grad in grads.values():
                grad.mul_(clip)
        for name, grad in grads.items():
            self._masters[name].grad = grad
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for name, master in self._copies():
            self._params[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        found = {f"{MASTER}/{name}": master for name, master in self._copies()}
        for name, master in self._masters.items():
            state = self._adam.state.get(master, {})
            found |= {f"{key}/{name}": state[key] for key in (*AVERAGES, STEP) if key in state}
        return found

    def load_master(self, name: str, master: Tensor) -> None:
        self._masters[name].copy_(master)
        self._params[name].copy_(self._masters[name])

    def load(self, name: str, moments: Mapping[str, Tensor]) -> None:
        master = self._masters[name]
        self._adam.state[master] = {
            key: value.to(master.device, torch.float32, copy=True) for key, value in moments.items()
        }

    def _copies(self) -> list[tuple[str, Tensor]]:
        """The masters that are not the network's own parameters."""
        return [(name, master) for name, master in self._masters.items() if master is not self._params[name]]


class _Held(NamedTuple):
    """Of one parameter; sharded where that is, and on the host where it is offloaded."""

    low: Tensor | None
    """What its float32 master has beyond bfloat16."""
    exp_avg: Tensor
    exp_avg_sq: Tensor


class _OwnAverages:
    """In the precision that is asked for, on the device or on the host; masters in 2 bytes more than the weights."""

    def __init__(self, params: Mapping[str, Tensor], train: TrainSettings) -> None:
        self._params = params
        self._dtype = DTYPES[train.moments]
        self._masters = train.master == "float32"
        self._offload = train.offload == "optimizer"
        self._held: dict[str, _Held] = {}
        """From the first update, or a load, on."""
        self._step = 0
        self._weight_decay, self._eps = 0.0, 1e-8
        self._seeds = {name: 2 * place for place, name in enumerate(params)}

    def tune(self, weight_decay: float, eps: float) -> None:
        self._weight_decay, self._eps = weight_decay, eps

    def update(self, grads: Mapping[str, Tensor], lr: float, clip: float) -> None:
        self._step += 1
        device = next(iter(self._params.values())).device
        numbers = factors(self._step, lr=lr, weight_decay=self._weight_decay, eps=self._eps, clip=clip)
        shared, step = on_device(numbers, device), compiled_on_cuda(adamw_, device)

        def one(name: str, low: Tensor | None, first: Tensor, second: Tensor) -> None:
            seed = torch.full((), self._step * SEEDS_PER_STEP + self._seeds[name], dtype=torch.int32, device=device)
            rest = None if low is None else _flat(low)
            step(_flat(self._params[name]), rest, _flat(first), _flat(second), _flat(grads[name]), shared, seed)

        held = {name: self._of(name) for name in grads}
        if self._offload:
            stream(held, one, device)
        else:
            for name, state in held.items():
                one(name, *state)

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, held in self._held.items():
            found |= {f"{AVERAGES[0]}/{name}": held.exp_avg, f"{AVERAGES[1]}/{name}": held.exp_avg_sq}
            found[f"{STEP}/{name}"] = torch.tensor(float(self._step))
            if held.low is not None:
                low = held.low.to(self._params[name].device)
                found[f"{MASTER}/{name}"] = joined(self._params[name].detach(), low).cpu()
        return found

    def load_master(self, name: str, master: Tensor) -> None:
        """A weight that has no master beside it gets what is nearest to it."""
        low = self._of(name).low
        weight = self._params[name]
        if weight.dtype != torch.bfloat16:
            weight.copy_(master)
            return
        high, rest = split(master.to(weight.device, torch.float32))
        weight.copy_(high)
        if low is not None:
            low.copy_(rest)

    def load(self, name: str, moments: Mapping[str, Tensor]) -> None:
        held = self._of(name)
        held.exp_avg.copy_(moments[AVERAGES[0]])
        held.exp_avg_sq.copy_(moments[AVERAGES[1]])
        self._step = int(moments[STEP])

    def _of(self, name: str) -> _Held:
        if name not in self._held:
            param = self._params[name].detach()
            low = None
            if self._masters and param.dtype == torch.bfloat16:
                low = self._zeros(param, torch.int16)
            self._held[name] = _Held(low, self._zeros(param, self._dtype), self._zeros(param, self._dtype))
        return self._held[name]

    def _zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        if self._offload:
            return torch.zeros(like.shape, dtype=dtype, pin_memory=like.is_cuda)
        return torch.zeros_like(like, dtype=dtype)


def _flat(tensor: Tensor) -> Tensor:
    """What is here of it, in one row."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).reshape(-1)

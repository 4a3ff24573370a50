"""What is held in the host's memory: the optimizer's state, where that is asked for, and copies of the weights.

Host memory is pinned, so that the device copies to and from it beside its computing. Called by the trainer.
"""

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNED = 64
"""Each tensor of a copy begins at a multiple of this."""
IN_FLIGHT = 2
"""Tensors whose state is on its way back while the next is computed. Each takes room on the device."""


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """To the device and back. Always the same two: torch keeps freed memory for the stream that it was taken for."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def stream(held: Mapping[str, tuple[Tensor | None, ...]], work: Callable[..., None], device: torch.device) -> None:
    """`work(name, *tensors)` for each, with its tensors brought from the host to the device and back: the next while
    one is computed, and no more than a few at a time. All of it is back when the device has done all of its work."""
    if device.type != "cuda":
        for name, tensors in held.items():
            work(name, *tensors)
        return
    compute, (fetching, storing) = torch.cuda.current_stream(device), _streams(device)
    fetching.wait_stream(compute)
    under_way: deque[torch.cuda.Event] = deque()
    fetched: deque[tuple[str, list[Tensor | None], torch.cuda.Event]] = deque()
    names = list(held)

    def fetch(name: str) -> None:
        with torch.cuda.stream(fetching):
            here = [None if tensor is None else tensor.to(device, non_blocking=True) for tensor in held[name]]
            fetched.append((name, here, fetching.record_event()))

    fetch(names[0])
    for place in range(len(names)):
        if len(under_way) == IN_FLIGHT:
            under_way.popleft().synchronize()
        if place + 1 < len(names):
            fetch(names[place + 1])
        name, here, arrived = fetched.popleft()
        compute.wait_event(arrived)
        work(name, *here)
        storing.wait_event(compute.record_event())
        with torch.cuda.stream(storing):
            for host, changed in zip(held[name], here, strict=True):
                if host is not None and changed is not None:
                    changed.record_stream(compute)
                    changed.record_stream(storing)
                    host.copy_(changed, non_blocking=True)
            under_way.append(storing.record_event())
    compute.wait_stream(storing)


class HostMemory:
    """Memory for copies of the same tensors: one piece for each copy, used again when nobody has the copy any more.

    Many small pieces an allocator neither gives back nor always finds again (measured: half a copy lost in three
    versions), and to touch new memory takes seven times as long as to copy.
    """

    def __init__(self) -> None:
        self._spare: list[_Piece] = []

    def like(self, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, Tensor]:
        """Tensors of these shapes and types, holding whatever was in memory."""
        places, end = dict[str, int](), 0
        for name, (shape, dtype) in wanted.items():
            places[name], end = end, end + -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        raw = torch.from_numpy(self._piece(end))
        return {
            name: raw[places[name] :][: math.prod(shape) * dtype.itemsize].view(dtype).view(torch.Size(shape))
            for name, (shape, dtype) in wanted.items()
        }

    def _piece(self, num_bytes: int) -> "_Piece":
        self._spare[:] = [one for one in self._spare if len(one) == num_bytes]  # others are of no use any more
        piece = self._spare.pop() if self._spare else np.empty(num_bytes, dtype=np.uint8)
        lent = piece.view(_Lent)
        weakref.finalize(lent, self._spare.append, piece).atexit = False
        return lent


_Piece = npt.NDArray[np.uint8]


class _Lent(np.ndarray):  # type: ignore[type-arg]
    """A piece for as long as a tensor of it lives."""


class HostCopy(NamedTuple):
    """Tensors as they were, in host memory; being copied until `ready`."""

    tensors: dict[str, Tensor]
    ready: torch.cuda.Event | None
    """None where nothing is under way."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], memory: HostMemory) -> "HostCopy":
        """Taken beside what the device computes from here on. Nobody may change the tensors before `hold_back`.
        `memory`: for the copies of tensors on a CPU; torch keeps pinned memory to be used again by itself."""
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if device is None:
            copy = memory.like({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
            return cls({name: copy[name].copy_(tensor.detach()) for name, tensor in tensors.items()}, None)
        storing = _streams(device)[1]
        storing.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(storing):
            found = {
                name: _pinned(tensor).copy_(tensor.detach(), non_blocking=True) for name, tensor in tensors.items()
            }
            return cls(found, storing.record_event())

    def hold_back(self) -> None:
        """Let the device change the tensors only when they are copied."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)

    def whole(self) -> dict[str, Tensor]:
        """The tensors, when they are copied."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.tensors


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)

"""Which GPUs of one machine each worker gets. Pure: the machine's devices are an argument.

A worker either names its devices by their numbers, and shares them with all that name the same; or it asks for a
number of its own. Invariant: a device that is a worker's own is nobody else's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDemand:
    """What one worker needs: `own` devices, or those with these numbers."""

    worker: str
    key: str
    """Of the job: what asks for them."""
    own: int = 0
    named: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    own: Mapping[str, tuple[str, ...]]
    """By worker: the devices that it alone may see."""
    shared: Mapping[str, tuple[str, ...]]
    """By worker: those that it names."""
    missing: tuple[str, ...]
    """What cannot be had, a sentence each, with the fix."""


def assign(demands: Sequence[DeviceDemand], devices: Sequence[str]) -> Assignment:
    """`devices`: the machine's, as CUDA_VISIBLE_DEVICES would name them. Given out in the order of `demands`."""
    missing = [
        f"{demand.key}: {demand.worker} would use cuda:{number}, and this machine has {len(devices)} GPUs"
        + (f", cuda:0 to cuda:{len(devices) - 1}; name one of those" if devices else "; name cpu")
        for demand in demands
        for number in demand.named
        if number >= len(devices)
    ]
    named = {number for demand in demands for number in demand.named}
    free = [device for number, device in enumerate(devices) if number not in named]
    asked = [demand for demand in demands if demand.own]
    wanted = sum(demand.own for demand in asked)
    if wanted > len(free):
        each = ", ".join(f"{demand.worker} {demand.own}" for demand in asked)
        keys = ", ".join(dict.fromkeys(demand.key for demand in asked))
        named_here = len(devices) - len(free)
        besides = f", {named_here} of them named by other workers" if named_here else ""
        missing.append(
            f"{keys}: {_count(wanted)} asked for ({each}), and this machine has {len(devices)}{besides}; lower the "
            "counts, or let workers share one by naming it (device: cuda:0)"
        )
        free = []
    own: dict[str, tuple[str, ...]] = {}
    for demand in asked if free else ():
        own[demand.worker], free = tuple(free[: demand.own]), free[demand.own :]
    shared = {
        demand.worker: tuple(devices[number] for number in demand.named if number < len(devices))
        for demand in demands
        if demand.named
    }
    return Assignment(own=own, shared=shared, missing=tuple(missing))


def _count(number: int) -> str:
    return "1 GPU is" if number == 1 else f"{number} GPUs are"

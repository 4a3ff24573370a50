"""Which role runs on which pool, and which pool may stand in for which. Used by the composition root and `check`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.hardware import Hardware
from rollart.types import EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOffer:
    """What one pool of the job has."""

    name: str
    hardware: Hardware
    engines: int = 0
    engine_type: str = ""
    gpus_per_engine: int = 1
    env_slots: int = 0
    prefills_for: str = ""
    """The pool whose engines these are the other half of; they take no requests themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A role and where it runs."""

    role: str
    """`rollout`, `prefill`, `train`, `environments`."""
    pool: str
    hardware: str
    workers: int
    devices: int


def bindings(pools: Sequence[PoolOffer], train_pool: str, train_gpus: int) -> list[Binding]:
    """Every role on its pool, in the order of the job file, training last."""
    bound: list[Binding] = []
    for pool in pools:
        if pool.engines:
            devices = pool.engines * pool.gpus_per_engine
            bound.append(
                Binding(
                    role="prefill" if pool.prefills_for else "rollout",
                    pool=pool.name,
                    hardware=pool.hardware.name,
                    workers=pool.engines,
                    devices=devices,
                )
            )
        if pool.env_slots:
            bound.append(
                Binding(
                    role="environments", pool=pool.name, hardware=pool.hardware.name, workers=pool.env_slots, devices=0
                )
            )
        if pool.name == train_pool:
            bound.append(
                Binding(role="train", pool=pool.name, hardware=pool.hardware.name, workers=1, devices=train_gpus)
            )
    return bound


def engine_specs(pools: Sequence[PoolOffer]) -> list[EngineSpec]:
    """One spec per engine that takes requests, ids `<pool>-<number>`."""
    return [
        EngineSpec(
            id=f"{pool.name}-{number}",
            pool=pool.name,
            type=pool.engine_type,
            hardware=pool.hardware.name,
            gpus=pool.gpus_per_engine,
        )
        for pool in pools
        if not pool.prefills_for
        for number in range(pool.engines)
    ]


def stand_ins(pools: Sequence[PoolOffer]) -> dict[str, list[str]]:
    """For each pool with engines: itself, then the others, the most alike hardware first.

    Alike: the ratio of compute to bandwidth, which decides whether prefill or decode is fast.
    """
    serving = [pool for pool in pools if pool.engines and not pool.prefills_for]

    def apart(one: PoolOffer, other: PoolOffer) -> float:
        return abs(math.log(_intensity(one.hardware)) - math.log(_intensity(other.hardware)))

    order: dict[str, list[str]] = {}
    for pool in serving:
        others = sorted((other for other in serving if other is not pool), key=lambda other: apart(pool, other))
        order[pool.name] = [pool.name, *(other.name for other in others)]
    return order


def _intensity(hardware: Hardware) -> float:
    return hardware.tflops * 1e3 / hardware.bandwidth_gb_s

"""Which role runs on which pool, whether it fits, and which pool may stand in for which. Used by composition roots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.hardware import Hardware
from rollart.types import EngineSpec, Needs, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOffer:
    """What one pool of the job has."""

    name: str
    hardware: Hardware
    engines: int = 0
    most_engines: int = 0
    """In all when machines join; `engines` of them from the start."""
    engine_type: str = ""
    gpus_per_engine: int = 1
    env_slots: int = 0
    prefill_workers: int = 0
    """Of engines whose prefill is apart and on this pool's devices."""
    prefill_gpus: int = 0
    """Of all of them together."""


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
        rows = [
            ("rollout", pool.engines, pool.engines * pool.gpus_per_engine),
            ("prefill", pool.prefill_workers, pool.prefill_gpus),
            ("environments", pool.env_slots, 0),
            ("train", int(pool.name == train_pool), train_gpus),
        ]
        bound += [
            Binding(role=role, pool=pool.name, hardware=pool.hardware.name, workers=workers, devices=devices)
            for role, workers, devices in rows
            if workers
        ]
    return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Workers of one role that a pool must find machines for."""

    pool: str
    role: str
    """`rollout`, `train`, `environments`."""
    count: int
    needs: Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many workers of a demand find a machine, and what is missing for the others."""

    demand: Demand
    placed: int
    missing: str = ""
    """Empty where all are placed."""


def fit(demands: Sequence[Demand], nodes: Sequence[Node]) -> list[Fit]:
    """Place every worker on the fullest machine that still has room for it; in the order of `demands`.

    Those that need most are placed first. Says what can't be placed on these machines, whatever else runs there.
    """
    free = [dict(node.resources) for node in nodes]
    placed = [0] * len(demands)
    order = sorted(range(len(demands)), key=lambda index: (-demands[index].needs.gpus, -demands[index].needs.cpus))
    for index in order:
        needs = demands[index].needs
        for _ in range(demands[index].count):
            able = [at for at, node in enumerate(nodes) if _has_room(node, free[at], needs)]
            if not able:
                break
            at = min(able, key=lambda at: (free[at].get("GPU", 0.0), free[at].get("CPU", 0.0)))
            if not nodes[at].taken_on_trust:
                free[at]["CPU"] = free[at].get("CPU", 0.0) - needs.cpus
                free[at]["GPU"] = free[at].get("GPU", 0.0) - needs.gpus
            placed[index] += 1
    return [
        Fit(demand=demand, placed=number, missing="" if number == demand.count else _missing(demand, nodes))
        for demand, number in zip(demands, placed, strict=True)
    ]


def _has_room(node: Node, free: dict[str, float], needs: Needs) -> bool:
    if node.taken_on_trust:
        return not needs.gpus or bool(node.resources.get("GPU"))
    if needs.resource and not node.resources.get(needs.resource):
        return False
    return free.get("CPU", 0.0) >= needs.cpus and free.get("GPU", 0.0) >= needs.gpus


def _missing(demand: Demand, nodes: Sequence[Node]) -> str:
    needs = demand.needs
    alike = [node for node in nodes if not needs.resource or node.resources.get(needs.resource)]
    if needs.resource and not alike and not any(node.taken_on_trust for node in nodes):
        return f"no machine has the resource {needs.resource!r}"
    wanted = f"{demand.count} times {needs.cpus:g} CPU" + (f" and {needs.gpus:g} GPU" if needs.gpus else "")
    there = [node for node in nodes if node in alike or node.taken_on_trust]
    has = ", ".join(
        f"{node.name}: {node.resources.get('CPU', 0):g} CPU and {node.resources.get('GPU', 0):g} GPU" for node in there
    )
    of_kind = f" with {needs.resource!r}" if needs.resource and alike else ""
    return f"{wanted} are needed beside the other workers, and the machines{of_kind} have {has or 'nothing'}"


def engine_specs(pools: Sequence[PoolOffer]) -> list[EngineSpec]:
    """One spec per engine, ids `<pool>-<number>`."""
    return [_spec(pool, number) for pool in pools for number in range(pool.engines)]


def further_specs(pools: Sequence[PoolOffer]) -> list[EngineSpec]:
    """Of engines that may join while the job runs."""
    return [_spec(pool, number) for pool in pools for number in range(pool.engines, pool.most_engines)]


def _spec(pool: PoolOffer, number: int) -> EngineSpec:
    return EngineSpec(
        id=f"{pool.name}-{number}",
        pool=pool.name,
        type=pool.engine_type,
        hardware=pool.hardware.name,
        gpus=pool.gpus_per_engine,
    )


def stand_ins(pools: Sequence[PoolOffer]) -> dict[str, list[str]]:
    """For each pool with engines: itself, then the others, the most alike hardware first.

    Alike: the ratio of compute to bandwidth, which decides whether prefill or decode is fast.
    """
    serving = [pool for pool in pools if pool.engines]

    def apart(one: PoolOffer, other: PoolOffer) -> float:
        return abs(math.log(_intensity(one.hardware)) - math.log(_intensity(other.hardware)))

    order: dict[str, list[str]] = {}
    for pool in serving:
        others = sorted((other for other in serving if other is not pool), key=lambda other: apart(pool, other))
        order[pool.name] = [pool.name, *(other.name for other in others)]
    return order


def _intensity(hardware: Hardware) -> float:
    return hardware.tflops * 1e3 / hardware.bandwidth_gb_s

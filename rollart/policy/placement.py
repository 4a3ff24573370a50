"""Whether workers fit on machines, and which pool may stand in for which. Used by composition roots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.hardware import Hardware
from rollart.types import Needs, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Workers of one role that a pool must find machines for."""

    pool: str
    role: str
    """`rollout`, `judge`, `shards`, `train`, `environments`."""
    count: int
    needs: Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many workers of a demand find a machine, and what is missing for the others."""

    demand: Demand
    placed: int
    missing: str = ""
    """Empty where all are placed."""


def fit(demands: Sequence[Demand], nodes: Sequence[Node]) -> list[Placement]:
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
        Placement(demand=demand, placed=number, missing="" if number == demand.count else _missing(demand, nodes))
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


def stand_ins(pools: Mapping[str, Hardware]) -> dict[str, list[str]]:
    """For each pool: itself, then the others, the most alike hardware first.

    Alike: the ratio of compute to bandwidth, which decides whether prefill or decode is fast.
    """

    def apart(one: str, other: str) -> float:
        return abs(math.log(_intensity(pools[one])) - math.log(_intensity(pools[other])))

    return {
        name: [name, *sorted((other for other in pools if other != name), key=lambda other: apart(name, other))]
        for name in pools
    }


def _intensity(hardware: Hardware) -> float:
    return hardware.tflops * 1e3 / hardware.bandwidth_gb_s

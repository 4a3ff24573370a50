"""A job as the policies see it: pools, task shares, affinity. The same for a real and a simulated run."""

from collections.abc import Mapping

from rollart.config.job import Job
from rollart.hardware import HARDWARE, ModelShape, Pair
from rollart.policy.affinity import Affinity
from rollart.policy.mix import shares
from rollart.policy.placement import PoolOffer, stand_ins
from rollart.policy.prediction import PoolSpeed


def offers(job: Job) -> list[PoolOffer]:
    prefills = {pool.engines.prefill: pool.name for pool in job.pools if pool.engines and pool.engines.prefill}
    return [
        PoolOffer(
            name=pool.name,
            hardware=HARDWARE[pool.hardware],
            engines=pool.engines.count if pool.engines else 0,
            most_engines=(pool.engines.most or pool.engines.count) if pool.engines else 0,
            engine_type=pool.engines.type if pool.engines else "",
            gpus_per_engine=pool.engines.gpus if pool.engines else 1,
            env_slots=pool.slots or 0,
            prefills_for=prefills.get(pool.name, ""),
        )
        for pool in job.pools
    ]


def task_shares(job: Job) -> dict[str, float]:
    return shares(
        {task.name: task.weight for task in job.tasks},
        {task.name: task.quota for task in job.tasks},
        job.rollout.groups_per_step,
    )


def build_affinity(job: Job, model: ModelShape, held: Mapping[str, float] | None = None) -> Affinity:
    """`held`: by pool, the bytes of a parameter in its engines, where that is not as in `model`."""
    held = held or {}
    target = task_shares(job)
    pairs = pairs_of(job)
    speeds = [
        PoolSpeed(
            name=pool.name,
            hardware=HARDWARE[pool.hardware],
            model=model.held_in(held.get(pool.name, model.bytes_per_param)),
            engines=pool.engines.count,
            gpus=pool.engines.gpus,
            max_batch=pool.engines.max_batch,
            chunk_tokens=job.sim.engine.chunk_tokens,
            overhead_s=job.sim.engine.overhead_s,
            pair=pairs.get(pool.name),
        )
        for pool in job.serving_pools
        if pool.engines
    ]
    return Affinity(
        {task.name: task.affinity for task in job.tasks},
        {task.name: target[task.name] * job.rollout.groups_per_step * task.group_size for task in job.tasks},
        {task.name: task.group_size for task in job.tasks},
        speeds,
        stand_ins(offers(job)),
        ahead=job.rollout.staleness + 0.5,
    )


def pairs_of(job: Job) -> dict[str, Pair]:
    """Of each pool whose engines are pairs: the half that prefills."""
    pools = {pool.name: pool for pool in job.pools}
    pairs: dict[str, Pair] = {}
    for pool in job.pools:
        if pool.engines is None or pool.engines.prefill is None:
            continue
        other = pools[pool.engines.prefill]
        assert other.engines is not None
        pairs[pool.name] = Pair(
            hardware=HARDWARE[other.hardware],
            gpus=other.engines.gpus,
            link_bytes_per_s=pool.engines.kv_link_gb_s * 1e9,
        )
    return pairs

"""A job as the policies see it: pools, task shares, affinity. The same for a real and a simulated run."""

from collections import Counter
from collections.abc import Mapping

from rollart.config.job import Job
from rollart.hardware import HARDWARE, Disaggregated, ModelShape
from rollart.policy.affinity import Affinity
from rollart.policy.mix import shares
from rollart.policy.placement import PoolOffer, stand_ins
from rollart.policy.prediction import PoolSpeed


def offers(job: Job) -> list[PoolOffer]:
    prefilling: Counter[str] = Counter()
    prefill_gpus: Counter[str] = Counter()
    for pool in job.engine_pools:
        other, engines = job.prefill_pool(pool), pool.engines
        if other and engines and engines.prefill:
            prefilling[other.name] += engines.count * engines.prefill.workers
            prefill_gpus[other.name] += engines.count * engines.prefill.workers * engines.prefill.gpus
    return [
        PoolOffer(
            name=pool.name,
            hardware=HARDWARE[pool.hardware],
            engines=pool.engines.count if pool.engines else 0,
            most_engines=(pool.engines.most or pool.engines.count) if pool.engines else 0,
            engine_type=pool.engines.type if pool.engines else "",
            gpus_per_engine=pool.engines.decode_gpus if pool.engines else 1,
            env_slots=pool.slots or 0,
            prefill_workers=prefilling[pool.name],
            prefill_gpus=prefill_gpus[pool.name],
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
    apart = disaggregated(job)
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
            disaggregated=apart.get(pool.name),
        )
        for pool in job.engine_pools
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


def disaggregated(job: Job) -> dict[str, Disaggregated]:
    """By pool, where its engines have prefill and decode apart."""
    found: dict[str, Disaggregated] = {}
    for pool in job.engine_pools:
        other = job.prefill_pool(pool)
        if other and pool.engines and (prefill := pool.engines.prefill):
            found[pool.name] = Disaggregated(
                hardware=HARDWARE[other.hardware],
                gpus=prefill.gpus,
                workers=prefill.workers,
                decoders=prefill.decoders,
                link_bytes_per_s=prefill.link_gb_s * 1e9,
            )
    return found

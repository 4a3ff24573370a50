"""A job's pools as policies and reports see them: engines, roles, task shares, affinity. The same for a real and a
simulated run."""

from collections.abc import Mapping
from typing import NamedTuple

from rollart.config.job import Job
from rollart.config.settings import PoolSettings, RewardSettings
from rollart.control.judges import JudgePool
from rollart.hardware import Disaggregated, Hardware, ModelShape
from rollart.policy.affinity import Affinity
from rollart.policy.mix import shares
from rollart.policy.placement import stand_ins
from rollart.policy.prediction import PoolSpeed
from rollart.policy.sharding import part, part_of
from rollart.types import EngineSpec


class Binding(NamedTuple):
    """A role and where it runs."""

    role: str
    """`rollout`, `judge`, `prefill`, `environments`, `train`."""
    pool: str
    hardware: str
    workers: int
    devices: int


def bindings(job: Job) -> list[Binding]:
    """Every role on its pool, in the order of the job file."""
    found: list[Binding] = []
    for pool in job.pools:
        engines = pool.engines.count if pool.engines else 0
        decode_gpus = engines * pool.engines.decode_gpus if pool.engines else 0
        served = [other.engines for other in job.pools if other.engines and job.prefill_pool(other) is pool]
        prefilling = [(each.count * each.prefill.workers, each.prefill.gpus) for each in served if each.prefill]
        rows = [
            ("judge" if pool.judge else "rollout", engines, decode_gpus),
            ("prefill", sum(workers for workers, _ in prefilling), sum(workers * gpus for workers, gpus in prefilling)),
            ("environments", pool.slots or 0, 0),
            ("train", int(pool is job.train_pool), 0 if job.train.colocated else job.train.gpus),
        ]
        found += [
            Binding(role, pool.name, pool.hardware, workers, devices) for role, workers, devices in rows if workers
        ]
    return found


def engine_specs(job: Job, *, further: bool = False, shard: int | None = None) -> tuple[EngineSpec, ...]:
    """One for each engine of the policy that the job begins with, or for each that may join; ids `<pool>-<number>`.
    `shard`: those of this one."""
    return tuple(
        spec
        for pool, engines in job.engines
        for spec in _of_shard(
            job, _specs(pool, range(engines.count, engines.most or 0) if further else range(engines.count)), shard
        )
    )


def judges_of(job: Job, *, shard: int | None = None) -> dict[str, JudgePool]:
    """By pool."""
    return {
        pool.name: JudgePool(_of_shard(job, _specs(pool, range(pool.engines.count)), shard))
        for pool in job.judge_pools
        if pool.engines
    }


def shard_job(job: Job, shard: int) -> Job:
    """The job as this shard sees it: with its part of what is bounded for all together."""

    def own(amount: int) -> int:
        return max(1, part_of(amount, shard, job.cluster.coordinators))

    def fewer(reward: RewardSettings) -> RewardSettings:
        return reward.model_copy(update={"workers": own(reward.workers), "concurrency": own(reward.concurrency)})

    pools = [pool.model_copy(update={"slots": own(pool.slots)}) if pool.slots else pool for pool in job.pools]
    tasks = [task.model_copy(update={"rewards": tuple(map(fewer, task.rewards))}) for task in job.tasks]
    return job.model_copy(update={"pools": tuple(pools), "tasks": tuple(tasks), "rewards": fewer(job.rewards)})


def _of_shard(job: Job, specs: tuple[EngineSpec, ...], shard: int | None) -> tuple[EngineSpec, ...]:
    return specs if shard is None else part(specs, shard, job.cluster.coordinators)


def _specs(pool: PoolSettings, numbers: range) -> tuple[EngineSpec, ...]:
    assert pool.engines is not None
    kind, gpus = pool.engines.type, pool.engines.decode_gpus
    return tuple(
        EngineSpec(id=f"{pool.name}-{number}", pool=pool.name, type=kind, hardware=pool.hardware, gpus=gpus)
        for number in numbers
    )


def pool_stand_ins(job: Job) -> dict[str, list[str]]:
    return stand_ins({pool.name: job.kinds[pool.hardware] for pool in job.engine_pools})


def hardware_of(job: Job, pool: PoolSettings) -> Hardware:
    """What one device of this pool's engines is: the whole, or their share of it."""
    hardware = job.kinds[pool.hardware]
    return hardware.part(pool.engines.share) if pool.engines and pool.engines.share else hardware


def kv_bound(pool: PoolSettings) -> int | None:
    """Tokens that the cache of each of its engines is bounded to; None: as many as there is memory for."""
    engines = pool.engines
    if engines is None or engines.type != "embedded":
        return None
    on_cpu = pool.hardware == "cpu" and engines.device == "cpu"
    return engines.cpu_kv_tokens if on_cpu else engines.kv_tokens


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
            hardware=hardware_of(job, pool),
            model=model.held_in(held.get(pool.name, model.bytes_per_param)),
            engines=pool.engines.count,
            gpus=pool.engines.gpus,
            max_batch=pool.engines.max_batch,
            chunk_tokens=job.sim.engine.chunk_tokens,
            runtime=job.sim.engine.runtime(pool.engines.type),
            disaggregated=apart.get(pool.name),
            kv_tokens=kv_bound(pool),
            parallel=pool.engines.parallel,
        )
        for pool in job.engine_pools
        if pool.engines
    ]
    return Affinity(
        {task.name: task.affinity for task in job.tasks},
        {task.name: target[task.name] * job.rollout.groups_per_step * task.group_size for task in job.tasks},
        {task.name: task.group_size for task in job.tasks},
        speeds,
        pool_stand_ins(job),
        ahead=job.rollout.staleness + 0.5,
    )


def disaggregated(job: Job) -> dict[str, Disaggregated]:
    """By pool, where its engines have prefill and decode apart."""
    found: dict[str, Disaggregated] = {}
    for pool in job.pools:
        other = job.prefill_pool(pool)
        if other and pool.engines and (prefill := pool.engines.prefill):
            hardware = job.kinds[other.hardware]
            found[pool.name] = Disaggregated(
                hardware=hardware.part(prefill.share) if prefill.share else hardware,
                gpus=prefill.gpus,
                workers=prefill.workers,
                decoders=prefill.decoders,
                link_bytes_per_s=prefill.link_gb_s * 1e9,
            )
    return found

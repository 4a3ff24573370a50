"""From a job to everything outside the control plane, simulated: every port's adapter on the virtual clock.

`rollart.launch.real` is the other world. What both need to see of a job (offers, shares, affinity) is here.
"""

from collections.abc import Mapping

from rollart.config.job import Job
from rollart.config.sim import SimTaskSettings
from rollart.control.coordinator import World
from rollart.envs.batched import BatchedHost, BatchedRewards, Lockstep
from rollart.events.log import EventLog
from rollart.hardware import HARDWARE, MODELS, ModelShape, Pair
from rollart.policy.affinity import Affinity
from rollart.policy.mix import shares
from rollart.policy.placement import PoolOffer, engine_specs, further_specs, stand_ins
from rollart.policy.prediction import PoolSpeed
from rollart.ports import EnvHost, RewardBackend
from rollart.sim.dice import Dice
from rollart.sim.engine import EngineWorld
from rollart.sim.envs import SimHost, SimTaskSet, SimTokenizer
from rollart.sim.faults import Faults
from rollart.sim.links import Disk, SimLink, SimStore
from rollart.sim.rewards import SimRewards
from rollart.sim.trainer import SimCluster, SimJournal


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


def simulated_world(
    job: Job, log: EventLog, faults: Faults, journal: SimJournal, push: SimLink, pull: SimLink, disk: Disk | None = None
) -> World:
    """Every port of the job, simulated. `disk`: what the trainer writes to; the journal has its own."""
    sim = job.sim
    dice = Dice(job.seed)
    tasks = {task.name: sim.tasks.get(task.name, SimTaskSettings()) for task in job.tasks}
    store = SimStore(log)
    engines = EngineWorld(
        model=MODELS[sim.model],
        hardware={pool.name: HARDWARE[pool.hardware] for pool in job.pools},
        settings=sim.engine,
        max_batch={pool.name: pool.engines.max_batch for pool in job.pools if pool.engines},
        pairs=pairs_of(job),
        tasks=tasks,
        dice=dice,
        store=store,
        pull=pull,
        log=log,
        faults=faults,
    )
    cluster = SimCluster(
        engines,
        sim.train,
        HARDWARE[job.train_pool.hardware],
        job.train.gpus,
        job.weights.bucket_mb * 1e6,
        push,
        faults,
        journal.noted,
        disk,
    )
    slots = sum(pool.slots or 0 for pool in job.pools)
    host: EnvHost = SimHost(slots, tasks, dice, faults)
    rewards: RewardBackend = SimRewards(job.rewards, sim.reward, tasks, dice, faults, log)
    if job.rollout.stepping == "batched":
        lockstep = Lockstep()
        host = BatchedHost(host, lockstep, reset_s=job.limits.reset_s, step_s=job.limits.step_s)
        rewards = BatchedRewards(rewards, lockstep, timeout_s=job.rewards.timeout_s)
    return World(
        cluster=cluster,
        engines=tuple(engine_specs(offers(job))),
        host=host,
        rewards=rewards,
        tokenizer=SimTokenizer(),
        task_sets={task.name: SimTaskSet(task.name, job.seed, faults) for task in job.tasks},
        store=store,
        journal=journal,
        affinity=build_affinity(job, MODELS[sim.model]),
        further_engines=tuple(further_specs(offers(job))),
    )

"""From a job to everything outside the control plane: the adapters of each world, behind ports.

`simulated_world` is on the virtual clock; `real_world` has local processes, a Hugging Face model, real environments.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.config import Job, SimTaskSettings
from rollart.control.coordinator import World
from rollart.envs.batched import BatchedHost, BatchedRewards, Lockstep
from rollart.errors import JobError
from rollart.events import EventLog
from rollart.hardware import HARDWARE, MODELS, ModelShape
from rollart.policy.affinity import Affinity, PoolSpeed
from rollart.policy.mix import shares
from rollart.policy.placement import PoolOffer, engine_specs, stand_ins
from rollart.ports import EnvHost, Journal, RewardBackend
from rollart.sim.dice import Dice
from rollart.sim.engine import EngineWorld
from rollart.sim.envs import SimHost, SimTaskSet, SimTokenizer
from rollart.sim.faults import Faults
from rollart.sim.links import Link, SimStore
from rollart.sim.rewards import SimRewards
from rollart.sim.trainer import SimCluster


def offers(job: Job) -> list[PoolOffer]:
    return [
        PoolOffer(
            name=pool.name,
            hardware=HARDWARE[pool.hardware],
            engines=pool.engines.count if pool.engines else 0,
            engine_type=pool.engines.type if pool.engines else "",
            gpus_per_engine=pool.engines.gpus if pool.engines else 1,
            env_slots=pool.slots or 0,
        )
        for pool in job.pools
    ]


def task_shares(job: Job) -> dict[str, float]:
    return shares(
        {task.name: task.weight for task in job.tasks},
        {task.name: task.quota for task in job.tasks},
        job.rollout.groups_per_step,
    )


def build_affinity(job: Job, model: ModelShape) -> Affinity:
    target = task_shares(job)
    speeds = [
        PoolSpeed(
            name=pool.name,
            hardware=HARDWARE[pool.hardware],
            model=model,
            engines=pool.engines.count,
            gpus=pool.engines.gpus,
            max_batch=pool.engines.max_batch,
        )
        for pool in job.pools
        if pool.engines
    ]
    return Affinity(
        {task.name: task.affinity for task in job.tasks},
        {task.name: target[task.name] * job.rollout.groups_per_step * task.group_size for task in job.tasks},
        speeds,
        stand_ins(offers(job)),
    )


def simulated_world(job: Job, log: EventLog, faults: Faults, journal: Journal, push: Link, pull: Link) -> World:
    """Every port of the job, simulated."""
    sim = job.sim
    dice = Dice(job.seed)
    tasks = {task.name: sim.tasks.get(task.name, SimTaskSettings()) for task in job.tasks}
    store = SimStore(log)
    engines = EngineWorld(
        model=MODELS[sim.model],
        hardware={pool.name: HARDWARE[pool.hardware] for pool in job.pools},
        settings=sim.engine,
        max_batch={pool.name: pool.engines.max_batch for pool in job.pools if pool.engines},
        tasks=tasks,
        dice=dice,
        store=store,
        pull=pull,
        log=log,
    )
    cluster = SimCluster(
        engines,
        sim.train,
        HARDWARE[job.train_pool.hardware],
        job.train.gpus,
        job.weights.bucket_mb * 1e6,
        push,
        faults,
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
        task_sets={task.name: SimTaskSet(task.name, job.seed) for task in job.tasks},
        store=store,
        journal=journal,
        affinity=build_affinity(job, MODELS[sim.model]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RealWorld:
    """The ports of a real job, and what must be closed at its end."""

    world: World
    close: "Callable[[], Any]"
    """Awaitable: ends every process and frees shared memory."""


def real_world(job: Job, out: Path, journal: Journal) -> RealWorld:
    """Local processes for engines, trainer, environments and rewards; weights through shared memory."""
    from rollart.cluster.local import LocalCluster
    from rollart.envs.inline import InlineEnvHost
    from rollart.envs.process import ProcessEnvHost
    from rollart.models.tokenizer import ChatTokenizer
    from rollart.tasks.load import load_task_set, reward_of
    from rollart.weights.shm import ShmStore

    model_path = Path(job.model.path)
    uses = {task.name: task.use for task in job.tasks}
    task_sets = {task.name: load_task_set(task.use, seed=job.seed, domain=task.name) for task in job.tasks}
    functions = {name: reward_of(use) for name, use in uses.items()}
    tokenizer = ChatTokenizer(model_path)
    run_id = f"{job.name}-{os.getpid()}"
    bucket_bytes = job.weights.bucket_mb * 1_000_000
    store = ShmStore(run_id, bucket_bytes=bucket_bytes)
    cluster = LocalCluster(
        out / "logs", _engine_setups(job, run_id, bucket_bytes), _trainer_setup(job, out, run_id, bucket_bytes)
    )
    slots = sum(pool.slots or 0 for pool in job.pools)
    isolated = any(pool.slots and pool.isolation == "process" for pool in job.pools)
    processes: ProcessEnvHost | InlineEnvHost = (
        ProcessEnvHost(uses, slots=slots, log_dir=out / "logs", seed=job.seed)
        if isolated
        else InlineEnvHost(task_sets, slots=slots)
    )
    scorer = _rewards(job, functions, tokenizer.decode, out / "logs")
    host: EnvHost = processes
    rewards: RewardBackend = scorer
    if job.rollout.stepping == "batched":
        lockstep = Lockstep()
        host = BatchedHost(host, lockstep, reset_s=job.limits.reset_s, step_s=job.limits.step_s)
        rewards = BatchedRewards(rewards, lockstep, timeout_s=job.rewards.timeout_s)

    async def close() -> None:
        await cluster.close()
        await processes.close()
        await scorer.close()
        store.close()

    world = World(
        cluster=cluster,
        engines=tuple(engine_specs(offers(job))),
        host=host,
        rewards=rewards,
        tokenizer=tokenizer,
        task_sets=task_sets,
        store=store,
        journal=journal,
        affinity=build_affinity(job, _shape_of(model_path)),
    )
    return RealWorld(world=world, close=close)


def check_real(job: Job) -> None:
    """Raises JobError for what a real run of this job would lack, before anything is written or started."""
    from rollart.tasks.load import load_task_set

    refuse_what_is_not_there(job)
    for position, task in enumerate(job.tasks):
        if not task.use:
            raise JobError(f"tasks.{position}.use: missing; name the task set, such as rollart.tasks.frozen_lake")
        load_task_set(task.use, seed=job.seed, domain=task.name)
    if not (Path(job.model.path) / "config.json").exists():
        raise JobError(
            f"model.path: {job.model.path} is not a Hugging Face directory (it has no config.json); "
            f"make one with: rollart model tiny {job.model.path}"
        )


def refuse_what_is_not_there(job: Job) -> None:
    """A key that `rollart train` would ignore is an error, and not a surprise."""
    wanted = [
        ("cluster.type", job.cluster.type, "local"),
        ("weights.type", job.weights.type, "shm"),
        *(
            (f"pools.{pool.name}.engines.type", pool.engines.type, "embedded")
            for pool in job.pools
            if pool.engines is not None
        ),
    ]
    for key, given, there in wanted:
        if given != there:
            raise JobError(f"{key}: `rollart train` has no {given!r} yet; set {key}={there}, or use `rollart sim`")
    if job.train.type == "single" and job.train.gpus > 1:
        raise JobError(
            f"train.gpus: {job.train.gpus}, but train.type single uses one; set train.type=fsdp2, or train.gpus=1"
        )
    if len({pool.isolation for pool in job.pools if pool.slots}) > 1:
        raise JobError("pools: environment pools of both isolations in one job are not there yet; use one of them")


def _rewards(job: Job, functions: Mapping[str, str], decode: Any, log_dir: Path) -> Any:
    settings = job.rewards
    if settings.type == "http":
        from rollart.rewards.http import HttpRewards

        assert settings.url is not None
        return HttpRewards(
            settings.url,
            decode=decode,
            timeout_s=settings.timeout_s,
            concurrency=settings.concurrency,
            token=os.environ.get("ROLLART_REWARD_TOKEN"),
        )
    from rollart.rewards.local import LocalRewards

    return LocalRewards(
        functions, decode=decode, log_dir=log_dir, workers=settings.workers, timeout_s=settings.timeout_s
    )


def _engine_setups(job: Job, run_id: str, bucket_bytes: int) -> dict[str, dict[str, Any]]:
    return {
        pool.name: {
            "model": job.model.path,
            "run_id": run_id,
            "bucket_bytes": bucket_bytes,
            "threads": pool.engines.threads,
            "device": pool.engines.device,
            "settings": {
                "kv_tokens": pool.engines.kv_tokens,
                "max_batch": pool.engines.max_batch,
                "keep_kv": pool.engines.keep_kv,
                "seed": job.seed,
            },
        }
        for pool in job.pools
        if pool.engines
    }


def _trainer_setup(job: Job, out: Path, run_id: str, bucket_bytes: int) -> dict[str, Any]:
    train = job.train
    return {
        "type": train.type,
        "world_size": train.gpus,
        "log_dir": str(out / "logs"),
        "run_id": run_id,
        "bucket_bytes": bucket_bytes,
        "threads": train.threads,
        "settings": {
            "model_path": job.model.path,
            "checkpoint_dir": str(out / "checkpoints"),
            "lr": train.lr,
            "warmup_steps": train.warmup_steps,
            "lr_decay": train.lr_decay,
            "steps": train.steps,
            "weight_decay": train.weight_decay,
            "grad_clip": train.grad_clip,
            "microbatch_tokens": train.microbatch_tokens,
            "bf16": train.bf16,
            "device": train.device,
            "threads": train.threads,
            "skip_zero_variance": job.rollout.zero_variance == "skip",
            "temperatures": {task.name: task.temperature for task in job.tasks},
        },
        "loss": {
            "algorithm": train.algorithm,
            "eps_low": train.eps_low,
            "eps_high": train.eps_high,
            "correction": train.correction,
            "weight_cap": train.weight_cap,
            "kl_coef": train.kl_coef,
            "entropy_coef": train.entropy_coef,
        },
    }


def _shape_of(model_path: Path) -> ModelShape:
    """What the roofline needs, from the model's own config."""
    import json

    config = json.loads((model_path / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_size = config.get("head_dim") or hidden // heads
    size = sum(path.stat().st_size for path in model_path.glob("*.safetensors"))
    return ModelShape(
        params=size / 4,
        active_params=size / 4,
        kv_bytes_per_token=2 * layers * kv_heads * head_size * 4,
        bytes_per_param=4,
    )

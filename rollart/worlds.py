"""From a job to everything outside the control plane: the adapters of each world, behind ports.

`simulated_world` is on the virtual clock; `real_world` has real workers, a Hugging Face model, real environments.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rollart.config import EngineSettings, Job, PoolSettings, SimTaskSettings
from rollart.control.coordinator import World
from rollart.envs.batched import BatchedHost, BatchedRewards, Lockstep
from rollart.envs.delayed import DelayedHost
from rollart.errors import JobError
from rollart.events import EventLog
from rollart.hardware import HARDWARE, MODELS, ModelShape, Pair
from rollart.policy.affinity import Affinity
from rollart.policy.mix import shares
from rollart.policy.placement import Demand, PoolOffer, engine_specs, further_specs, stand_ins
from rollart.policy.prediction import PoolSpeed
from rollart.ports import Cluster, EnvHost, Journal, RewardBackend
from rollart.sim.dice import Dice
from rollart.sim.engine import EngineWorld
from rollart.sim.envs import SimHost, SimTaskSet, SimTokenizer
from rollart.sim.faults import Faults
from rollart.sim.links import Link, SimStore
from rollart.sim.rewards import SimRewards
from rollart.sim.trainer import SimCluster
from rollart.types import Needs

if TYPE_CHECKING:
    from rollart.cluster.ray import RayCluster, RayWorker
    from rollart.envs.inline import InlineEnvHost
    from rollart.envs.process import ProcessEnvHost
    from rollart.envs.remote import RemoteEnvHost
    from rollart.tasks.api import TaskSet

ENV_WORKER_CPUS = 1.0
"""What an environment worker asks of a cluster, whatever its slots: most environments wait most of the time."""


STORES = "stores.jsonl"
"""In the run directory while it runs: where its weights are. A resumed run removes what a killed one left there."""


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


def demands(job: Job) -> list[Demand]:
    """The workers that need machines, pool by pool. Engines that may join later ask for none now."""
    found: list[Demand] = []
    for pool in job.pools:
        kind = _kind_of(pool)
        if pool.engines:
            engines = pool.engines
            # a server takes what hardware its pool has; the embedded engine is told
            on_cpu = engines.device == "cpu" if engines.type == "embedded" else pool.hardware == "cpu"
            needs = _needs(kind, engines.threads, engines.gpus, on_cpu=on_cpu)
            found.append(Demand(pool=pool.name, role="rollout", count=engines.count, needs=needs))
        if pool.slots:
            workers = math.ceil(pool.slots / pool.slots_per_worker)
            needs = Needs(resource=kind, cpus=ENV_WORKER_CPUS)
            found.append(Demand(pool=pool.name, role="environments", count=workers, needs=needs))
        if pool is job.train_pool:
            needs = _needs(kind, job.train.threads, job.train.gpus, on_cpu=job.train.device == "cpu")
            found.append(Demand(pool=pool.name, role="train", count=1, needs=needs))
    return found


def _needs(kind: str, threads: int, gpus: int, *, on_cpu: bool) -> Needs:
    return Needs(resource=kind, cpus=float(threads), gpus=0.0 if on_cpu else float(gpus))


def _kind_of(pool: PoolSettings) -> str:
    """The resource by which a pool's machines are known."""
    if pool.resource is not None:
        return pool.resource
    return "" if pool.hardware == "cpu" else pool.hardware


def task_shares(job: Job) -> dict[str, float]:
    return shares(
        {task.name: task.weight for task in job.tasks},
        {task.name: task.quota for task in job.tasks},
        job.rollout.groups_per_step,
    )


def build_affinity(job: Job, model: ModelShape) -> Affinity:
    target = task_shares(job)
    pairs = pairs_of(job)
    speeds = [
        PoolSpeed(
            name=pool.name,
            hardware=HARDWARE[pool.hardware],
            model=model,
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
        pairs=pairs_of(job),
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
        further_engines=tuple(further_specs(offers(job))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RealWorld:
    """The ports of a real job, and what must be closed at its end."""

    world: World
    close: "Callable[[], Any]"
    """Awaitable: ends every process and frees shared memory."""


Lost = Callable[[str, str], None]


def real_world(job: Job, out: Path, journal: Journal, lost: Lost | None = None) -> RealWorld:
    """Real workers wherever `cluster` says; tokenizer, task sets and reward workers with the coordinator.

    `lost` is told at once when a process on this machine dies by itself: the worker's name, and how it ended.
    """
    from rollart.models.tokenizer import ChatTokenizer
    from rollart.tasks.load import load_task_set, reward_of
    from rollart.weights.kinds import open_store

    model_path = Path(job.model.path)
    uses = {task.name: task.use for task in job.tasks}
    task_sets = {task.name: load_task_set(task.use, seed=job.seed, domain=task.name) for task in job.tasks}
    functions = {name: reward_of(use) for name, use in uses.items()}
    tokenizer = ChatTokenizer(model_path)
    store_setup = _store_setup(job, out)
    store = open_store(store_setup)
    before = [open_store(setup) for setup in _stores_before(out, store_setup)]
    for dead in [*before, store]:
        dead.close()
    cluster, rooms = _workers(job, out, store_setup, uses, task_sets, lost)
    scorer = _rewards(job, functions, tokenizer.decode, out / "logs", lost)
    host: EnvHost = rooms
    rewards: RewardBackend = scorer
    latencies = {task.name: task.latency for task in job.tasks if task.latency is not None}
    if latencies:
        host = DelayedHost(host, latencies, seed=job.seed)
    if job.rollout.stepping == "batched":
        lockstep = Lockstep()
        host = BatchedHost(host, lockstep, reset_s=job.limits.reset_s, step_s=job.limits.step_s)
        rewards = BatchedRewards(rewards, lockstep, timeout_s=job.rewards.timeout_s)

    async def close() -> None:
        await rooms.close()
        await cluster.close()
        await scorer.close()
        for run in [*before, store]:  # a dying trainer may still have written after the first time
            run.close()
        (out / STORES).unlink(missing_ok=True)

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
        further_engines=tuple(further_specs(offers(job))),
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
    refuse_mixtures_on_servers(job)


def _workers(
    job: Job,
    out: Path,
    store: Mapping[str, Any],
    uses: Mapping[str, str],
    task_sets: "Mapping[str, TaskSet]",
    lost: Lost | None,
) -> "tuple[Cluster, InlineEnvHost | ProcessEnvHost | RemoteEnvHost]":
    """Who starts engines and the trainer, and where environments run."""
    from rollart.worker import build

    engines, trainer = _engine_setups(job, out, store), _trainer_setup(job, out, store)
    if job.cluster.type == "ray":
        from rollart.cluster.ray import RayCluster

        wanted = demands(job)
        on_ray = RayCluster(
            build,
            engines,
            trainer,
            engine_needs={demand.pool: demand.needs for demand in wanted if demand.role == "rollout"},
            trainer_needs=next(demand.needs for demand in wanted if demand.role == "train"),
            room=[demand.needs for demand in _most_wanted(job) for _ in range(demand.count)],
            log_dir=out / "logs",
            address=job.cluster.address,
            wait_s=job.cluster.wait_s,
        )
        return on_ray, _rooms_on(on_ray, job, out, uses)
    rooms = _rooms_here(job, out, uses, task_sets, lost)
    if job.cluster.type == "inline":
        from rollart.cluster.inline import InlineCluster

        return InlineCluster(build, engines, trainer), rooms
    from rollart.cluster.local import LocalCluster

    return LocalCluster(out / "logs", engines, trainer, lost), rooms


def _most_wanted(job: Job) -> list[Demand]:
    """With the engines that may join."""
    most = {offer.name: offer.most_engines for offer in offers(job)}
    return [replace(d, count=most[d.pool]) if d.role == "rollout" else d for d in demands(job)]


def _rooms_here(
    job: Job, out: Path, uses: Mapping[str, str], task_sets: "Mapping[str, TaskSet]", lost: Lost | None
) -> "InlineEnvHost | ProcessEnvHost":
    from rollart.envs.inline import InlineEnvHost
    from rollart.envs.process import ProcessEnvHost

    slots = sum(pool.slots or 0 for pool in job.pools)
    if any(pool.slots and pool.isolation == "process" for pool in job.pools):
        return ProcessEnvHost(uses, slots=slots, log_dir=out / "logs", seed=job.seed, lost=lost)
    return InlineEnvHost(task_sets, slots=slots)


def _rooms_on(cluster: "RayCluster", job: Job, out: Path, uses: Mapping[str, str]) -> "RemoteEnvHost":
    """Environment workers on the machines of their pools."""
    from rollart.envs.remote import RemoteEnvHost

    pools = {pool.name: pool for pool in job.pools}
    seats = [
        (pools[demand.pool], demand.needs, number)
        for demand in demands(job)
        if demand.role == "environments"
        for number in range(demand.count)
    ]

    async def launch(seat: int) -> "RayWorker":
        pool, needs, number = seats[seat]
        name = f"{pool.name}-env-{number}"
        setup = {
            "role": "environments",
            "uses": dict(uses),
            "seed": job.seed,
            "slots": pool.slots_per_worker,
            "isolation": pool.isolation,
            "log_dir": str((out / "logs" / name).absolute()),
        }
        return await cluster.worker(name, setup, needs)

    sizes = [
        min(pool.slots_per_worker, (pool.slots or 0) - number * pool.slots_per_worker) for pool, _, number in seats
    ]
    return RemoteEnvHost(launch, slots=sizes)


def refuse_what_is_not_there(job: Job) -> None:
    """A key that `rollart train` would ignore is an error, and not a surprise."""
    for pool in job.pools:
        if pool.engines is not None and pool.engines.prefill is not None and pool.engines.type != "vllm":
            raise JobError(
                f"pools.{pool.name}.engines.prefill: `rollart train` has no engines of type {pool.engines.type!r} "
                "that are split into prefill and decode; remove it, or use `rollart sim`"
            )
    _refuse_missing_cores(job)
    if job.weights.type == "mooncake":
        raise JobError("weights.type: `rollart train` has no 'mooncake' yet; set weights.type=files, or shm")
    for pool in job.pools:
        if pool.engines is not None and pool.engines.most is not None and job.cluster.type != "ray":
            raise JobError(
                f"pools.{pool.name}.engines.most: no machine joins a cluster of type {job.cluster.type}; "
                "set cluster.type to ray, or remove it"
            )
    for pool in job.engine_pools:
        assert pool.engines is not None
        if pool.engines.type != "embedded" and job.weights.type != "files":
            raise JobError(
                f"weights.type: {pool.engines.type} engines (pool {pool.name!r}) load new weights as files; "
                "set weights.type=files"
            )
    if job.train.type == "single" and job.train.gpus > 1:
        raise JobError(
            f"train.gpus: {job.train.gpus}, but train.type single uses one; set train.type=fsdp2, or train.gpus=1"
        )
    if job.cluster.type != "ray" and len({pool.isolation for pool in job.pools if pool.slots}) > 1:
        raise JobError("pools: environment pools of both isolations in one job are not there yet; use one of them")


def _refuse_missing_cores(job: Job) -> None:
    most = os.cpu_count() or 1
    asked = [(f"pools.{pool.name}.engines.cores", pool.engines.cores) for pool in job.pools if pool.engines]
    for key, cores in [*asked, ("train.cores", job.train.cores)]:
        if cores and max(cores) >= most:
            raise JobError(f"{key}: {list(cores)} are not all on this machine, which has 0 to {most - 1}; name those")


def refuse_mixtures_on_servers(job: Job) -> None:
    """The trainer publishes experts fused, under names that servers do not read; vLLM also reloads them wrongly."""
    kinds = [pool.engines.type for pool in job.engine_pools if pool.engines and pool.engines.type != "embedded"]
    if not kinds:
        return
    import json

    config = json.loads((Path(job.model.path) / "config.json").read_text())
    if config.get("num_experts") or config.get("num_local_experts"):
        raise JobError(
            f"model.path: {job.model.path} is a mixture of experts, which {kinds[0]} engines cannot take new weights "
            "of yet; give another model, or set engines.type to embedded"
        )


def _stores_before(out: Path, setup: dict[str, Any]) -> list[dict[str, Any]]:
    """The weight stores of earlier lives of this run that could not clean up; and note this life's own."""
    path = out / STORES
    lines = path.read_bytes().splitlines() if path.exists() else []
    before = [found for found in map(orjson.loads, lines) if found != setup]
    path.write_bytes(b"".join(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE) for one in [*before, setup]))
    return before


def _rewards(job: Job, functions: Mapping[str, str], decode: Any, log_dir: Path, lost: Lost | None) -> Any:
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
        functions, decode=decode, log_dir=log_dir, workers=settings.workers, timeout_s=settings.timeout_s, lost=lost
    )


def _store_setup(job: Job, out: Path) -> dict[str, Any]:
    """A store of this run alone: its name holds the process that runs the job."""
    run_id = f"{job.name}-{os.getpid()}"
    common = {"type": job.weights.type, "bucket_bytes": job.weights.bucket_mb * 1_000_000}
    if job.weights.type == "shm":
        return {**common, "run_id": run_id}
    parent = Path(job.weights.path) if job.weights.path else out / "weights"
    return {**common, "directory": str((parent / run_id).absolute()), "model": str(Path(job.model.path).absolute())}


def _engine_setups(job: Job, out: Path, store: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        pool.name: {
            "type": pool.engines.type,
            "store": store,
            "threads": pool.engines.threads,
            **(
                _embedded_setup(job, pool.engines)
                if pool.engines.type == "embedded"
                else {"server": _server_setup(job, out, pool.engines, cpu=pool.hardware == "cpu")}
            ),
        }
        for pool in job.pools
        if pool.engines
    }


def _embedded_setup(job: Job, engines: EngineSettings) -> dict[str, Any]:
    return {
        "model": job.model.path,
        "device": engines.device,
        "cores": engines.cores,
        "settings": {
            "kv_tokens": engines.kv_tokens,
            "max_batch": engines.max_batch,
            "keep_kv": engines.keep_kv,
            "seed": job.seed,
        },
    }


def _server_setup(job: Job, out: Path, engines: EngineSettings, *, cpu: bool) -> dict[str, Any]:
    return {
        "context_tokens": job.model.context_tokens,
        "log_dir": str((out / "logs").absolute()),
        "dtype": engines.dtype,
        "max_batch": engines.max_batch,
        "gpus": engines.gpus,
        "threads": engines.threads,
        "cpu": cpu,
        "python": engines.python,
        "url": engines.url,
        "args": engines.args,
        "connector": engines.split.connector if engines.split else None,
        "prefill_gpus": engines.split.prefill_gpus if engines.split else 1,
        "start_s": job.limits.start_s,
    }


def _trainer_setup(job: Job, out: Path, store: Mapping[str, Any]) -> dict[str, Any]:
    train = job.train
    return {
        "type": train.type,
        "world_size": train.gpus,
        "log_dir": str((out / "logs").absolute()),
        "store": store,
        "threads": train.threads,
        "cores": train.cores,
        "settings": {
            "model_path": job.model.path,
            "checkpoint_dir": str((out / "checkpoints").absolute()),
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

"""From a job to everything outside the control plane, for real: workers, a Hugging Face model, environments, rewards.

`real_world` builds; `rollart.launch.checks` refuses before that. `simulation.py` has the other world.
"""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.cluster.inline import InlineCluster
from rollart.config.job import Job
from rollart.config.settings import RewardSettings
from rollart.config.shapes import DTYPE_BYTES, shape_of
from rollart.control.env_manager import Agent
from rollart.control.program import ProgramAgent
from rollart.control.world import RolloutWorld, Sharding, World
from rollart.envs.batched import in_lockstep
from rollart.envs.delayed import DelayedHost
from rollart.errors import JobError
from rollart.launch.checks import agent_class
from rollart.launch.pools import build_affinity, engine_specs, judges_of, shard_job
from rollart.launch.resources import demands, gpu_shares, visible_devices
from rollart.policy.placement import Demand
from rollart.ports import Journal
from rollart.types import Program
from rollart.workers.carried import carried_by
from rollart.workers.launch import Lost
from rollart.workers.setup import ShardSetup, StoreSetup, WorkerSetup

if TYPE_CHECKING:
    from rollart.cluster.local import LocalCluster
    from rollart.cluster.ray import RayCluster, RayWorker
    from rollart.control.judges import JudgePool
    from rollart.envs.remote import RemoteEnvHost
    from rollart.envs.service import ClosableHost
    from rollart.gateway.judge import JudgeEndpoint
    from rollart.gateway.server import HttpGateway
    from rollart.rewards.episodes import Decode
    from rollart.rewards.http import HttpRewards
    from rollart.rewards.judge import JudgeModel, JudgeRewards
    from rollart.rewards.local import LocalRewards
    from rollart.tasks.api import TaskSet

    Rewards = HttpRewards | JudgeRewards | LocalRewards

JUDGE_TOKEN = "ROLLART_JUDGE_TOKEN"
"""Holds the key of a judge: of one behind a URL, and of our own where others reach it."""
STORES = "stores.jsonl"
"""In the run directory while it runs: where its weights are. A resumed run removes what a killed one left there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealWorld:
    """The ports of a real job, and what must be closed at its end."""

    world: World
    close: Callable[[], Awaitable[None]]
    """Ends every process and frees shared memory."""


def real_world(
    job: Job,
    out: Path,
    journal: Journal,
    lost: Lost | None = None,
    *,
    trains: bool = True,
    earlier: Sequence[tuple[int, Job]] = (),
    shards: ShardSetup | None = None,
) -> RealWorld:
    """Real workers wherever `cluster` says; tokenizer, task sets and reward workers with the coordinator.

    `lost` is told at once when a process on this machine dies by itself: the worker's name, and how it ended.
    `trains`: whether a trainer will be started. `earlier`: (n, the job that the steps before n are replayed under), n
    rising. `shards`: what each is told, where there are some.
    """
    from rollart.launch.worker import task_sets_of
    from rollart.model.tokenizer import ChatTokenizer
    from rollart.store.open import new_store, open_store
    from rollart.store.owner import remove_left_behind

    model, model_path = job.model, Path(job.model.path)
    task_sets = task_sets_of(job)
    tokenizer = ChatTokenizer(model_path, model.chat_template, model.chat_template_args, model.context_tokens)
    where = new_store(job, out)
    store = open_store(where)
    before = [open_store(setup) for setup in stores_before(out, where)]
    if not store.claim():
        path = where.weights.path
        key, place = ("weights.path", f"{path}/{where.run_id}") if path else ("weights.type", "/dev/shm")
        raise JobError(f"{key}: no lock can be had for weights in {place}; give a place that you can write and lock")
    for dead in before:
        dead.close()
    if where.weights.type == "shm":
        remove_left_behind()
    setup = WorkerSetup(
        job=job,
        out=out.absolute(),
        store=where,
        stop_tokens=tuple(tokenizer.stop_tokens),
        earlier=tuple(earlier),
        shard=shards if job.cluster.coordinators > 1 else None,
        carried=tuple(carried_by(job)) if job.cluster.type == "ray" and job.cluster.address else (),
    )
    cluster = real_cluster(setup, lost, trains=trains)
    rollout, close_rollout = _rollout(setup, cluster, task_sets, lost)

    async def close() -> None:
        await close_rollout()
        await cluster.close()
        for run in [*before, store]:  # a dying trainer may still have written after the first time
            run.close()
        (out / STORES).unlink(missing_ok=True)

    held = {pool.name: DTYPE_BYTES[pool.engines.dtype] for pool in job.pools if pool.engines}
    world = World(
        cluster=cluster,
        engines=engine_specs(job),
        task_sets=task_sets,
        store=store,
        journal=journal,
        affinity=build_affinity(job, shape_of(model_path), held),
        rollout=rollout,
    )
    return RealWorld(world=world, close=close)


def _rollout(
    setup: WorkerSetup,
    cluster: "LocalCluster | InlineCluster | RayCluster",
    task_sets: "Mapping[str, TaskSet]",
    lost: Lost | None,
) -> tuple[RolloutWorld | Sharding, Callable[[], Awaitable[None]]]:
    """What plays, and what ends it: here, or in shards, which end with the cluster."""
    count = setup.job.cluster.coordinators
    if count == 1:
        return real_rollout(setup, cluster, task_sets, lost)

    async def nothing() -> None:
        pass

    assert not isinstance(cluster, InlineCluster)
    engines = [engine_specs(setup.job, shard=number) for number in range(count)]
    return Sharding(engines=engines, start=cluster.shard), nothing


def real_rollout(
    setup: WorkerSetup,
    cluster: "LocalCluster | InlineCluster | RayCluster",
    task_sets: "Mapping[str, TaskSet]",
    lost: Lost | None = None,
    given: WorkerSetup | None = None,
) -> tuple[RolloutWorld, Callable[[], Awaitable[None]]]:
    """What plays: all of it, or the part of a shard. And what ends that. `given`: the set-up for workers elsewhere,
    where paths are not as they are here."""
    from rollart.model.tokenizer import ChatTokenizer
    from rollart.rewards.letters import FILE, LetterFile
    from rollart.tasks.load import reward_of

    shard = setup.shard.number if setup.shard is not None else None
    job = setup.job if shard is None else shard_job(setup.job, shard)
    model = job.model
    tokenizer = ChatTokenizer(Path(model.path), model.chat_template, model.chat_template_args, model.context_tokens)
    functions = {task.name: reward_of(task.use) for task in job.tasks}
    gateway = _gateway(job)
    rooms = _rooms(setup, given or setup, job, cluster, task_sets, lost, gateway.socket if gateway else None)
    judges = judges_of(setup.job, shard=shard)
    models, endpoints = _judge_models(job, judges)
    scorers: list[Rewards] = []

    def rewards(settings: RewardSettings, task: str) -> "Rewards":
        scorers.append(_rewards(settings, task, functions, tokenizer.decode, setup.own_log_dir, lost, models))
        return scorers[-1]

    letters = LetterFile(setup.out / FILE, tokenizer.decode)
    latencies = {task.name: task.latency for task in job.tasks if task.latency is not None}
    played = in_lockstep(job, DelayedHost(rooms, latencies, seed=job.seed) if latencies else rooms, rewards)

    async def close() -> None:
        if gateway is not None:
            await gateway.close()
        for endpoint in endpoints:
            await endpoint.close()
        await rooms.close()
        for scorer in scorers:
            await scorer.close()
        letters.close()

    world = RolloutWorld(
        cluster=cluster,
        engines=engine_specs(setup.job, shard=shard),
        host=played.host,
        rewards=played.rewards,
        task_rewards=played.task_rewards,
        stand_ins=played.stand_ins,
        dead_letters=letters,
        tokenizer=tokenizer,
        agents=_agents(job, gateway),
        further_engines=engine_specs(setup.job, further=True),
        judges=tuple(judges.values()),
    )
    return world, close


def real_cluster(setup: WorkerSetup, lost: Lost | None, *, trains: bool) -> "LocalCluster | InlineCluster | RayCluster":
    """Who starts engines, the trainer and shards."""
    from rollart.launch import worker

    job = setup.job
    match job.cluster.type:
        case "ray":
            from rollart.cluster.ray import RayCluster

            wanted = demands(job)
            return RayCluster(
                worker.start,
                setup,
                engine_needs={demand.pool: demand.needs for demand in wanted if demand.role in ("rollout", "judge")},
                trainer_needs=next(demand.needs for demand in wanted if demand.role == "train"),
                shard_needs=next((demand.needs for demand in wanted if demand.role == "shards"), None),
                room=[demand.needs for demand in _most_wanted(job) for _ in range(demand.count)],
            )
        case "inline":
            return InlineCluster(worker.build, setup)
        case "local":
            from rollart.cluster.local import LocalCluster

            devices, shares = visible_devices(job, trains=trains), gpu_shares(job, trains=trains)
            return LocalCluster(worker.START, setup, lost, devices, shares)


def _rooms(
    setup: WorkerSetup,
    given: WorkerSetup,
    job: Job,
    cluster: "LocalCluster | InlineCluster | RayCluster",
    task_sets: "Mapping[str, TaskSet]",
    lost: Lost | None,
    endpoint: Path | None,
) -> "ClosableHost":
    """Where environments run. `job`: with the slots of this shard."""
    from rollart.launch import worker

    if job.cluster.type == "ray":
        from rollart.cluster.ray import RayCluster

        assert isinstance(cluster, RayCluster)
        return _rooms_on(cluster, given, job)
    slots = sum(pool.slots or 0 for pool in job.pools)
    isolations = {task.name: job.isolation(task) for task in job.tasks}
    return worker.env_host(
        job, isolations, task_sets, slots=slots, log_dir=setup.own_log_dir, lost=lost, endpoint=endpoint
    )


def _most_wanted(job: Job) -> list[Demand]:
    """With the engines that may join."""
    most = {pool.name: pool.engines.most or pool.engines.count for pool in job.engine_pools if pool.engines}
    return [replace(d, count=most[d.pool]) if d.role == "rollout" else d for d in demands(job)]


def _rooms_on(cluster: "RayCluster", setup: WorkerSetup, job: Job) -> "RemoteEnvHost":
    """Environment workers on the machines of their pools. `job`: with the slots of this shard."""
    from rollart.envs.remote import RemoteEnvHost

    needs = {demand.pool: demand.needs for demand in demands(job) if demand.role == "environments"}
    places = [
        (pool, number, min(pool.slots_per_worker, pool.slots - first))
        for pool in job.pools
        if pool.slots
        for number, first in enumerate(range(0, pool.slots, pool.slots_per_worker))
    ]

    async def launch(place: int) -> "RayWorker":
        pool, number, _ = places[place]
        name = f"{pool.name}-env-{number}" if setup.shard is None else f"{setup.name}-{pool.name}-env-{number}"
        return await cluster.worker(setup.environments(name, pool.name), needs[pool.name])

    return RemoteEnvHost(launch, slots=[slots for _, _, slots in places])


def _gateway(job: Job) -> "HttpGateway | None":
    """Listens only once an agent needs it."""
    if not job.programs:
        return None
    from rollart.gateway.server import HttpGateway

    return HttpGateway(host=job.endpoint.host, port=job.endpoint.port, model=Path(job.model.path).name)


def _agents(job: Job, gateway: "HttpGateway | None") -> "dict[str, Agent]":
    """By task, where the job names one."""
    found: dict[str, Agent] = {}
    for task in job.tasks:
        if task.agent is None:
            continue
        if gateway is not None and task.agent.is_program:
            program = Program(function=task.agent.function, command=task.agent.command)
            found[task.name] = ProgramAgent(program, gateway)
        else:
            found[task.name] = agent_class(task.agent.use)()
    return found


def _rewards(
    settings: RewardSettings,
    task: str,
    functions: Mapping[str, str],
    decode: "Decode",
    log_dir: Path,
    lost: Lost | None,
    judges: "Mapping[str, JudgeModel]",
) -> "Rewards":
    """Who scores: of one task, or for all tasks that have no rewards of their own. `judges`: by pool."""
    from rollart.rewards.http import HttpRewards
    from rollart.rewards.judge import HttpJudge, JudgeRewards
    from rollart.rewards.local import LocalRewards

    match settings.type:
        case "http":
            return HttpRewards(settings, decode, os.environ.get("ROLLART_REWARD_TOKEN"))
        case "judge":
            model = judges[settings.pool] if settings.pool else HttpJudge(settings, os.environ.get(JUDGE_TOKEN))
            return JudgeRewards(settings, decode, model)
        case "local":
            own = {task: settings.function or functions[task]} if task else functions
            name = f"reward-{task}-{settings.label}" if task else "reward"
            return LocalRewards(settings, own, decode, log_dir, lost, name=name)


def _judge_models(job: Job, judges: "Mapping[str, JudgePool]") -> "tuple[dict[str, JudgeModel], list[JudgeEndpoint]]":
    """The judges that have engines of this job, by pool, as rewards ask them; and where other jobs reach them."""
    if not judges:
        return {}, []
    from rollart.gateway.judge import JudgeEndpoint
    from rollart.model.tokenizer import ChatTokenizer
    from rollart.rewards.judge import PoolJudge

    models: dict[str, JudgeModel] = {}
    endpoints: list[JudgeEndpoint] = []
    for pool in job.judge_pools:
        judge = pool.judge
        assert judge is not None
        tokenizer = ChatTokenizer(judge.path, judge.chat_template, judge.chat_template_args, judge.context_tokens)
        models[pool.name] = PoolJudge(judges[pool.name], tokenizer, pool.name, judge.context_tokens)
        if judge.listen:
            token = os.environ.get(JUDGE_TOKEN, "")
            endpoints.append(JudgeEndpoint(judges[pool.name], tokenizer, pool.name, judge, token))
    return models, endpoints


def stores_before(out: Path, setup: StoreSetup) -> list[StoreSetup]:
    """The weight stores of earlier lives of this run that could not clean up; and note this life's own."""
    path = out / STORES
    lines = path.read_text().splitlines() if path.exists() else []
    before = [StoreSetup.model_validate_json(line) for line in lines]
    path.write_text("".join(f"{one.model_dump_json(exclude={'token'})}\n" for one in [*before, setup]))
    return before

"""The composition root of a worker: from its set-up to an engine, a trainer, a rank, environments, or a shard.

`start` is what a worker's own process calls, with the set-up as JSON: that of `cluster/local.py`, a rank's, or an actor
of `cluster/ray.py`. `cluster/inline.py` calls `build` in the coordinator.
"""

import asyncio
import gc
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollart.config.job import Job
from rollart.errors import BoundaryError, CannotHost, ClusterError
from rollart.workers.box import Box
from rollart.workers.container import Container, unusable
from rollart.workers.forward import Relay
from rollart.workers.launch import Lost, Process
from rollart.workers.pod import Pod
from rollart.workers.sandbox import Sandbox, missing
from rollart.workers.setup import RankSetup, WorkerSetup

START = "rollart.launch.worker:start"
"""For who starts a process."""
RENDEZVOUS = "ranks-meet"
"""Name of the file in the log directory through which the ranks of a trainer find each other."""

if TYPE_CHECKING:
    from rollart.config.settings import Isolation, JudgeSettings, ModelSettings, TaskSettings
    from rollart.engines.embedded.engine import EmbeddedEngine
    from rollart.engines.embedded.handover import PrefillSide
    from rollart.engines.embedded.pair import PairedEngine
    from rollart.engines.embedded.threaded import ThreadedEngine
    from rollart.engines.remote import RemoteEngine
    from rollart.envs.process import Boxed
    from rollart.envs.service import ClosableHost, EnvService
    from rollart.tasks.api import TaskSet
    from rollart.train.ranks import RankedTrainer
    from rollart.train.settings import TrainerSettings


class RankWorker(Protocol):
    """A rank that is yet to be built."""

    @property
    def pid(self) -> int | None: ...

    async def start(self, body: str) -> None: ...

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any: ...

    async def stop(self) -> None: ...


async def start(body: str, ranks: Sequence[RankWorker] = ()) -> Any:
    """A worker in a process of its own, from its set-up as JSON."""
    setup = WorkerSetup.model_validate_json(body)
    log_to_stderr()
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    if setup.role in ("engine", "trainer", "rank"):
        _keep_imported()
    return await build(setup, ranks)


def _keep_imported() -> None:
    """A full collection of garbage does not look at what torch and transformers consist of: 350,000 objects that stay,
    0.2 s in the midst of a step. Called before anything is built: a network refers to itself, and must be found when
    another one replaces it."""
    import rollart.model.network  # noqa: F401 - imports both

    gc.freeze()


def log_to_stderr() -> None:
    """What our own modules note goes to the worker's log, which is its standard error; of others only warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("rollart").setLevel(logging.INFO)


async def build(setup: WorkerSetup, ranks: Sequence[RankWorker] = ()) -> Any:
    """The implementation that this process runs.

    `ranks`: a trainer's, where the cluster has placed them; else a trainer of several starts them beside itself.
    """
    given, setup = setup, setup.on_this_machine()  # each rank finds its own machine's
    _make_run_directory(setup)
    if setup.role == "environments":
        return _environments(setup, given.job)
    if setup.role == "shard":
        from rollart.launch.shard import real_shard

        return real_shard(setup, given)
    import torch
    from transformers.utils import logging as transformers_logging

    from rollart.model.network import device_named
    from rollart.store.open import Part, open_store
    from rollart.train.settings import TrainerSettings

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(setup.threads)
    trainer = TrainerSettings(job=setup.job, out=setup.out, earlier=setup.earlier)
    match setup.role:
        case "engine":
            return await _engine(setup, given)
        case "trainer" if setup.job.train.type == "fsdp2":
            return await _ranked_trainer(given, trainer, ranks)
        case "trainer":
            from rollart.train.single import AsyncTrainer, SingleTrainer

            store = open_store(setup.store, "trainer", device=device_named(setup.job.train.device))
            return AsyncTrainer(SingleTrainer(trainer), store)
        case "rank":
            from rollart.train.fsdp2 import ShardedTrainer
            from rollart.train.ranks import AsyncRank

            assert setup.rank is not None
            part: Part = "trainer" if setup.rank.rank == 0 else "coordinator"
            store = open_store(setup.store, part, device=torch.device(setup.rank.device))
            return AsyncRank(await asyncio.to_thread(ShardedTrainer, trainer, setup.rank), store)


def _make_run_directory(setup: WorkerSetup) -> None:
    """On the coordinator's machine it is there; on another, its path is made for what this worker writes itself."""
    try:
        setup.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"{setup.name}: {setup.out} cannot be made on {socket.gethostname()} ({error.strerror}); give --out a path "
            "that every machine can write to, shared or its own"
        ) from error


async def _engine(
    setup: WorkerSetup, given: WorkerSetup
) -> "ThreadedEngine | PairedEngine | PrefillSide | RemoteEngine":
    """`given`: the set-up with the coordinator's paths, for a process that this one starts."""
    from rollart.model.network import device_named
    from rollart.store.open import open_store
    from rollart.store.prefetch import FetchAhead

    job, pool = setup.job, setup.own_pool
    assert pool.engines is not None
    store = open_store(setup.store, "engine", site=pool.site, device=device_named(pool.engines.device))
    model: ModelSettings | JudgeSettings = job.model
    stop_tokens, lora = setup.stop_tokens, job.train.lora
    if pool.judge is not None:
        from rollart.model.tokenizer import ChatTokenizer

        model, lora = pool.judge, None
        stop_tokens = ChatTokenizer(model.path, model.chat_template, model.chat_template_args).stop_tokens
    if pool.engines.type == "embedded":
        from rollart.engines.embedded.engine import EmbeddedEngine
        from rollart.engines.embedded.handover import PrefillSide
        from rollart.engines.embedded.threaded import ThreadedEngine

        make = partial(
            EmbeddedEngine.from_directory,
            model.path,
            pool.engines.prefill_side if setup.prefills else pool.engines,
            engine_id=setup.name,
            seed=job.seed,
            max_context=model.context_tokens,
            stop_tokens=stop_tokens,
            paged=True if pool.engines.is_pair else None,
            lends=setup.prefills,
        )
        ahead = FetchAhead(store)
        threaded = partial(
            ThreadedEngine, fetch=ahead.fetch, stage=ahead.stage, pulled=ahead.pulled, adopt=store.in_memory
        )
        if setup.prefills:
            return PrefillSide(threaded(make()))
        return await pair(given, make, threaded) if pool.engines.is_pair else threaded(make())
    from rollart.engines.launch import ServerSettings, launch

    server = ServerSettings(
        engines=pool.engines,
        engine_id=setup.name,
        model=Path(model.path),
        context_tokens=model.context_tokens,
        log_dir=setup.log_dir,
        cpu=pool.hardware == "cpu",
        stop_tokens=stop_tokens,
        start_s=job.limits.start_s,
        lora=lora,
    )
    return await launch(server, store, FetchAhead(store))


async def pair(
    given: WorkerSetup, make: "Callable[[], EmbeddedEngine]", threaded: "Callable[[EmbeddedEngine], ThreadedEngine]"
) -> "PairedEngine":
    """An engine, and a process that prefills for it. That ends with this one."""
    from rollart.cluster.mps import share_of
    from rollart.engines.embedded.pair import PairedEngine

    engines, name = given.own_pool.engines, f"{given.name}-prefill"
    assert engines is not None
    share = engines.prefill_side.share
    environment = {**os.environ, "OMP_NUM_THREADS": str(engines.threads)} | (share_of(share) if share else {})
    prefill = Process(name, START, given.log_dir, environment)
    own = given.model_copy(update={"name": name, "prefills": True})
    try:
        # both load their weights at the same time
        core, _ = await asyncio.gather(asyncio.to_thread(make), prefill.start(own.model_dump_json()))
        cache = await prefill.call(ClusterError, "place")
        return PairedEngine(threaded(core), prefill, cache, max_batch=engines.max_batch)
    except BaseException:
        await prefill.stop()
        raise


async def _ranked_trainer(
    setup: WorkerSetup, settings: "TrainerSettings", placed: Sequence[RankWorker]
) -> "RankedTrainer":
    """A trainer of several ranks: those that were placed for it, else child processes. These end with it, as it ends
    with its parent."""
    from rollart.model.network import device_named
    from rollart.train.ranks import RankedTrainer

    train = setup.job.train
    environment = {**os.environ, "OMP_NUM_THREADS": str(train.threads)}
    ranks = placed or [Process(f"rank-{rank}", START, setup.log_dir, environment) for rank in range(train.gpus)]
    rendezvous = setup.rendezvous if placed else f"file://{_rendezvous_file(setup.log_dir)}"
    starts = []
    for number, rank in enumerate(ranks):
        at = RankSetup(
            rank=number,
            world_size=len(ranks),
            rendezvous=rendezvous,
            # a rank that was placed sees no GPU but its own
            device=str(device_named(train.device, 0 if placed else number)),
        )
        own = setup.model_copy(update={"role": "rank", "name": f"rank-{number}", "rank": at})
        starts.append(asyncio.ensure_future(rank.start(own.model_dump_json())))
    try:
        await asyncio.gather(*starts)
    except ClusterError:
        # the others may be waiting for the one that failed
        for one in starts:
            one.cancel()
        await asyncio.gather(*(rank.stop() for rank in ranks))
        raise
    return RankedTrainer(settings, ranks)


def _rendezvous_file(log_dir: Path) -> Path:
    """A file that is not there yet, for ranks of this machine. What a trainer before this one left is removed."""
    for left in log_dir.glob(f"{RENDEZVOUS}-*"):
        left.unlink(missing_ok=True)
    return log_dir.resolve() / f"{RENDEZVOUS}-{os.getpid()}"


def _environments(setup: WorkerSetup, given: Job) -> "EnvService":
    """The slots of one worker, each task isolated as the job says. `given`: the job with the coordinator's paths."""
    from rollart.envs.service import EnvService

    job, pool = setup.job, setup.own_pool
    isolations = {task.name: job.isolation(task, pool) for task in job.tasks}
    task_sets = task_sets_of(job, [name for name, isolation in isolations.items() if isolation == "inline"])
    for task in job.tasks:
        if why := no_box(task, isolations[task.name]):
            raise CannotHost(f"task {task.name} on {socket.gethostname()}: {why}")
    boxed = [task for task in job.tasks if isolations[task.name] in ("sandbox", "container")]
    relay = Relay() if any(task.agent is not None and task.agent.is_program for task in boxed) else None
    host = env_host(
        job,
        isolations,
        task_sets,
        slots=pool.slots_per_worker,
        log_dir=setup.log_dir / setup.name,
        endpoint=relay.path if relay is not None else None,
    )
    pairs = zip(given.tasks, job.tasks, strict=True)
    functions = {there.agent.function: here.agent.function for there, here in pairs if there.agent and here.agent}
    return EnvService(host, relay, functions)


def env_host(
    job: Job,
    isolations: "Mapping[str, Isolation]",
    task_sets: "Mapping[str, TaskSet]",
    *,
    slots: int,
    log_dir: Path,
    lost: Lost | None = None,
    endpoint: Path | None = None,
) -> "ClosableHost":
    """Environments on this machine: of each task in its isolation, of all in these slots.

    `task_sets`: of those that run in this process. The others are loaded where they run. `endpoint`: the Unix socket
    over which an agent in a sandbox reaches the model.
    """
    from rollart.envs.inline import InlineEnvHost
    from rollart.envs.isolated import IsolatedEnvHost
    from rollart.envs.process import ProcessEnvHost

    shared = asyncio.Semaphore(slots)
    hosts: list[tuple[list[str], ClosableHost]] = []
    here = [name for name, isolation in isolations.items() if isolation == "inline"]
    if here:
        hosts.append((here, InlineEnvHost({name: task_sets[name] for name in here}, slots=shared)))
    args = {task.name: task.args for task in job.tasks}
    host = partial(ProcessEnvHost, args=args, slots=shared, log_dir=log_dir, seed=job.seed, lost=lost)
    together = [task for task in job.tasks if isolations.get(task.name) == "process"]
    if together:  # a process plays now this one, now that one
        uses = {task.name: task.use for task in together}
        hosts.append((list(uses), host(uses, variables=[name for task in together for name in task.environment])))
    for task in job.tasks:
        if isolations.get(task.name) in ("sandbox", "container"):
            name = f"env-{re.sub(r'[^A-Za-z0-9._-]', '_', task.name)}"
            boxed = _boxed(task, isolations[task.name], endpoint)
            own = host({task.name: task.use}, variables=task.environment, name=name, boxed=boxed)
            hosts.append(([task.name], own))
    return hosts[0][1] if len(hosts) == 1 else IsolatedEnvHost(hosts)


def no_box(task: "TaskSettings", isolation: "Isolation") -> str:
    """The key below the task, and why there can be no such box on this machine; nothing where there can."""
    if isolation == "sandbox":
        return f"isolation: sandbox {why}" if (why := missing()) else ""
    if isolation != "container":
        return ""
    container = task.container
    if not container.image:
        return "container.image: missing; name the image, such as one made from python:3.12 with rollart in it"
    if container.runtime != "kubernetes":
        why = unusable(container)
    elif task.agent is not None and task.agent.is_program:
        why = "runtime: kubernetes, but an agent that is a program reaches no model from a pod; give it podman"
    else:
        code, read = _inside(task)
        why = Pod(settings=task.sandbox, container=container, code=code, read=read).unusable()
    return f"container.{why}" if why else ""


def _inside(task: "TaskSettings") -> tuple[list[Path], list[Path]]:
    """Code that can be imported in a box, and what can be read."""
    from rollart.tasks.load import code_of

    return code_of(task.use), list(map(Path, task.sandbox.read))


def _boxed(task: "TaskSettings", isolation: "Isolation", endpoint: Path | None) -> "Boxed":
    from rollart.envs.process import Boxed
    from rollart.tasks.load import code_of

    code, read = _inside(task)
    if task.agent is not None and task.agent.is_program and endpoint is not None:
        code += code_of(task.agent.function)
        read.append(endpoint)

    def box(name: str) -> Box:
        if isolation == "sandbox":
            return Sandbox(settings=task.sandbox, read=[*code, *read])
        make = Pod if task.container.runtime == "kubernetes" else Container
        return make(settings=task.sandbox, container=task.container, code=code, read=read)

    return Boxed(box=box, wall_s=task.sandbox.wall_s, warm=task.warm)


def task_sets_of(job: Job, names: "Sequence[str] | None" = None) -> "dict[str, TaskSet]":
    """Of these tasks, by default of all."""
    from rollart.tasks.load import load_task_set

    tasks = [task for task in job.tasks if names is None or task.name in names]
    return {task.name: load_task_set(task.use, task.args, seed=job.seed, domain=task.name) for task in tasks}

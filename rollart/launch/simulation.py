"""A job on the virtual clock: every adapter is simulated, the control plane is the real one.

`simulated_world` builds what control works with; `simulate` runs it, and starts another coordinator over the same
journal when a fault kills one.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rollart.config.job import Job
from rollart.config.settings import RewardSettings
from rollart.config.shapes import known_shape
from rollart.config.sim import FaultSettings, SimJudgeSettings, SimTaskSettings
from rollart.control.coordinator import Coordinator
from rollart.control.shard import Shard
from rollart.control.world import RolloutWorld, Sharding, World
from rollart.envs.batched import in_lockstep
from rollart.errors import Deadlock
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.events.schema import Event
from rollart.launch.books import Books, RunResult
from rollart.launch.driver import Life, drive, facts, rare_collections
from rollart.launch.pools import (
    build_affinity,
    disaggregated,
    engine_specs,
    hardware_of,
    judges_of,
    kv_bound,
    shard_job,
)
from rollart.launch.rundir import make_run_dir, write_summary
from rollart.sim.clock import VirtualLoop
from rollart.sim.cores import Core
from rollart.sim.dice import Dice
from rollart.sim.engine import EngineWorld
from rollart.sim.envs import SimHost, SimTaskSet, SimTokenizer
from rollart.sim.faults import Faults
from rollart.sim.learning import SimLearning
from rollart.sim.links import SimDisk, SimLink, SimStore
from rollart.sim.rewards import SimJudge, SimRewards, judge_domain
from rollart.sim.shards import SimShard
from rollart.sim.traffic import SharedLink, SimImages
from rollart.sim.trainer import SimCluster, SimJournal

AT_ONCE_GB_S = 1e9
"""Weights that are where they are needed already: what is left is to load them."""


def simulate(
    job: Job,
    out: Path | None = None,
    *,
    audit: bool = True,
    progress: Callable[[str], None] | None = None,
    ends: list[float] | None = None,
    watch: Callable[[EventLog], None] | None = None,
    beside: bool = False,
) -> RunResult:
    """Run a job on the virtual clock; write its run directory where `out` is given. `ends`: gets the time of each
    step's end. `watch`: gets the log before anything is written into it, to read what it likes. `beside`: its events
    are read in a second process; needs `out`."""
    if out is not None:
        make_run_dir(job, out)
    with rare_collections(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(_simulate(job, out, audit=audit, progress=progress, ends=ends, watch=watch, beside=beside))
    if out is not None:
        write_summary(out, result.summary)
    return result


async def _simulate(
    job: Job,
    out: Path | None,
    *,
    audit: bool,
    progress: Callable[[str], None] | None,
    ends: list[float] | None,
    watch: Callable[[EventLog], None] | None,
    beside: bool,
) -> RunResult:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    books = Books(job, out, audited=audit, beside=beside)
    try:
        if progress is not None:
            books.log.read_by(_tell(progress, job.train.steps), schema.StepEnd)
        if ends is not None:
            books.log.read_by(_note_ends(ends), schema.StepEnd)
        if watch is not None:
            watch(books.log)
        books.log.emit(facts(job, clock="virtual"))
        disk = SimDisk()
        journal = SimJournal(disk, SimLearning(job.sim.train.age_discount))
        faults = Faults(job.sim.faults, books.log)
        faults.start()
        faults.on("full_store", _filler(faults, disk))
        push = SimLink(_push_gb_s(job) * 1e9)
        pull = SimLink(_pull_gb_s(job) * 1e9)

        def live() -> Life:
            killed: asyncio.Future[None] = loop.create_future()
            faults.on("coordinator_restart", _killer(faults, killed))
            world = simulated_world(job, books.log, faults, journal, push, pull, disk)
            return Life(world=world, close=world.cluster.close, killed=killed)

        def started(coordinator: Coordinator) -> None:
            loop.on_deadlock = partial(_deadlock, coordinator)

        error = await drive(job, books.log, live, Coordinator.run, started)
    finally:
        books.close()
    return books.result(error)


def _push_gb_s(job: Job) -> float:
    """A colocated trainer has its weights in the host's memory when it leaves the GPUs."""
    return AT_ONCE_GB_S if job.train.colocated else job.sim.links.push_gb_s


def _pull_gb_s(job: Job) -> float:
    """Of one engine, when all pull."""
    links = job.sim.links
    if job.train.colocated:
        return AT_ONCE_GB_S
    if links.shared_pull_gb_s is None:
        return links.pull_gb_s
    return min(links.pull_gb_s, links.shared_pull_gb_s / sum(engines.count for _, engines in job.engines))


def _killer(faults: Faults, killed: "asyncio.Future[None]") -> Callable[[FaultSettings], bool]:
    def kill(fault: FaultSettings) -> bool:
        if killed.done():
            return True
        faults.fired(fault, "coordinator")
        killed.set_result(None)
        return True

    return kill


def _filler(faults: Faults, disk: SimDisk) -> Callable[[FaultSettings], bool]:
    def fill(fault: FaultSettings) -> bool:
        faults.fired(fault, f"the disk, for {fault.duration_s:.0f} s")
        disk.fill(fault.duration_s)
        return True

    return fill


def _deadlock(coordinator: Coordinator) -> None:
    words = coordinator.watchdog.report(schema.Deadlock, "nothing can ever move again")
    coordinator.supervisor.fail(Deadlock(words))


def _tell(progress: Callable[[str], None], steps: int) -> Callable[[Any], None]:
    """Say where the run is, at most once in two seconds of real time."""
    told_s = time.monotonic()

    def read(event: schema.StepEnd) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > 2.0:
            told_s = time.monotonic()
            progress(f"step {event.version}/{steps}, {event.t / 3600:.2f} h of virtual time, {event.n:,} events")

    return read


def _note_ends(ends: list[float]) -> Callable[[Event], None]:
    def read(event: Event) -> None:
        ends.append(event.t)

    return read


def simulated_world(
    job: Job,
    log: EventLog,
    faults: Faults,
    journal: SimJournal,
    push: SimLink,
    pull: SimLink,
    disk: SimDisk | None = None,
) -> World:
    """Every port of the job, simulated. `disk`: what the trainer writes to; the journal has its own."""
    sim = job.sim
    dice = Dice(job.seed)
    tasks = {task.name: sim.tasks.get(task.name, SimTaskSettings()) for task in job.tasks}
    store = SimStore(log)
    judged = {pool.name: sim.judges.get(pool.name, SimJudgeSettings()) for pool in job.judge_pools}
    answers = {judge_domain(name): SimTaskSettings(answer_tokens=each.answer_tokens) for name, each in judged.items()}
    count = job.cluster.coordinators
    shard_engines = [engine_specs(job, shard=number) for number in range(count)]
    shard_judges = [judges_of(job, shard=number) for number in range(count)]
    cores = [Core() for _ in range(count)]
    engines = EngineWorld(
        model=sim.shape,
        hardware={pool.name: hardware_of(job, pool) for pool in job.pools},
        settings=sim.engine,
        max_batch={pool.name: pool.engines.max_batch for pool in job.pools if pool.engines},
        kv_tokens={pool.name: kv_bound(pool) for pool in job.pools},
        disaggregated=disaggregated(job),
        tasks={**tasks, **answers},
        judges={name: known_shape(each.model) for name, each in judged.items()},
        taken={name: each.others for name, each in judged.items()},
        parallel={pool.name: engines.parallel for pool, engines in job.all_engines},
        dice=dice,
        store=store,
        pull=pull,
        cores={
            spec.id: core
            for core, own, own_judges in zip(cores, shard_engines, shard_judges, strict=True)
            for spec in (*own, *(one for judge in own_judges.values() for one in judge.specs))
        },
        call_s=sim.control.call_s,
        blocking=sim.links.blocking,
        log=log,
        faults=faults,
        counts_work=any(task.affinity == "auto" for task in job.tasks),
    )
    slots = sum(pool.slots or 0 for pool in job.pools)
    calls = None if sim.links.calls_gb_s is None else SharedLink(sim.links.calls_gb_s * 1e9)
    host = SimHost(slots, tasks, dice, faults, SimImages(sim.images), calls)
    functions: dict[tuple[str, ...], SimRewards] = {}

    def plays(number: int) -> RolloutWorld:
        """What this shard plays with. They share the environments and reward functions: parts would be no different."""
        judges = shard_judges[number]

        def rewards(settings: RewardSettings, task: str) -> SimRewards | SimJudge:
            if settings.pool is not None:
                return SimJudge(settings, judged[settings.pool], judges[settings.pool], tasks, dice, journal.learning)
            key = (task, settings.label, settings.type)
            if key not in functions:
                functions[key] = SimRewards(
                    settings, sim.reward, tasks, dice, faults, journal.learning, calls, f"rewards/{task}"
                )
            return functions[key]

        played = in_lockstep(job, host, rewards)
        return RolloutWorld(
            cluster=cluster,
            engines=shard_engines[number],
            host=played.host,
            rewards=played.rewards,
            task_rewards=played.task_rewards,
            stand_ins=played.stand_ins,
            tokenizer=SimTokenizer(),
            judges=tuple(judges.values()),
            further_engines=engine_specs(job, further=True),
        )

    head = Core()

    def start_shard(number: int) -> SimShard:
        return SimShard(Shard(shard_job(job, number), plays(number)), head, sim.control.news_s)

    cluster = SimCluster(
        engines,
        sim.train,
        job.kinds[job.train_pool.hardware],
        job.train.gpus,
        job.weights.bucket_mb * 1e6,
        push,
        faults,
        journal.noted,
        disk,
        journal.learning,
        job.train.colocated,
        start_shard=start_shard,
        shard_engines=[[engine.id for engine in own] for own in shard_engines],
        skips=job.rollout.zero_variance == "skip",
    )
    return World(
        cluster=cluster,
        engines=engine_specs(job),
        task_sets={task.name: SimTaskSet(task.name, job.seed, faults) for task in job.tasks},
        store=store,
        journal=journal,
        affinity=build_affinity(job, sim.shape),
        rollout=plays(0) if count == 1 else Sharding(engines=shard_engines, start=cluster.shard),
    )

"""The composition root: job -> adapters -> control. The only place that knows everything.

`simulate` runs a job on the virtual clock; every adapter is simulated, the control plane is the real one.
"""

import asyncio
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from rollart.append import AppendFile
from rollart.config.job import Job, min_group_size
from rollart.config.sim import FaultSettings
from rollart.control.coordinator import Coordinator
from rollart.errors import Deadlock, JobError, RollartError, StayedFull, StoreFull
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle
from rollart.events.schema import Event
from rollart.hardware import HARDWARE
from rollart.launch.worlds import simulated_world, task_shares
from rollart.report.audit import Audit
from rollart.report.summary import Summary
from rollart.sim.clock import VirtualLoop
from rollart.sim.faults import Faults
from rollart.sim.links import Disk, SimLink
from rollart.sim.trainer import SimJournal

RESTART_S = 5.0
"""Simulated seconds until a killed coordinator is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    summary: dict[str, Any]
    violations: list[str]
    deadlock: bool
    faults: dict[str, list[int]]
    """Kind -> [fired, of these during a swap]"""
    full: bool = False
    """It stopped because there was no room to write for longer than it may wait."""


def simulate(
    job: Job, out: Path | None = None, *, audit: bool = True, progress: Callable[[str], None] | None = None
) -> RunResult:
    """Run a job on the virtual clock; write its run directory where `out` is given."""
    if out is not None:
        make_run_dir(job, out)
    with rare_collections(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(_Simulation(job, out, audit=audit, progress=progress).run())
    if out is not None:
        write_summary(out, result.summary)
    return result


def write_summary(out: Path, summary: Mapping[str, Any]) -> None:
    """Whole or not at all: what was there stays where it finds no room. Raises OSError."""
    beside = out / "summary.json.new"
    try:
        beside.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        os.replace(beside, out / "summary.json")
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def make_run_dir(job: Job, out: Path) -> None:
    """A new run directory with its job. Raises JobError where it cannot be made."""
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise JobError(f"--out: {out} exists; give a directory that does not, or remove it") from None
    except OSError as error:
        raise JobError(f"--out: {out} cannot be made ({error.strerror}); give a directory you can write to") from None
    try:
        (out / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        shutil.rmtree(out, ignore_errors=True)
        raise JobError(f"--out: {out} cannot be written to ({error.strerror}); give another directory") from None


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for garbage cycles seldom: a run makes few, and keeps many objects that are looked through each time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Simulation:
    def __init__(self, job: Job, out: Path | None, *, audit: bool, progress: Callable[[str], None] | None) -> None:
        self._job = job
        self._out = out
        self._progress = progress
        self._audit = Audit() if audit else None
        self._summary = Summary()

    async def run(self) -> RunResult:
        job = self._job
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        path = self._out / "events.jsonl" if self._out else None
        log = EventLog(loop.time, path, part_bytes=job.track.events_mb * 1_000_000)
        log.read_by(self._summary.read)
        if self._audit is not None:
            log.read_by(self._audit.read)
        metrics = AppendFile(self._out / "metrics.jsonl", fresh=True) if self._out else None
        if metrics is not None:
            log.read_by(metric_rows(self._summary, as_lines(metrics)))
        if self._progress is not None:
            log.read_by(_tell(self._progress, job.train.steps))
        log.emit(facts(job, clock="virtual"))
        deadlock = False
        try:
            await self._incarnations(loop, log)
        except Deadlock as error:
            deadlock = True
            log.emit(schema.Stopped(reason=str(error), deadlock=True))
        except RollartError as error:
            log.emit(schema.Stopped(reason=str(error), full=isinstance(error, StayedFull)))
        finally:
            log.close()
            if metrics is not None:
                metrics.close()
        return RunResult(
            summary=self._summary.result(),
            violations=self._audit.finish() if self._audit is not None else [],
            deadlock=deadlock,
            faults=self._audit.faults if self._audit is not None else {},
            full=self._audit.full if self._audit is not None else False,
        )

    async def _incarnations(self, loop: VirtualLoop, log: EventLog) -> None:
        """Run the coordinator; when a fault kills it, start another over the same journal."""
        disk = Disk()
        journal = SimJournal(disk)
        faults = Faults(self._job.sim.faults, log)
        faults.start()
        faults.on("full_store", _filler(faults, disk))
        push = SimLink(self._job.sim.links.push_gb_s * 1e9)
        pull = SimLink(self._job.sim.links.pull_gb_s * 1e9)
        while True:
            killed: asyncio.Future[None] = loop.create_future()
            faults.on("coordinator_restart", _killer(faults, killed))
            handle = LogHandle(log)
            world = simulated_world(self._job, log, faults, journal, push, pull, disk)
            coordinator = Coordinator(self._job, world, handle)
            loop.on_deadlock = _deadlock_reporter(coordinator)
            task = loop.create_task(coordinator.run())
            await asyncio.wait([task, killed], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await world.cluster.close()
                task.result()
                return
            log.emit(schema.Killed())
            handle.cut()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await world.cluster.close()
            await asyncio.sleep(RESTART_S)


def _killer(faults: Faults, killed: "asyncio.Future[None]") -> Callable[[FaultSettings], bool]:
    def kill(fault: FaultSettings) -> bool:
        if killed.done():
            return True
        faults.fired(fault, "coordinator")
        killed.set_result(None)
        return True

    return kill


def _filler(faults: Faults, disk: Disk) -> Callable[[FaultSettings], bool]:
    def fill(fault: FaultSettings) -> bool:
        faults.fired(fault, f"the disk, for {fault.duration_s:.0f} s")
        disk.fill(fault.duration_s)
        return True

    return fill


def _deadlock_reporter(coordinator: Coordinator) -> Callable[[], None]:
    def report() -> None:
        words = coordinator.watchdog.report(schema.Deadlock, "nothing can ever move again")
        coordinator.supervisor.fail(Deadlock(words))

    return report


def metric_rows(summary: Summary, *takers: Callable[[Mapping[str, float]], object]) -> Callable[[Event], None]:
    """Hands each step's metrics to those who keep them."""

    def read(event: Event) -> None:
        if summary.row is not None:
            row, summary.row = summary.row, None
            for take in takers:
                take(row)

    return read


def as_lines(file: AppendFile) -> Callable[[Mapping[str, float]], None]:
    """One JSON object a line, to be read at once, or when there is room again: `metrics.jsonl`."""

    def keep(row: Mapping[str, float]) -> None:
        file.put(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        with suppress(StoreFull):
            file.write_out()

    return keep


def _tell(progress: Callable[[str], None], steps: int) -> Callable[[Event], None]:
    """Say where the run is, at most once in two seconds of real time."""
    told_s = time.monotonic()

    def read(event: Event) -> None:
        nonlocal told_s
        if isinstance(event, schema.StepEnd) and time.monotonic() - told_s > 2.0:
            told_s = time.monotonic()
            progress(f"step {event.version}/{steps}, {event.t / 3600:.2f} h of virtual time, {event.n:,} events")

    return read


# --- the job, seen by the parts ---------------------------------------------------------------------------------


def facts(job: Job, clock: str) -> schema.Run:
    """What a reader of the events needs to know of the job."""
    target = task_shares(job)
    train_pool = job.train_pool
    return schema.Run(
        name=job.name,
        mode=job.mode,
        seed=job.seed,
        clock=clock,
        bound=job.rollout.staleness,
        recheck=job.rollout.recheck,
        swap=job.rollout.swap,
        rolling=job.rollout.rolling,
        slots=job.slots,
        groups_per_step=job.rollout.groups_per_step,
        steps=job.train.steps,
        task_failures=job.limits.task_failures,
        tasks={
            task.name: schema.TaskFacts(
                share=target[task.name],
                group_size=task.group_size,
                min_group_size=min_group_size(task),
                affinity=task.affinity,
            )
            for task in job.tasks
        },
        pools={
            pool.name: schema.PoolFacts(
                hardware=pool.hardware,
                cost=HARDWARE[pool.hardware].cost if pool.cost is None else pool.cost,
                engines=pool.engines.count if pool.engines else 0,
                gpus=pool.engines.gpus if pool.engines else 0,
                prefill=pool.engines.prefill if pool.engines else None,
                slots=pool.slots or 0,
            )
            for pool in job.pools
        },
        train=schema.TrainFacts(
            pool=train_pool.name,
            gpus=job.train.gpus,
            cost=HARDWARE[train_pool.hardware].cost if train_pool.cost is None else train_pool.cost,
        ),
        rewards=job.rewards.type,
        reward_workers=job.rewards.workers if job.rewards.type == "local" else None,
        reward_cost=schema.RewardCost(hour=job.rewards.cost, call=job.rewards.call_cost),
        store_full_s=job.limits.store_full_s,
        breaks=any(task.failure or task.hang for task in job.sim.tasks.values()),
    )


def say(text: str) -> None:
    """Progress, where results do not go."""
    print(text, file=sys.stderr, flush=True)

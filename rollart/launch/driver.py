"""One driver for train, eval and sim: a coordinator over a world, on whatever clock the event loop has.

`Books` are the log of a run and the folds over it. `drive` runs the coordinator, and starts another over the same
journal when one is killed.
"""

import asyncio
import contextlib
import gc
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollart.append import AppendFile
from rollart.config.job import Job
from rollart.config.settings import PoolSettings, RewardSettings
from rollart.control.coordinator import Coordinator
from rollart.control.world import World
from rollart.errors import Deadlock, Interrupted, JobError, RollartError, StayedFull, StoreFull
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle, Reader, drop_torn_line, event_files, read_events
from rollart.events.schema import Event
from rollart.launch.pools import task_shares
from rollart.report.audit import Audit
from rollart.report.fold import SummaryFold
from rollart.report.summary import Summary

EVENTS = "events.jsonl"
RESTART_S = 5.0
"""Until a killed coordinator is replaced."""

Work = Callable[[Coordinator], Coroutine[Any, Any, None]]
Row = Callable[[Mapping[str, float]], object]
"""Takes the metrics of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    summary: Summary
    violations: list[str]
    deadlock: bool
    faults: dict[str, list[int]]
    """Kind -> [fired, of these during a swap]"""
    full: bool = False
    """It stopped because its store was full for longer than it may wait."""


class Books:
    """The event log of a run, read by summary, audit and metrics."""

    def __init__(
        self,
        job: Job,
        out: Path | None,
        *,
        audited: bool = True,
        summary: SummaryFold | None = None,
        views: Sequence[Reader] = (),
        history: Reader | None = None,
    ) -> None:
        """`views` read the events too. `history`: the run is resumed; it and all others first read what was written."""
        self.summary = summary or SummaryFold()
        self.audit = Audit() if audited else None
        folds: list[Reader] = [self.summary.read, *([self.audit.read] if self.audit else []), *views]
        rows: list[Mapping[str, float]] = []
        self._path = path = out / EVENTS if out else None
        last = None
        if history is not None:
            assert path is not None
            last = read_again(path, (*folds, history, metric_rows(self.summary, [rows.append])))
        clock = asyncio.get_running_loop().time
        self.log = EventLog(clock, path, after=last, part_bytes=job.track.events_mb * 1_000_000)
        self._metrics = AppendFile(out / "metrics.jsonl", fresh=True) if out else None
        self.takers: list[Row] = [as_lines(self._metrics)] if self._metrics else []
        """Get the metrics of each step."""
        for row in rows:  # made again from the events, so none is missing or twice there
            self.takers[0](row)
        for reader in folds:
            self.log.read_by(reader)
        self.log.read_by(metric_rows(self.summary, self.takers), schema.StepEnd, schema.Replayed)

    def close(self) -> None:
        left = self.log.close()
        if left:
            say(f"rollart: {self._path}: no room for the last {left} bytes of events; the journal is whole")
        if self._metrics is not None:
            self._metrics.close()

    def result(self, error: RollartError | None) -> RunResult:
        """`error`: what stopped the run, where something did."""
        return RunResult(
            summary=self.summary.result(),
            violations=self.audit.finish() if self.audit else [],
            deadlock=isinstance(error, Deadlock),
            faults=self.audit.faults if self.audit else {},
            full=isinstance(error, StayedFull),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What one coordinator works with."""

    world: World
    close: Callable[[], Awaitable[None]]
    """Ends every worker."""
    killed: asyncio.Future[None]
    """Done when the coordinator is to be killed: by a fault of the simulator."""


async def drive(
    job: Job, log: EventLog, live: Callable[[], Life], work: Work, started: Callable[[Coordinator], None]
) -> RollartError | None:
    """Run a coordinator to the end of its work, or to the error that stops it. That is logged and returned.

    What `live` raises is raised: nothing was started yet.
    """
    while True:
        life = live()
        try:
            if await _was_done(job, log, life, work, started):
                return None
        except RollartError as error:
            log.emit(
                schema.Stopped(
                    reason=str(error),
                    user=isinstance(error, Interrupted),
                    full=isinstance(error, StayedFull),
                    deadlock=isinstance(error, Deadlock),
                )
            )
            return error
        finally:
            await life.close()
        await asyncio.sleep(RESTART_S)


async def _was_done(job: Job, log: EventLog, life: Life, work: Work, started: Callable[[Coordinator], None]) -> bool:
    """One life of the coordinator. False where it was killed before its work was done."""
    handle = LogHandle(log)
    coordinator = Coordinator(job, life.world, handle)
    started(coordinator)
    task = asyncio.get_running_loop().create_task(work(coordinator))
    await asyncio.wait([task, life.killed], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return True
    log.emit(schema.Killed())
    handle.cut()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


def read_again(path: Path, readers: tuple[Reader, ...]) -> Event:
    """Feed a run's history to its readers, in one pass, and cut off a torn last line. Returns the last event."""
    if not event_files(path):
        raise JobError(f"--resume: {path} is not there; give the run directory of a job that was stopped or killed")
    drop_torn_line(path)
    last: Event | None = None
    for event in read_events(path):
        for reader in readers:
            reader(event)
        last = event
    if last is None:
        raise JobError(f"--resume: {path} is empty; start the job anew without --resume")
    return last


def metric_rows(summary: SummaryFold, takers: Sequence[Row]) -> Reader:
    """Hands each step's metrics to those who keep them."""

    def read(event: Event) -> None:
        if summary.row is not None:
            row, summary.row = summary.row, None
            for take in takers:
                take(row)

    return read


def as_lines(file: AppendFile) -> Callable[[Mapping[str, float]], None]:
    """`metrics.jsonl`: one JSON object a line, written at once, or when there is room again."""

    def keep(row: Mapping[str, float]) -> None:
        file.put(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        with contextlib.suppress(StoreFull):
            file.write_out()

    return keep


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage cycles seldom: a run makes few, and each collection walks its many live objects. Half a
    million are about what the trajectories of a large step leave when they go, so a steady run seldom collects because
    of them; more would let the garbage of failed attempts grow (90 MB of it with a million, in `benchmarks.soak`)."""
    before = gc.get_threshold()
    gc.set_threshold(500_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def facts(job: Job, clock: str) -> schema.Run:
    """What readers of the events need to know about the job."""
    target = task_shares(job)
    train_pool, shared = job.train_pool, _reward_facts(job.rewards)
    if "rewards" not in job.asked_rewards:
        shared = msgspec.structs.replace(shared, workers=0)
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
                min_group_size=task.smallest_group,
                affinity=task.affinity,
            )
            for task in job.tasks
        },
        pools={
            pool.name: schema.PoolFacts(
                hardware=pool.hardware,
                cost=_price(job, pool),
                engines=pool.engines.count if pool.engines else 0,
                gpus=pool.engines.decode_gpus if pool.engines else 0,
                prefill=_prefill_facts(job, pool),
                slots=pool.slots or 0,
                judge=pool.judge is not None,
            )
            for pool in job.pools
        },
        train=schema.TrainFacts(
            pool=train_pool.name,
            gpus=job.train.gpus,
            cost=0.0 if job.train.colocated else _price(job, train_pool),
        ),
        rewards=", ".join(sorted({reward.type for reward in job.asked_rewards.values()})),
        reward=shared,
        task_rewards={
            task.name: {reward.label: _reward_facts(reward) for reward in task.rewards}
            for task in job.tasks
            if task.rewards
        },
        store_full_s=job.limits.store_full_s,
        breaks=any(task.failure or task.hang or task.step_tail for task in job.sim.tasks.values()),
    )


def _reward_facts(reward: RewardSettings) -> schema.RewardFacts:
    return schema.RewardFacts(
        type=reward.type,
        workers=reward.workers if reward.type == "local" else None,
        cost=schema.RewardCost(hour=reward.hour_cost, call=reward.call_cost),
        pool=reward.pool or "",
        votes=reward.votes,
        weight=reward.weight,
    )


def _price(job: Job, pool: PoolSettings) -> float:
    """Of an hour of one device."""
    return job.kinds[pool.hardware].cost if pool.cost is None else pool.cost


def _prefill_facts(job: Job, pool: PoolSettings) -> schema.PrefillFacts | None:
    other, prefill = job.prefill_pool(pool), pool.engines.prefill if pool.engines else None
    if other is None or prefill is None:
        return None
    return schema.PrefillFacts(pool=other.name, workers=prefill.workers, gpus=prefill.gpus)


def say(text: str) -> None:
    """Progress, on standard error: results go to standard output."""
    print(text, file=sys.stderr, flush=True)

"""One driver for train, eval and sim: a coordinator over a world, on whatever clock the event loop has.

`drive` runs the coordinator, and starts another over the same journal when one is killed. What reads the events is in
`books.py`.
"""

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from rollart.config.job import Job
from rollart.config.settings import PoolSettings, RewardSettings
from rollart.control.coordinator import Coordinator
from rollart.control.world import World
from rollart.errors import Deadlock, Interrupted, RollartError, StayedFull
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle
from rollart.launch.pools import task_shares

RARE = (500_000, 50, 1000)
"""Objects between two collections of garbage, and the same for those that have survived one, and two."""
RESTART_S = 5.0
"""Until a killed coordinator is replaced."""

Work = Callable[[Coordinator], Coroutine[Any, Any, None]]


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


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage cycles seldom: a run makes few, and each collection walks its many live objects. Half a
    million are about what the trajectories of a large step leave when they go, so a steady run seldom collects because
    of them; more would let the garbage of failed attempts grow (90 MB of it with a million, in `benchmarks.soak`)."""
    before = gc.get_threshold()
    gc.set_threshold(*RARE)
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

"""From a set-up to a shard and all that it plays with, in its own process. `real.py` does the same for a whole job."""

import asyncio
import contextlib
import gc
import time
from dataclasses import replace

from rollart.control.shard import Shard
from rollart.events import schema
from rollart.launch.driver import RARE
from rollart.launch.pools import shard_job
from rollart.launch.real import real_cluster, real_rollout
from rollart.launch.worker import task_sets_of
from rollart.records.format import FOLDER
from rollart.records.recorder import FileRecorder
from rollart.workers.handles import ShardService
from rollart.workers.setup import WorkerSetup


def real_shard(setup: WorkerSetup, given: WorkerSetup) -> ShardService:
    """Of the number that the set-up says. `given`: the set-up as it came, for what the shard starts elsewhere."""
    assert setup.shard is not None
    gc.set_threshold(*RARE)
    shards: list[Shard] = []

    def lost(worker: str, reason: str) -> None:
        for shard in shards:
            shard.lost(worker, reason)

    job = shard_job(setup.job, setup.shard.number)
    cluster = real_cluster(given, lost, trains=setup.shard.trains)
    rollout, close_rollout = real_rollout(setup, cluster, task_sets_of(job), lost, given)
    recorder = _recorder(setup, shards)
    shard = Shard(job, replace(rollout, recorder=recorder))
    shards.append(shard)

    async def close() -> None:
        await shard.close()
        await close_rollout()
        await cluster.close()
        if recorder is not None:
            await asyncio.to_thread(recorder.close)

    return ShardService(shard, close)


def _recorder(setup: WorkerSetup, shards: list[Shard]) -> FileRecorder | None:
    settings, shard = setup.job.trajectories, setup.shard
    if not settings.keep or shard is None:
        return None
    loop = asyncio.get_running_loop()

    def warn(text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            for one in shards:
                loop.call_soon_threadsafe(one.log.emit, schema.Warning(text=text))

    return FileRecorder(
        setup.out / FOLDER,
        share=settings.keep,
        total_bytes=None if settings.total_mb is None else settings.total_mb << 20,
        zero_s=loop.time() - (time.time() - shard.began_at),
        life=shard.life,
        warn=warn,
    )

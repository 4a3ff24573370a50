"""A real engine and a real trainer, each in its process, for the tests of what is between them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollart.cluster.local import LocalCluster
from rollart.config.load import build_job
from rollart.launch.worker import START
from rollart.store.shm import ShmStore
from rollart.types import EngineSpec
from rollart.workers.setup import WorkerSetup
from tests.real.harness import SOON_S, job
from tests.setups import worker_setup

SPEC = EngineSpec(id="cpu-0", pool="cpu", type="embedded", hardware="cpu", gpus=1)
MAX_BATCH = 4


@asynccontextmanager
async def local_cluster(
    model: Path, folder: Path, lost: Callable[[str, str], None] | None = None, **engines: Any
) -> AsyncIterator[tuple[LocalCluster, ShmStore]]:
    """As `rollart train` makes it; and the store that its workers use."""
    setup = small_setup(model, folder, **engines)
    store = ShmStore(setup.store.run_id, bucket_bytes=1 << 18)
    cluster = LocalCluster(START, setup, lost)
    try:
        async with asyncio.timeout(2 * SOON_S):
            yield cluster, store
    finally:
        await cluster.close()
        store.close()


def small_setup(model: Path, folder: Path, **engines: Any) -> WorkerSetup:
    """One engine and one trainer of the tiny model."""
    pools = [
        {"name": "cpu", "engines": {"count": 1, "max_batch": MAX_BATCH, "kv_tokens": 4096, **engines}},
        {"name": "environments", "slots": 3},
    ]
    raw = job(model, pools=pools, train={"pool": "cpu", "steps": 8, "lr": 1e-2})
    settings = build_job({**raw, "model": {"path": str(model), "context_tokens": 1024}})
    return worker_setup(settings, folder)

"""The engine contract, on the embedded engine in its thread, with weights through shared memory."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import pytest
import torch

from rollart.engines.embedded.threaded import ThreadedEngine
from rollart.model.network import named_weights
from rollart.store.prefetch import FetchAhead
from rollart.store.shm import ShmStore
from rollart.types import WeightManifest, WeightVersion
from tests.contracts.engine import EngineBench, EngineContract
from tests.engines.reference import make_engine, plain_model

MODELS = {version: plain_model("qwen3", seed=version) for version in range(3)}
MAX_BATCH = 4
SOON_S = 60.0


class TestThreadedEngine(EngineContract):
    ahead = False
    paged = False
    on = "cpu"

    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None:
        store = ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=4096)
        store.push(0, {})

        async def put(version: WeightVersion) -> WeightManifest:
            return store.push(version, named_weights(MODELS[version]))

        async def lose(manifest: WeightManifest) -> None:
            (store._dir / manifest.buckets[1].name).unlink()

        async def main() -> None:
            core = make_engine(MODELS[0], paged=self.paged, on=self.on, max_batch=MAX_BATCH, kv_tokens=4096)
            core._eos = frozenset()  # answers end by length, so that long ones are long
            if self.ahead:
                fetched = FetchAhead(store)
                engine = ThreadedEngine(core, fetch=fetched.fetch, stage=fetched.stage, spent_s=fetched.spent_s)
            else:
                engine = ThreadedEngine(core, fetch=store.fetch)
            bench = EngineBench(
                engine=engine, max_batch=MAX_BATCH, domain="a", put=put, lose=lose, too_long=1024, long_answer=256
            )
            try:
                async with asyncio.timeout(SOON_S):
                    await work(bench)
            finally:
                await engine.close()

        try:
            asyncio.run(main())
        finally:
            store.close()


class TestThreadedEngineFetchingAhead(TestThreadedEngine):
    ahead = True


class TestThreadedEngineOnPages(TestThreadedEngine):
    paged = True


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestThreadedEngineOnCuda(TestThreadedEngine):
    paged = True
    on = "cuda"

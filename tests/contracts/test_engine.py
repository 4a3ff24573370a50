"""The engine contract, on each adapter; the simulated engine whole, and with prefill and decode apart."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from rollart.config.settings import EngineSettings, Spread
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.engines.embedded.threaded import ThreadedEngine
from rollart.engines.launch import TOKEN_VARIABLE, ServerSettings, launch
from rollart.hardware import HARDWARE, MODELS, Disaggregated, kv_capacity_tokens
from rollart.model.network import named_weights
from rollart.ports import Engine
from rollart.store.prefetch import FetchAhead
from rollart.store.shm import ShmStore
from rollart.types import WeightManifest, WeightVersion
from tests.contracts.engine import EngineBench, EngineContract
from tests.contracts.remote import play_on
from tests.engines.fake_sglang import KEY, FakeSglang
from tests.engines.pairs import pair_of
from tests.engines.reference import NO_EOS, make_engine, plain_model
from tests.engines.remote import CONTEXT_TOKENS, Versions
from tests.sim.engines import Bench, run

VERSIONS = {version: plain_model("qwen3", seed=version) for version in range(3)}
MAX_BATCH = 4
SOON_S = 60.0


class TestSimEngine(EngineContract):
    apart: Disaggregated | None = None

    @property
    def max_batch(self) -> int:
        """Of the whole engine."""
        return 4

    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            bench = Bench(max_batch=4, answer=Spread(kind="uniform", mean=200, sigma=190), apart=self.apart)

            async def put(version: WeightVersion) -> WeightManifest:
                return bench.put(version)

            async def lose(manifest: WeightManifest) -> None:
                bench.store.damage(manifest.version, 0, lose=True)

            await work(
                EngineBench(
                    engine=bench.engine,
                    max_batch=self.max_batch,
                    domain="a",
                    put=put,
                    lose=lose,
                    too_long=kv_capacity_tokens(MODELS["qwen3-8b"], HARDWARE["h20"], 1),
                )
            )

        run(awaited)


class TestSimDisaggregated(TestSimEngine):
    apart = Disaggregated(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=25e9)


class TestSimDisaggregatedOfMany(TestSimEngine):
    apart = Disaggregated(hardware=HARDWARE["h800"], gpus=1, workers=3, decoders=2, link_bytes_per_s=25e9)

    @property
    def max_batch(self) -> int:
        return 2 * 4


class TestSglangEngine(EngineContract):
    """Against a server that speaks SGLang's protocol: SGLang itself needs CUDA, and was not run."""

    @pytest.fixture(autouse=True)
    def _setting(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, KEY)
        self.versions = Versions(tmp_path)
        self.log_dir = tmp_path

    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            core = EmbeddedEngine.from_directory(
                str(self.versions.path), EngineSettings(max_batch=4), max_context=CONTEXT_TOKENS
            )
            async with FakeSglang(core).serving() as server:
                settings = ServerSettings(
                    engines=EngineSettings(type="sglang", url=server.url),
                    engine_id="e0",
                    model=self.versions.path,
                    context_tokens=CONTEXT_TOKENS,
                    log_dir=self.log_dir,
                )
                store = self.versions.store
                await play_on(await launch(settings, store, FetchAhead(store)), self.versions, 4, work)

        asyncio.run(awaited())


class TestThreadedEngine(EngineContract):
    """The embedded engine in its thread, with weights through shared memory."""

    ahead = False
    paged = False
    on = "cpu"

    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None:
        store = ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=4096)
        store.push(0, {})

        async def put(version: WeightVersion) -> WeightManifest:
            return store.push(version, named_weights(VERSIONS[version]))

        async def lose(manifest: WeightManifest) -> None:
            (store.directory / manifest.buckets[1].name).unlink()

        async def main() -> None:
            engine, close = self.made(store)
            bench = EngineBench(
                engine=engine, max_batch=MAX_BATCH, domain="a", put=put, lose=lose, too_long=1024, long_answer=256
            )
            try:
                async with asyncio.timeout(SOON_S):
                    await work(bench)
            finally:
                await close()

        try:
            asyncio.run(main())
        finally:
            store.close()

    def made(self, store: ShmStore) -> tuple[Engine, Callable[[], Awaitable[None]]]:
        """The engine, and what closes it."""
        core = make_engine(VERSIONS[0], paged=self.paged, on=self.on, max_batch=MAX_BATCH, kv_tokens=4096, eos=NO_EOS)
        if not self.ahead:
            engine = ThreadedEngine(core, fetch=store.fetch)
            return engine, engine.close
        fetched = FetchAhead(store)
        engine = ThreadedEngine(core, fetch=fetched.fetch, stage=fetched.stage, pulled=fetched.pulled, adopt=True)
        return engine, engine.close


class TestThreadedEngineFetchingAhead(TestThreadedEngine):
    ahead = True


class TestThreadedEngineOnPages(TestThreadedEngine):
    paged = True


class TestPairedEngine(TestThreadedEngine):
    """Prefill and decode apart, in one process here; `tests/real` has two."""

    def made(self, store: ShmStore) -> tuple[Engine, Callable[[], Awaitable[None]]]:
        fetched = FetchAhead(store)
        pair, _ = pair_of(
            VERSIONS[0],
            fetch=fetched.fetch,
            stage=fetched.stage,
            on=self.on,
            max_batch=MAX_BATCH,
            kv_tokens=4096,
        )
        return pair, pair.close


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestPairedEngineOnCuda(TestPairedEngine):
    on = "cuda"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestThreadedEngineOnCuda(TestThreadedEngineOnPages):
    on = "cuda"

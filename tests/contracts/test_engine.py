"""The engine contract, on each adapter; the simulated engine whole, and with prefill and decode apart."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollart.config.settings import EngineSettings, Spread
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.engines.launch import TOKEN_VARIABLE, ServerSettings, launch
from rollart.hardware import HARDWARE, MODELS, Disaggregated, kv_capacity_tokens
from rollart.types import WeightManifest, WeightVersion
from tests.contracts.engine import EngineBench, EngineContract
from tests.contracts.remote import play_on
from tests.engines.fake_sglang import KEY, FakeSglang
from tests.engines.remote import CONTEXT_TOKENS, Versions
from tests.sim.engines import Bench, run


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
                await play_on(await launch(settings, fetch=store.fetch, folder=store.folder), self.versions, 4, work)

        asyncio.run(awaited())

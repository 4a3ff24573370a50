"""The engine contract, on the simulated engine."""

from collections.abc import Awaitable, Callable

from rollart.config import Spread
from rollart.hardware import HARDWARE, MODELS, kv_capacity_tokens
from rollart.types import WeightManifest, WeightVersion
from tests.contracts.engine import EngineBench, EngineContract
from tests.sim.engines import Bench, run


class TestSimEngine(EngineContract):
    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            bench = Bench(max_batch=4, answer=Spread(kind="uniform", mean=200, sigma=190))

            async def put(version: WeightVersion) -> WeightManifest:
                return bench.put(version)

            async def lose(manifest: WeightManifest) -> None:
                bench.store.damage(manifest.version, 0, lose=True)

            await work(
                EngineBench(
                    engine=bench.engine,
                    max_batch=4,
                    domain="a",
                    put=put,
                    lose=lose,
                    too_long=kv_capacity_tokens(MODELS["qwen3-8b"], HARDWARE["h20"], 1),
                )
            )

        run(awaited)

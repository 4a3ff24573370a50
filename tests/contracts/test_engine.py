"""The engine contract, on the simulated engine, whole and in two halves."""

from collections.abc import Awaitable, Callable

from rollart.config import Spread
from rollart.hardware import HARDWARE, MODELS, Pair, kv_capacity_tokens
from rollart.types import WeightManifest, WeightVersion
from tests.contracts.engine import EngineBench, EngineContract
from tests.sim.engines import Bench, run


class TestSimEngine(EngineContract):
    pair: Pair | None = None

    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            bench = Bench(max_batch=4, answer=Spread(kind="uniform", mean=200, sigma=190), pair=self.pair)

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


class TestSimPair(TestSimEngine):
    pair = Pair(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=25e9)

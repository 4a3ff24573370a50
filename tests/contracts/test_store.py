"""The store contract, on the simulated store. The real ones: tests/store."""

from collections.abc import Awaitable, Callable

from rollart.errors import WeightError
from rollart.types import WeightManifest
from tests.contracts.store import StoreBench, StoreContract
from tests.sim.engines import Bench, run


class TestSimStore(StoreContract):
    def play(self, work: Callable[[StoreBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            bench = Bench()

            def whole(manifest: WeightManifest) -> bool:
                try:
                    return set(bench.store.read(manifest)) == {manifest.version}
                except WeightError:
                    return False

            await work(StoreBench(store=bench.store, put=bench.put, whole=whole))

        run(awaited)

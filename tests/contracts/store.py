"""What every WeightStore must do: one suite, run against each adapter. Control only ever drops old versions."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollart.ports import WeightStore
from rollart.types import WeightManifest, WeightVersion


@dataclass
class StoreBench:
    store: WeightStore
    """Empty."""
    put: Callable[[WeightVersion], WeightManifest]
    """Makes a version complete."""
    whole: Callable[[WeightManifest], bool]
    """All of it can be read, and it is of that version."""


class StoreContract(ABC):
    @abstractmethod
    def play(self, work: Callable[[StoreBench], Awaitable[None]]) -> None: ...

    def test_older_versions_go_and_the_others_stay(self) -> None:
        async def work(bench: StoreBench) -> None:
            manifests = [bench.put(version) for version in range(4)]
            assert all(bench.whole(manifest) for manifest in manifests)
            await bench.store.drop_before(2)
            assert [bench.whole(manifest) for manifest in manifests] == [False, False, True, True]

        self.play(work)

    def test_dropping_again_or_nothing_is_fine(self) -> None:
        async def work(bench: StoreBench) -> None:
            await bench.store.drop_before(5)
            manifest = bench.put(3)
            await bench.store.drop_before(3)
            await bench.store.drop_before(3)
            assert bench.whole(manifest)

        self.play(work)

    def test_a_version_pushed_again_is_whole(self) -> None:
        async def work(bench: StoreBench) -> None:
            await bench.store.drop_before(1)
            for _ in range(2):
                assert bench.whole(bench.put(1))

        self.play(work)

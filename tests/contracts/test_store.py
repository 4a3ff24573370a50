"""The store contract: simulated, in shared memory, in files."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from rollart.errors import WeightError
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.shm import ShmStore
from rollart.types import WeightManifest, WeightVersion
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


class TestShmStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self) -> BucketStore:
        return ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=512)

    def play(self, work: Callable[[StoreBench], Awaitable[None]]) -> None:
        store = self.make()

        def weights(version: WeightVersion) -> dict[str, torch.Tensor]:
            return {f"w{number}": torch.full((100,), float(10 * version + number)) for number in range(6)}

        def whole(manifest: WeightManifest) -> bool:
            try:
                found = store.fetch(manifest)
            except WeightError:
                return False
            return all(torch.equal(found[name], wanted) for name, wanted in weights(manifest.version).items())

        async def main() -> None:
            await work(StoreBench(store=store, put=lambda version: store.push(version, weights(version)), whole=whole))

        try:
            asyncio.run(main())
        finally:
            store.close()


class TestFileStore(TestShmStore):
    def make(self) -> BucketStore:
        return FileStore(self.folder / "weights", bucket_bytes=512, patience_s=0.0)

"""What every WeightStore must do: one suite, run against each adapter. Control only ever drops old versions.

`StoreContract` is the port's, and the simulated store passes it too. `TensorStoreContract` is what trainers and engines
need of a store that holds real tensors.
"""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollart.errors import StoreFull, WeightError
from rollart.ports import WeightStore
from rollart.store.buckets import BucketStore
from rollart.store.prefetch import FetchAhead
from rollart.types import Bucket, Probe, WeightManifest, WeightVersion


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


@dataclass
class TensorBench:
    """One store as three processes would have it, and what a test can do to it. `bucket_bytes` is 4096."""

    trainer: BucketStore
    engine: BucketStore
    coordinator: BucketStore
    left: Callable[[], list[Path]]
    """Everything that the store has on this machine."""
    copies: bool = False
    """The engine reads a copy, which can be made again."""

    def damage(self, bucket: Bucket) -> None:
        """Flip a bit in the middle of it, where the engine reads."""
        path = self.engine.directory / bucket.name
        data = bytearray(path.read_bytes())
        data[bucket.start + bucket.num_bytes // 2] ^= 4
        path.write_bytes(data)

    def has(self, version: WeightVersion) -> bool:
        """Whether something of a version takes room where the engine is."""
        return self.engine.folder(version).exists()


def tensors(version: int) -> dict[str, Tensor]:
    """Several buckets, a tensor of three, every kind of size and type."""
    generator = torch.Generator().manual_seed(version)
    return {
        **{f"layer.{number}": torch.randn(20, 30, generator=generator) for number in range(4)},
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "large": torch.randn(50, 60, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
    }


def is_version(found: dict[str, Tensor], version: int) -> bool:
    wanted = tensors(version)
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name].cpu(), tensor) for name, tensor in wanted.items()
    )


def eventually(true: Callable[[], object], within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Gated(dict[str, Tensor]):
    """Tensors of which the later ones come when the gate is opened."""

    def __init__(self, version: int) -> None:
        super().__init__(tensors(version))
        self.gate = threading.Event()

    def items(self):  # type: ignore[no-untyped-def,override]
        for number, item in enumerate(super().items()):
            if number == 5:
                self.gate.wait(30)
            yield item


class InParts:
    """A tensor whose bytes come a part at a time, always in the same piece of memory, as a sharded trainer's do."""

    part_bytes = 1000
    memory = torch.zeros(part_bytes, dtype=torch.uint8)

    def __init__(self, whole: Tensor) -> None:
        self.shape: tuple[int, ...] = tuple(whole.shape)
        self.dtype, self.itemsize, self.nbytes = whole.dtype, whole.itemsize, whole.nbytes
        self._raw = whole.contiguous().reshape(-1).view(torch.uint8)

    def read(self, begin: int, end: int) -> Tensor:
        assert end - begin <= self.part_bytes
        self.memory.fill_(0xAA)
        return self.memory[: end - begin].copy_(self._raw[begin:end])


class TensorStoreContract(ABC):
    @abstractmethod
    def opened(self) -> AbstractContextManager[TensorBench]:
        """A store that is empty. An engine that waits for what does not come gives up after a few seconds."""

    @abstractmethod
    def full(self) -> AbstractContextManager[TensorBench]:
        """The same with room for less than 1 MB."""

    @pytest.fixture
    def bench(self) -> Iterator[TensorBench]:
        with self.opened() as bench:
            yield bench

    def test_what_is_pushed_is_fetched_bit_by_bit(self, bench: TensorBench) -> None:
        probe = Probe(tokens=(1, 2), logprobs=(-0.5,))
        manifest = bench.trainer.push(3, tensors(3), probe)
        assert is_version(bench.engine.fetch(manifest), 3)
        eventually(lambda: bench.engine.manifest(3) == manifest)  # a host's copy has it a moment after its buckets
        assert manifest.probe == probe
        assert bench.engine.manifest(4) is None

    def test_tensors_that_come_in_parts_are_pushed_bit_by_bit(self, bench: TensorBench) -> None:
        for version in (1, 2):
            parted = {name: InParts(tensor) for name, tensor in tensors(version).items()}
            assert is_version(bench.engine.fetch(bench.trainer.push(version, parted)), version)

    def test_a_large_tensor_is_split_and_its_file_is_whole(self, bench: TensorBench) -> None:
        manifest = bench.trainer.push(1, tensors(1))
        slices = [bucket for bucket in manifest.buckets if bucket.start]
        assert len(slices) >= 2
        assert all(bucket.num_bytes <= 4096 + 2048 for bucket in manifest.buckets)
        assert is_version(bench.engine.fetch(manifest), 1)

    def test_the_manifest_is_last_and_buckets_are_read_during_the_push(self, bench: TensorBench) -> None:
        slow, pushed = Gated(1), list[WeightManifest]()
        push = threading.Thread(target=lambda: pushed.append(bench.trainer.push(1, slow)))
        push.start()
        try:
            ahead = FetchAhead(bench.engine)
            ahead.stage(1)
            eventually(lambda: ahead.pulled(1).seconds > 0)
            assert bench.engine.manifest(1) is None
        finally:
            slow.gate.set()
            push.join()
        assert is_version(ahead.fetch(pushed[0]), 1)

    def test_pushed_again_it_is_the_second_and_who_has_the_first_keeps_it(self, bench: TensorBench) -> None:
        first = bench.trainer.push(1, tensors(7))
        held = bench.engine.fetch(first)
        second = bench.trainer.push(1, tensors(1))
        assert is_version(bench.engine.fetch(second), 1)
        assert is_version(held, 7)
        with pytest.raises(WeightError):  # never a mix
            bench.engine.fetch(first)

    def test_a_damaged_bucket_is_named_and_mended_by_another_push(self, bench: TensorBench) -> None:
        manifest = bench.trainer.push(1, tensors(1))
        eventually(lambda: bench.engine.manifest(1) == manifest)
        bench.damage(manifest.buckets[2])
        if bench.copies:
            assert is_version(bench.engine.fetch(manifest), 1)
        else:
            with pytest.raises(WeightError, match="damaged, digest"):
                bench.engine.fetch(manifest)
        assert is_version(bench.engine.fetch(bench.trainer.push(1, tensors(1))), 1)

    def test_dropped_versions_go_the_others_stay_and_mappings_live_on(self, bench: TensorBench) -> None:
        manifests = [bench.trainer.push(version, tensors(version)) for version in (1, 2, 3)]
        held = bench.engine.fetch(manifests[0])
        bench.engine.fetch(manifests[2])
        asyncio.run(bench.coordinator.drop_before(3))
        eventually(lambda: not bench.has(2))
        with pytest.raises(WeightError, match=r"version 1|missing"):
            bench.engine.fetch(manifests[0])
        assert is_version(bench.engine.fetch(manifests[2]), 3)
        assert is_version(held, 1)
        assert is_version(bench.engine.fetch(bench.trainer.push(4, tensors(4))), 4)

    def test_many_versions_leave_nothing(self, bench: TensorBench) -> None:
        for version in range(1, 8):
            manifest = bench.trainer.push(version, tensors(version))
            assert is_version(bench.engine.fetch(manifest), version)
            asyncio.run(bench.coordinator.drop_before(version))
        eventually(lambda: not bench.has(6))
        bench.coordinator.close()
        eventually(lambda: not bench.left())

    def test_a_store_without_room_says_so_keeps_no_part_and_goes_on(self) -> None:
        with self.full() as bench:
            manifest = bench.trainer.push(1, tensors(1))
            with pytest.raises(StoreFull, match="push of version 2"):
                bench.trainer.push(2, {f"w{number}": torch.zeros(30_000) for number in range(200)})
            assert bench.engine.manifest(2) is None
            assert is_version(bench.engine.fetch(manifest), 1)
            assert is_version(bench.engine.fetch(bench.trainer.push(2, tensors(2))), 2)

"""Buckets mapped ahead of a swap: sooner, but never anything else."""

import time
import uuid
from collections.abc import Callable, Iterator

import pytest
import torch

from rollart.errors import WeightError
from rollart.store import prefetch
from rollart.store.buckets import MappedFile
from rollart.store.prefetch import POLL_S, FetchAhead
from rollart.store.shm import ShmStore
from rollart.types import Bucket, WeightManifest, WeightVersion


def weights(version: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((100,), float(10 * version + number)) for number in range(6)}


def is_version(tensors: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(tensors[name], wanted) for name, wanted in weights(version).items())


@pytest.fixture
def store() -> Iterator[ShmStore]:
    store = ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=512)
    yield store
    store.close()


class Counting(ShmStore):
    """Knows which buckets were mapped, and in which thread's call: ahead, or within `fetch`."""

    fetching = False
    looks = 0
    """How often somebody asked what has appeared."""

    def appeared(self, version: WeightVersion) -> tuple[Bucket, ...]:
        self.looks += 1
        return super().appeared(version)

    def map_file(self, name: str) -> MappedFile:
        (self.late if self.fetching else self.early).append(name)
        return super().map_file(name)

    def fetch(self, manifest: WeightManifest, ahead: "dict[str, MappedFile] | None" = None) -> dict[str, torch.Tensor]:  # type: ignore[override]
        self.fetching = True
        try:
            return super().fetch(manifest, ahead)
        finally:
            self.fetching = False

    early: list[str]
    late: list[str]


@pytest.fixture
def counting() -> Iterator[Counting]:
    store = Counting(f"test-{uuid.uuid4().hex}", bucket_bytes=512)
    store.early, store.late = [], []
    yield store
    store.close()


def eventually(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_what_is_staged_is_mapped_when_it_appears_and_the_swap_maps_nothing(counting: Counting) -> None:
    ahead = FetchAhead(counting)
    ahead.stage(1)
    eventually(lambda: counting.looks > 0)
    assert counting.early == []
    manifest = counting.push(1, weights(1))
    eventually(lambda: len(counting.early) == len(manifest.buckets))
    assert is_version(ahead.fetch(manifest), 1)
    assert (counting.early, counting.late) == ([bucket.name for bucket in manifest.buckets], [])
    assert ahead.pulled(1).seconds > 0
    assert is_version(ahead.fetch(manifest), 1), "a second engine's, or a second try: from the store itself"
    assert counting.late == counting.early


def test_a_part_that_was_there_is_used_and_the_rest_is_fetched_by_the_swap(counting: Counting) -> None:
    manifest = counting.push(1, weights(1))
    held = {name: counting.map_file(name) for name in [manifest.buckets[0].name]}
    held[manifest.buckets[0].name].digest(manifest.buckets[0])
    assert is_version(counting.fetch(manifest, held), 1)
    assert counting.late == [bucket.name for bucket in manifest.buckets[1:]]


def test_a_version_pushed_again_with_other_bytes_is_never_mixed(counting: Counting) -> None:
    ahead = FetchAhead(counting)
    first = counting.push(1, weights(7))
    ahead.stage(1)
    eventually(lambda: len(counting.early) == len(first.buckets))
    second = counting.push(1, weights(1))
    assert is_version(ahead.fetch(second), 1)
    assert len(counting.late) == len(second.buckets)


def test_a_lost_bucket_that_was_mapped_in_time_is_no_loss_and_else_a_weight_error(counting: Counting) -> None:
    ahead = FetchAhead(counting)
    manifest = counting.push(1, weights(1))
    ahead.stage(1)
    eventually(lambda: len(counting.early) == len(manifest.buckets))
    (counting.directory / manifest.buckets[0].name).unlink()
    assert is_version(ahead.fetch(manifest), 1)
    with pytest.raises(WeightError, match="missing"):
        ahead.fetch(manifest)


def test_a_newer_version_lets_go_of_the_older(counting: Counting) -> None:
    ahead = FetchAhead(counting)
    ahead.stage(1)
    first = counting.push(1, weights(1))
    eventually(lambda: len(counting.early) > 1)
    ahead.stage(2)
    second = counting.push(2, weights(2))
    eventually(lambda: {bucket.name for bucket in second.buckets} <= set(counting.early))
    assert is_version(ahead.fetch(second), 2)
    assert counting.late == []
    assert is_version(ahead.fetch(first), 1)
    assert counting.late == [bucket.name for bucket in first.buckets], "nothing of it was kept"


def test_the_thread_sleeps_when_a_version_is_whole(counting: Counting) -> None:
    ahead = FetchAhead(counting)
    manifest = counting.push(1, weights(1))
    ahead.stage(1)
    eventually(lambda: len(counting.early) == len(manifest.buckets))

    def quiet() -> bool:
        before = counting.looks
        time.sleep(20 * POLL_S)
        return counting.looks == before

    eventually(quiet)


def test_staging_is_done_when_the_whole_version_is_here_and_not_before(counting: Counting) -> None:
    ahead = FetchAhead(counting)
    here = ahead.stage(1)
    eventually(lambda: counting.looks > 2)
    assert not here.done()
    counting.push(1, weights(1))
    here.result(20)
    assert counting.early
    assert ahead.stage(1) is here, "asked again, it is still there"
    other = ahead.stage(2)
    assert not other.done()
    ahead.stage(3)
    other.result(20)


def test_a_lost_bucket_ends_the_staging_and_is_the_swaps_to_find(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nobody would ever swap, and nobody would hear of it."""
    monkeypatch.setattr(prefetch, "LATE_S", 0.2)
    manifest = counting.push(1, weights(1))
    (counting.directory / manifest.buckets[0].name).unlink()
    ahead = FetchAhead(counting)
    ahead.stage(1).result(20)
    with pytest.raises(WeightError, match="missing"):
        ahead.fetch(manifest)

"""The shared-memory store: manifest last, damage named, nothing left behind."""

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollart.errors import WeightError
from rollart.weights import shm
from rollart.weights.shm import ROOT, ShmStore


@pytest.fixture
def store() -> Iterator[ShmStore]:
    run_id = f"test-{uuid.uuid4().hex}"
    store = ShmStore(run_id, bucket_bytes=1024)
    yield store
    store.close()
    assert not (ROOT / f"rollart-{run_id}").exists()


def folder(store: ShmStore) -> Path:
    return store._dir


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(30, 7, generator=generator),
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "big": torch.randn(600, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "scalar": torch.tensor(3.5),
        "ids": torch.arange(9),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_what_is_pushed_is_fetched(store: ShmStore) -> None:
    manifest = store.push(3, weights())
    assert manifest.version == 3
    assert len(manifest.buckets) > 2
    assert all(place.offset % shm.ALIGNMENT == 0 for place in manifest.tensors.values())
    assert_same(store.fetch(manifest), weights())
    assert store.manifest(3) == manifest
    assert store.manifest(4) is None


def test_another_process_reads_it_and_takes_nothing_along(store: ShmStore) -> None:
    manifest = store.push(0, weights())
    code = (
        "import sys; from rollart.weights.shm import ShmStore; store = ShmStore(sys.argv[1]);"
        "manifest = store.manifest(0); print(float(store.fetch(manifest)['embed'].sum()))"
    )
    run_id = folder(store).name.removeprefix("rollart-")
    done = subprocess.run([sys.executable, "-c", code, run_id], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(float(weights()["embed"].sum()))
    assert_same(store.fetch(manifest), weights())


def test_fetch_maps_and_does_not_copy(store: ShmStore) -> None:
    manifest = store.push(0, {"a": torch.ones(100), "b": torch.zeros(100)})
    found = store.fetch(manifest)
    assert found["b"].data_ptr() - found["a"].data_ptr() == manifest.tensors["b"].offset
    found["a"].fill_(7)  # a private page: the store does not change
    assert_same(store.fetch(manifest), {"a": torch.ones(100), "b": torch.zeros(100)})


def test_manifest_is_last(store: ShmStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment of a push, a version that has a manifest has all its buckets."""
    seen: list[str] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        assert store.manifest(1) is None
        seen.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr("rollart.weights.shm.os.replace", watched)
    manifest = store.push(1, weights())
    assert seen == [*(Path(bucket.name).name for bucket in manifest.buckets), "manifest.json"]


def test_push_cut_short_shows_no_version(store: ShmStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.push(1, weights(0))
    writes = iter(range(3))

    def full(handle: int, piece: memoryview, digest: int) -> int:
        if next(writes, None) is None:
            raise OSError(28, "No space left on device")
        return digest

    monkeypatch.setattr(shm, "_write", full)
    with pytest.raises(WeightError, match=r"push of version 1 .*No space left"):
        store.push(1, weights(1))
    assert store.manifest(1) is None


@pytest.mark.parametrize("at", [0, 100, -1])
def test_damaged_bucket_is_named(store: ShmStore, at: int) -> None:
    manifest = store.push(2, weights())
    path = folder(store) / manifest.buckets[1].name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightError, match=r"v00000002/00001.bucket: damaged, digest"):
        store.fetch(manifest)


def test_short_and_missing_buckets_are_named(store: ShmStore) -> None:
    manifest = store.push(2, weights())
    path = folder(store) / manifest.buckets[0].name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightError, match=r"v00000002/00000.bucket: damaged, .* bytes instead of"):
        store.fetch(manifest)
    path.unlink()
    with pytest.raises(WeightError, match=r"v00000002/00000.bucket: missing"):
        store.fetch(manifest)


def test_pushed_again_it_is_whole_again(store: ShmStore) -> None:
    manifest = store.push(2, weights())
    held = store.fetch(manifest)
    (folder(store) / manifest.buckets[0].name).unlink()
    assert store.push(2, weights()) == manifest
    assert_same(store.fetch(manifest), weights())
    store.push(2, weights(1))
    assert_same(held, weights())
    with pytest.raises(WeightError, match="damaged"):  # the old manifest never gives a mix
        store.fetch(manifest)


def test_damaged_manifest_is_an_error(store: ShmStore) -> None:
    store.push(2, weights())
    (folder(store) / "v00000002" / "manifest.json").write_text("{")
    with pytest.raises(WeightError, match="manifest of version 2"):
        store.manifest(2)


def test_drop_keeps_mappings_and_newer_versions(store: ShmStore) -> None:
    manifests = [store.push(version, weights(version)) for version in range(4)]
    held = store.fetch(manifests[0])
    asyncio.run(store.drop_before(2))
    assert sorted(path.name for path in folder(store).iterdir()) == ["v00000002", "v00000003"]
    assert store.manifest(0) is None
    assert_same(held, weights(0))
    with pytest.raises(WeightError, match="missing"):
        store.fetch(manifests[1])
    assert_same(store.fetch(manifests[2]), weights(2))


def test_empty_store_can_be_dropped_and_closed(store: ShmStore) -> None:
    asyncio.run(store.drop_before(5))
    store.close()
    assert not folder(store).exists()


def test_only_file_names_are_run_ids() -> None:
    with pytest.raises(ValueError, match=r"^run_id: .*; use"):
        ShmStore("../x")
    with pytest.raises(ValueError, match=r"^bucket_bytes: .*; give"):
        ShmStore("x", bucket_bytes=1)

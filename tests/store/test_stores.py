"""The stores: manifest last, damage named, nothing left behind; one suite for shared memory and files."""

import asyncio
import errno
import os
import re
import subprocess
import sys
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rollart.errors import StoreFull, WeightError
from rollart.store import index
from rollart.store.buckets import BucketStore
from rollart.store.digests import CHUNK_BYTES
from rollart.store.files import FileStore
from rollart.store.format import laid_out, sliced
from rollart.store.media import Medium, Put
from rollart.store.shm import ShmStore
from rollart.types import Bucket, Probe


@pytest.fixture(params=["shm", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BucketStore]:
    store: BucketStore = (
        ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=1024)
        if request.param == "shm"
        else FileStore(tmp_path / "weights", bucket_bytes=1024, patience_s=0.0)
    )
    yield store
    store.close()
    assert not folder(store).exists()


def folder(store: BucketStore) -> Path:
    return store.directory


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


class Lazy(Mapping[str, Tensor]):
    """Tensors that come into being when they are asked for, as a sharded trainer's do; counts how many are alive."""

    def __init__(self, names: Iterable[str], numel: int) -> None:
        self._names = list(names)
        self._numel = numel
        self.alive = self.peak = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.full((self._numel,), float(self._names.index(name)))
        self.alive += 1
        self.peak = max(self.peak, self.alive)
        weakref.finalize(tensor, self._gone)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _gone(self) -> None:
        self.alive -= 1


def test_a_version_is_written_bucket_by_bucket(store: BucketStore) -> None:
    """64 tensors, four to a bucket: a bucket, and the tensor that did not fit any more."""
    lazy = Lazy([f"layer.{index}" for index in range(64)], numel=64)
    manifest = store.push(1, lazy)
    assert lazy.peak <= 5
    assert (lazy.alive, len(manifest.buckets)) == (0, 16)
    found = store.fetch(manifest)
    assert [float(found[name][0]) for name in lazy] == list(range(64))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_what_is_pushed_is_fetched(store: BucketStore) -> None:
    manifest = store.push(3, weights())
    assert manifest.version == 3
    assert len(manifest.buckets) > 2
    found = store.fetch(manifest)
    assert_same(found, weights())
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in found.values())
    assert store.manifest(3) == manifest
    assert store.manifest(4) is None


def test_another_process_reads_it_and_takes_nothing_along(store: BucketStore) -> None:
    manifest = store.push(0, weights())
    code = (
        "import sys; from pathlib import Path; from rollart.store.files import FileStore;"
        "from rollart.store.shm import ShmStore; at = Path(sys.argv[1]);"
        "store = ShmStore(at.name.removeprefix('rollart-')) if at.parent == Path('/dev/shm') else FileStore(at);"
        "manifest = store.manifest(0); print(float(store.fetch(manifest)['embed'].sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder(store))], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(float(weights()["embed"].sum()))
    assert_same(store.fetch(manifest), weights())


def test_fetch_maps_and_does_not_copy(store: BucketStore) -> None:
    manifest = store.push(0, {"a": torch.ones(100), "b": torch.zeros(100)})
    found = store.fetch(manifest)
    assert found["b"].data_ptr() - found["a"].data_ptr() == found["a"].nbytes, "side by side, as in the file"
    found["a"].fill_(7)  # a private page: the store does not change
    assert_same(store.fetch(manifest), {"a": torch.ones(100), "b": torch.zeros(100)})


def test_manifest_is_last(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment of a push, what the index names is there, and a version that has a manifest is whole."""
    added: list[Bucket] = []
    add = index.Writer.add

    def watched(writer: index.Writer, bucket: Bucket) -> None:
        assert store.manifest(1) is None
        add(writer, bucket)
        added.append(bucket)
        assert list(store.appeared(1)) == added
        assert all(store.map_file(one.name).digest(one) == one.digest for one in added)

    monkeypatch.setattr(index.Writer, "add", watched)
    manifest = store.push(1, weights())
    assert added == list(manifest.buckets)
    assert store.manifest(1) == manifest


def test_a_tensor_larger_than_a_bucket_is_slices_of_one_file(store: BucketStore) -> None:
    big = torch.arange(900.0)
    manifest = store.push(1, {"small": torch.ones(3), "big": big, "last": torch.zeros(2)})
    slices = [bucket for bucket in manifest.buckets if bucket.name.endswith("model-00002.safetensors")]
    assert len(slices) == 4
    assert [bucket.num_bytes for bucket in slices[:-1]] == [1024] * 3
    assert [bucket.start for bucket in slices] == [0, 1024, 2048, 3072]
    assert manifest.num_bytes == sum(path.stat().st_size for path in folder(store).rglob("*.safetensors"))
    assert torch.equal(store.fetch(manifest)["big"], big)
    assert torch.equal(load_file(folder(store) / slices[0].name)["big"], big), "and any reader finds it whole"
    path = folder(store) / slices[0].name
    data = bytearray(path.read_bytes())
    data[2100] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightError, match=r"model-00002.safetensors at 2048: damaged, digest"):
        store.fetch(manifest)


def test_pieces_of_a_file_end_at_multiples_of_their_size() -> None:
    """But for the ends of tensors and of buckets. The cache of the system has a file in pages as it was written."""
    head, ordered = laid_out({"a": torch.zeros(CHUNK_BYTES + 3), "b": torch.zeros(5 * CHUNK_BYTES // 4)})
    bounds = {len(head), len(head) + ordered[0].nbytes, len(head) + ordered[0].nbytes + ordered[1].nbytes}
    pieces = [(at, len(piece)) for _, parts in sliced(head, ordered, 1 << 30) for at, piece in parts]
    assert [at for at, _ in pieces] == [0, *(at + size for at, size in pieces[:-1])]
    ends = {at + size for at, size in pieces}
    assert bounds < ends
    assert all(end % CHUNK_BYTES == 0 for end in ends - bounds)
    assert max(size for _, size in pieces) == CHUNK_BYTES


def test_push_cut_short_shows_no_version(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.push(1, weights(0))
    writes = iter(range(2))
    medium = type(store.medium)
    whole = medium.writing

    def full(self: Medium, path: Path, num_bytes: int) -> AbstractContextManager[Put]:
        if next(writes, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(self, path, num_bytes)

    monkeypatch.setattr(medium, "writing", full)
    with pytest.raises(StoreFull, match=r"push of version 1 .*No space left"):
        store.push(1, weights(1))
    assert store.manifest(1) is None
    assert not list(folder(store).rglob("*.safetensors")), "a part of a version takes the room that is missing"


@pytest.mark.parametrize("at", [0, 100, -1])
def test_damaged_bucket_is_named(store: BucketStore, at: int) -> None:
    manifest = store.push(2, weights())
    path = folder(store) / manifest.buckets[1].name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightError, match=re.escape(manifest.buckets[1].name) + ".*: damaged, digest"):
        store.fetch(manifest)


def test_short_and_missing_buckets_are_named(store: BucketStore) -> None:
    manifest = store.push(2, weights())
    path = folder(store) / manifest.buckets[0].name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightError, match=re.escape(manifest.buckets[0].name) + ": damaged, .* bytes instead of"):
        store.fetch(manifest)
    path.unlink()
    with pytest.raises(WeightError, match=re.escape(manifest.buckets[0].name) + ": missing"):
        store.fetch(manifest)


def test_pushed_again_it_is_whole_again(store: BucketStore) -> None:
    manifest = store.push(2, weights())
    held = store.fetch(manifest)
    (folder(store) / manifest.buckets[0].name).unlink()
    assert store.push(2, weights()) == manifest
    assert_same(store.fetch(manifest), weights())
    store.push(2, weights(1))
    assert_same(held, weights())
    with pytest.raises(WeightError, match="damaged"):  # the old manifest never gives a mix
        store.fetch(manifest)


def test_damaged_manifest_is_an_error(store: BucketStore) -> None:
    store.push(2, weights())
    (folder(store) / "v00000002" / "manifest.json").write_text("{")
    with pytest.raises(WeightError, match="manifest of version 2"):
        store.manifest(2)


def test_drop_keeps_mappings_and_newer_versions(store: BucketStore) -> None:
    manifests = [store.push(version, weights(version)) for version in range(4)]
    held = store.fetch(manifests[0])
    asyncio.run(store.drop_before(2))
    names = {path.name for path in folder(store).iterdir()}
    assert names - {"spare"} == {"v00000002", "v00000003"}
    assert store.manifest(0) is None
    assert_same(held, weights(0))
    with pytest.raises(WeightError, match="missing"):
        store.fetch(manifests[1])
    assert_same(store.fetch(manifests[2]), weights(2))


def test_empty_store_can_be_dropped_and_closed(store: BucketStore) -> None:
    asyncio.run(store.drop_before(5))
    store.close()
    assert not folder(store).exists()


def test_the_probe_travels_in_the_manifest(store: BucketStore) -> None:
    probe = Probe(tokens=(1, 2, 3, 4), logprobs=(-0.5, -1.25), num_sequences=2)
    assert store.push(0, weights(), probe).probe == probe
    found = store.manifest(0)
    assert found is not None
    assert found.probe == probe


def test_only_file_names_are_run_ids() -> None:
    with pytest.raises(ValueError, match=r"^run_id: .*; use"):
        ShmStore("../x")


def test_files_of_a_version_are_what_safetensors_reads(store: BucketStore) -> None:
    manifest = store.push(0, weights())
    found: dict[str, Tensor] = {}
    for bucket in manifest.buckets:
        found |= load_file(folder(store) / bucket.name)
    assert_same({name: found[name] for name in weights()}, weights())


def test_a_push_that_is_split_otherwise_leaves_nothing_of_the_first(store: BucketStore) -> None:
    store.push(0, weights())
    store.bucket_bytes = 100_000
    manifest = store.push(0, weights(1))
    assert store.appeared(0) == manifest.buckets
    assert {f"v00000000/{path.name}" for path in (folder(store) / "v00000000").glob("*.safetensors")} == {
        bucket.name for bucket in manifest.buckets
    }
    assert_same(store.fetch(manifest), weights(1))


def test_a_version_is_a_hugging_face_directory(tmp_path: Path) -> None:
    """transformers loads it by its path, and computes what the tensors pushed compute."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    pushed = {name: tensor + 0.5 for name, tensor in model.state_dict().items()}
    store = FileStore(tmp_path / "weights", bucket_bytes=4096, model_path=tmp_path / "model")
    for bucket_bytes in (4096, 100_000):  # the second push is split otherwise, and leaves nothing of the first
        store = FileStore(tmp_path / "weights", bucket_bytes=bucket_bytes, model_path=tmp_path / "model")
        manifest = store.push(5, pushed)
        names = {path.name for path in store.folder(5).iterdir()}
        assert {"config.json", "tokenizer.json", "generation_config.json", "manifest.json"} <= names
        assert {name for name in names if name.endswith(".safetensors")} == {
            Path(bucket.name).name for bucket in manifest.buckets
        }
        loaded = LlamaForCausalLM.from_pretrained(store.folder(5))
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, pushed[name])

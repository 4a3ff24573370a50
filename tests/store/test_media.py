"""Shared memory is used again, and never under somebody who still reads it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollart.store.media import SharedMemory
from rollart.store.shm import ShmStore


@pytest.fixture
def store(tmp_path: Path) -> ShmStore:
    return ShmStore("x", bucket_bytes=400, root=tmp_path)


def weights(version: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((100,), float(10 * version + number)) for number in range(3)}


def files_of(store: ShmStore, version: int) -> set[int]:
    return {path.stat().st_ino for path in store.folder(version).glob("*.safetensors")}


def drop_before(store: ShmStore, version: int) -> None:
    asyncio.run(store.drop_before(version))


def test_the_files_of_a_dropped_version_are_used_again(store: ShmStore) -> None:
    store.push(1, weights(1))
    before = files_of(store, 1)
    drop_before(store, 2)
    manifest = store.push(2, weights(2))
    assert files_of(store, 2) == before
    assert torch.equal(store.fetch(manifest)["w2"], weights(2)["w2"])


def test_a_file_that_somebody_reads_is_not(store: ShmStore) -> None:
    held = store.fetch(store.push(1, weights(1)))["w1"]
    before = files_of(store, 1)
    drop_before(store, 2)
    store.push(2, weights(2))
    assert len(files_of(store, 2) & before) == 2
    assert torch.equal(held, weights(1)["w1"])
    del held
    drop_before(store, 3)
    last = files_of(store, 2) if store.folder(2).exists() else set()
    assert not last
    assert torch.equal(store.fetch(store.push(3, weights(3)))["w1"], weights(3)["w1"])


def test_a_file_that_another_process_reads_is_not_until_it_dies(store: ShmStore, tmp_path: Path) -> None:
    store.push(1, weights(1))
    code = (
        "import sys; from pathlib import Path; from rollart.store.shm import ShmStore;"
        "store = ShmStore('x', root=Path(sys.argv[1])); held = store.fetch(store.manifest(1));"
        "print('there', flush=True); sys.stdin.readline(); print(float(held['w1'][0]), flush=True); sys.stdin.read()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    with reader, reader.stdin, reader.stdout:
        assert reader.stdout.readline() == "there\n"
        before = files_of(store, 1)
        drop_before(store, 2)
        store.push(2, weights(2))
        assert not files_of(store, 2) & before
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert float(reader.stdout.readline()) == 11.0
        reader.kill()
        reader.wait()
    before = files_of(store, 2)
    drop_before(store, 3)
    store.push(3, weights(3))
    assert files_of(store, 3) == before


def test_one_version_of_spares_is_kept_and_no_more(store: ShmStore) -> None:
    for version in range(1, 5):
        store.push(version, weights(version))
    drop_before(store, 5)
    assert len(list((store.directory / "spare").iterdir())) == 3


def test_a_retired_file_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its opening and its lock it was retired: whoever uses it again need not ask any more."""
    memory, path = SharedMemory(tmp_path), tmp_path / "file"
    with memory.writing(path, 64):
        pass
    flock = "rollart.store.media.fcntl.flock"

    def late(handle: int, how: int) -> None:
        memory.retire([path])

    monkeypatch.setattr(flock, late)
    with pytest.raises(FileNotFoundError):
        memory.mapped(path)


def test_mappings_of_files_that_are_gone_are_let_go_of(store: ShmStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for version in range(1, 30):
        held = store.fetch(store.push(version, weights(version)))  # so that nothing can be used again
        drop_before(store, version)
        assert torch.equal(held["w0"], weights(version)["w0"])
    assert len(os.listdir("/proc/self/fd")) - before < 40

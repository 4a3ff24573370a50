"""Who pushes is killed in the middle of it, and so is what a store stands on: nothing half is ever taken for whole."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollart.errors import BoundaryError, WeightError
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.media import SharedMemory
from rollart.store.shm import ShmStore
from rollart.types import WeightManifest
from tests.contracts.store import eventually, is_version, tensors

PUSHER = """
import sys
from pathlib import Path
from tests.contracts.store import Gated
from tests.store.test_kills import made
made(sys.argv[1], Path(sys.argv[2])).push(int(sys.argv[3]), Gated(int(sys.argv[4])))
"""
"""Pushes a version of which the second half never comes."""


def made(kind: str, place: Path) -> BucketStore:
    if kind == "shm":
        return ShmStore("x", bucket_bytes=4096, root=place)
    return FileStore(place / "weights", bucket_bytes=4096, patience_s=0.0)


@pytest.mark.parametrize("kind", ["shm", "files"])
def test_a_trainer_that_is_killed_in_a_push(kind: str, tmp_path: Path) -> None:
    """The next one pushes the same version with other bytes; an engine has had a part of the first."""
    engine, trainer = made(kind, tmp_path), made(kind, tmp_path)
    before = trainer.push(1, tensors(1))
    held = engine.fetch(before)
    dying = subprocess.Popen([sys.executable, "-c", PUSHER, kind, str(tmp_path), "2", "9"])
    eventually(lambda: engine.appeared(2))
    early = engine.appeared(2)
    ahead = {early[0].name: engine.map_file(early[0].name)}
    assert ahead[early[0].name].digest(early[0]) == early[0].digest
    dying.send_signal(signal.SIGKILL)
    dying.wait()
    assert engine.manifest(2) is None
    assert is_version(engine.fetch(before), 1)
    again = trainer.push(2, tensors(2))
    assert is_version(engine.fetch(again, ahead), 2), "nothing of what the dead one wrote"
    assert is_version(held, 1)
    trainer.close()
    assert not list(tmp_path.iterdir())


def test_memory_that_a_killed_pusher_was_writing_is_used_again(tmp_path: Path) -> None:
    """Its locks went with it."""
    store = made("shm", tmp_path)
    dying = subprocess.Popen([sys.executable, "-c", PUSHER, "shm", str(tmp_path), "1", "9"])
    eventually(lambda: store.appeared(1))
    dying.kill()
    dying.wait()
    files = {path.stat().st_ino for path in store.folder(1).glob("*.safetensors")}
    assert is_version(store.fetch(store.push(1, tensors(1))), 1)
    assert files & {path.stat().st_ino for path in store.folder(1).glob("*.safetensors")}
    assert isinstance(store.medium, SharedMemory)
    store.close()


@pytest.mark.slow  # a store of three processes
@pytest.mark.skipif(find_spec("mooncake") is None, reason="needs the extra mooncake")
def test_the_master_of_mooncake_is_killed_and_comes_back(tmp_path: Path) -> None:
    """What it knew is gone. An engine goes on with its host's copy; a push fails with the reason until there is a
    master again, and then brings everything back."""
    from rollart.store.mooncake import MooncakeStore
    from rollart.store.mooncake_client import MooncakeSetup
    from tests.contracts.test_store import Mooncake

    mooncake = Mooncake(tmp_path, 64 << 20)
    setup = MooncakeSetup(master=mooncake.address, run_id="x")
    trainer, engine = (
        MooncakeStore(setup, bucket_bytes=4096, root=tmp_path, patience_s=20.0, linger_s=2.0) for _ in range(2)
    )
    try:
        first = trainer.push(1, tensors(1))
        assert is_version(engine.fetch(first), 1)
        mooncake.master.kill()
        mooncake.master.wait()
        assert is_version(engine.fetch(first), 1)
        with pytest.raises(WeightError, match=f"Mooncake.*{mooncake.address}|{mooncake.address}.*does not answer"):
            trainer.push(2, tensors(2))
        mooncake.start_master()
        second = _until_it_works(lambda: trainer.push(2, tensors(2)))
        assert is_version(engine.fetch(second), 2)
    finally:
        for store in (trainer, engine):
            store.close()
        mooncake.close()


def _until_it_works(work: Callable[[], WeightManifest]) -> WeightManifest:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return work()
        except BoundaryError:
            assert time.monotonic() < deadline_s
            time.sleep(1.0)

"""Whose a store is: nobody removes what a live run owns; what a dead one left is removed."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.config.load import build_job
from rollart.errors import WeightError
from rollart.store import buckets
from rollart.store.files import FileStore
from rollart.store.open import new_store
from rollart.store.owner import remove_left_behind
from rollart.store.shm import ShmStore

WEIGHTS = {"w": torch.arange(6.0)}


def test_two_runs_of_one_name_have_two_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in two containers that share a directory, where process ids come twice."""
    monkeypatch.setattr("os.getpid", lambda: 7)
    pools = [{"name": "p", "engines": {}}, {"name": "rooms", "slots": 1}]
    for kind in ("shm", "files"):
        weights = {"type": kind} | ({"path": str(tmp_path)} if kind == "files" else {})
        job = build_job({"name": "same", "tasks": [{"name": "a"}], "pools": pools, "weights": weights})
        names = {new_store(job, tmp_path).run_id for _ in range(2)}
        assert len(names) == 2
        assert all("same-" in name for name in names)


def test_nobody_removes_what_a_live_run_owns(tmp_path: Path) -> None:
    ours = ShmStore("x", root=tmp_path)
    assert ours.claim()
    manifest = ours.push(1, WEIGHTS)
    for other in (ShmStore("x", root=tmp_path), ShmStore("x", root=tmp_path)):
        assert not other.claim()
        other.close()
    remove_left_behind(tmp_path)
    assert torch.equal(ours.fetch(manifest)["w"], WEIGHTS["w"])
    ours.close()
    assert not list(tmp_path.iterdir()), "not even the lock is left"


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from rollart.store.shm import ShmStore; import torch;"
        "store = ShmStore('x', root=Path(sys.argv[1])); assert store.claim();"
        "store.push(1, {'w': torch.arange(6.0)}); print('there', flush=True); sys.stdin.read()"
    )
    live = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert live.stdout is not None
    assert live.stdin is not None
    assert live.stdout.readline() == "there\n"
    remove_left_behind(tmp_path)
    ShmStore("x", root=tmp_path).close()
    assert (tmp_path / "rollart-x" / "v00000001" / "manifest.json").exists()
    live.kill()
    live.wait()
    live.stdin.close()
    live.stdout.close()
    (tmp_path / "rollart-nobodys").mkdir()
    remove_left_behind(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rollart-nobodys"], "what was never owned is left alone"


def test_a_lock_that_is_removed_while_another_waits_for_it_is_no_lock(tmp_path: Path) -> None:
    first, second = ShmStore("x", root=tmp_path), ShmStore("x", root=tmp_path)
    assert first.claim()
    first.close()
    assert second.claim()
    assert not first.claim()
    second.close()


def test_a_place_that_cannot_be_locked_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert not FileStore(tmp_path / "file" / "weights" / "x").claim()

    def no_locks(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    before = os.listdir("/proc/self/fd")
    assert not FileStore(tmp_path / "x").claim()
    assert os.listdir("/proc/self/fd") == before, "the file was closed"


class LateFile:
    """A network file system that shows a bucket, or all of it, only at the n-th look."""

    def __init__(self, store: FileStore, looks: int, short: bool) -> None:
        self.seen = store.map_file
        self.looks = looks
        self.short = short

    def map_file(self, name: str) -> buckets.MappedFile:
        self.looks -= 1
        found = self.seen(name)
        if self.looks < 0:
            return found
        if self.short:
            return buckets.MappedFile(np.zeros(0, np.uint8))
        raise WeightError(f"weight bucket {name}: missing")


class Clock:
    """Stands for the module `time` in the store alone: threads that other tests left use the real one."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in = Clock()
    monkeypatch.setattr(buckets, "time", stand_in)
    return stand_in


@pytest.mark.parametrize("short", [False, True])
def test_a_bucket_that_is_not_seen_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, short: bool
) -> None:
    store = FileStore(tmp_path / "weights", patience_s=1000.0)
    manifest = store.push(1, WEIGHTS)
    monkeypatch.setattr(store, "map_file", LateFile(store, 3, short).map_file)
    assert torch.equal(store.fetch(manifest)["w"], WEIGHTS["w"])
    assert clock.slept == [0.01, 0.02, 0.04]


def test_a_bucket_that_stays_away_is_lost_when_patience_ends(tmp_path: Path, clock: Clock) -> None:
    store = FileStore(tmp_path / "weights", patience_s=5.0)
    manifest = store.push(1, WEIGHTS)
    (tmp_path / "weights" / manifest.buckets[0].name).unlink()
    with pytest.raises(WeightError, match="missing from"):
        store.fetch(manifest)
    assert 2.5 <= sum(clock.slept) <= 5.0


def test_damage_is_told_at_once(tmp_path: Path, clock: Clock) -> None:
    store = FileStore(tmp_path / "weights", patience_s=5.0)
    manifest = store.push(1, WEIGHTS)
    path = tmp_path / "weights" / manifest.buckets[0].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightError, match="damaged, digest"):
        store.fetch(manifest)
    assert clock.slept == []

"""A store has no room for the next version: a job waits, warns, and goes on or stops with the reason; nothing leaks.

`shm` and `tcp`: the host's shared memory is a small file system of the run's own. `mooncake`: most of the store's
memory is taken by somebody else. `copy`: that has room, and the engine's host has none for its copy.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollart.errors import StoreFull
from rollart.events import schema
from tests.contracts.test_store import Mooncake
from tests.real.harness import SOON_S, Run, job, running
from tests.small_disk import small_disk

STORES = ["shm", "tcp", "mooncake", "copy"]
SAYS = {
    "shm": "push of version",
    "tcp": "push of version",
    "mooncake": "push of version",
    "copy": "has no room for a copy of the weights",
}
"""In the event, and in what the job says when it stops."""
SMALL_MB, LEFT_KB = 64, 2400
"""Of shared memory: enough for the job to start; and what is left when it has: one version of the model (1.43 MB) has
room, two have not."""
CHUNK_BYTES, LEFT_CHUNKS = 1 << 19, 5
"""What somebody else has in Mooncake, and how much of that goes for one version to have room."""
OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"')


class SmallMemory:
    """The run's own /dev/shm."""

    settings: dict[str, Any]

    def __init__(self, folder: Path, store: str) -> None:
        self.folder = folder
        self.settings = {"type": store, "bucket_mb": 1}
        self.within = (*OWN_SHM, str(folder))

    def take_room(self) -> None:
        self._resize(f"{LEFT_KB}k")

    def make_room(self) -> None:
        self._resize(f"{SMALL_MB}m")

    def _resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)

    def left(self) -> list[str]:
        return [path.name for path in self.folder.glob("rollart-*")]


class SmallCopy(SmallMemory):
    """Of an engine's host; the store is elsewhere."""

    def __init__(self, folder: Path, service: Mooncake) -> None:
        super().__init__(folder, "mooncake")
        self.settings |= {"master": service.address}


class SmallMooncake:
    """A Mooncake store in which somebody else has filled most of the memory."""

    within = ()

    def __init__(self, service: Mooncake) -> None:
        from rollart.store.mooncake_client import MooncakeClient, MooncakeSetup

        self.settings = {"type": "mooncake", "bucket_mb": 1, "master": service.address}
        self._other = MooncakeClient(MooncakeSetup(master=service.address, run_id="other"))
        self._raw = np.zeros(CHUNK_BYTES, dtype=np.uint8)
        self._other.register(self._raw)
        self._chunks = 0
        with suppress(StoreFull):
            while True:
                self._other.put(f"chunk{self._chunks:03d}", self._raw)
                self._chunks += 1
        for number in range(LEFT_CHUNKS):
            self._other.remove(f"chunk{number:03d}")
        self._free = LEFT_CHUNKS

    def take_room(self) -> None:
        """It is taken already."""

    def make_room(self) -> None:
        self._other.remove("chunk.*")
        self._free = self._chunks

    def left(self) -> list[str]:
        """What of the run is in the store: its room can be filled again. But for one chunk, in which Mooncake keeps a
        small value for ten minutes after it was replaced by a larger one."""
        try:
            for number in range(self._free - 1):
                self._other.put(f"again{number:03d}", self._raw)
        except StoreFull as error:
            return [str(error)]
        self._other.remove("again.*")
        return []


@contextmanager
def small(store: str, folder: Path) -> Iterator[SmallMemory | SmallMooncake]:
    if store in ("shm", "tcp"):
        with small_disk(folder / "shm", f"{SMALL_MB}m"):
            yield SmallMemory(folder / "shm", store)
        return
    if find_spec("mooncake") is None:
        pytest.skip("needs the extra mooncake")
    service = Mooncake(folder, 64 << 20 if store == "copy" else 16 << 20)
    try:
        if store == "mooncake":
            yield SmallMooncake(service)
        else:
            with small_disk(folder / "shm", f"{SMALL_MB}m"):
                yield SmallCopy(folder / "shm", service)
    finally:
        service.close()


def started(run: Run) -> None:
    """Past the checks: the trainer's process is there, and has pushed nothing yet."""
    until_s = time.monotonic() + SOON_S
    while "trainer" not in run.members().values():
        assert run.process is not None
        assert run.process.poll() is None, run.said
        assert time.monotonic() < until_s
        time.sleep(0.05)


def full(run: Run) -> list[schema.StoreFull]:
    return [event for event in run.events() if isinstance(event, schema.StoreFull)]


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_a_full_store_costs_a_job_time_and_nothing_else(store: str, model: Path, tmp_path: Path) -> None:
    with small(store, tmp_path) as memory:
        with running(tmp_path, job(model, weights=memory.settings), within=memory.within) as run:
            started(run)
            memory.take_room()
            run.until(lambda events: any(isinstance(event, schema.StoreFull) for event in events), "full store")
            memory.make_room()
            assert run.wait() == 0, run.said
            run.ended_well(8)
            assert all(SAYS[store] in event.reason for event in full(run))
            room = [event for event in run.events() if isinstance(event, schema.StoreRoom)]
            assert len(room) == len(full(run))
            lost = schema.TrainerDown | schema.EngineDown | schema.Replay
            assert not [event for event in run.events() if isinstance(event, lost)]
            assert "no room to write" in run.said
        assert memory.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_a_store_that_stays_full_stops_the_job_which_can_be_resumed(store: str, model: Path, tmp_path: Path) -> None:
    with small(store, tmp_path) as memory:
        raw = job(
            model, weights=memory.settings, checkpoint={"every": 1}, limits={"backoff_s": 0.1, "store_full_s": 6.0}
        )
        with running(tmp_path, raw, within=memory.within) as run:
            started(run)
            memory.take_room()
            assert run.wait() == 1, run.said
            assert "no room to write for 6 s (limits.store_full_s)" in run.said
            assert SAYS[store] in run.said
            run.nothing_remains()
            assert memory.left() == []
            memory.make_room()
            run.start("--resume", str(run.out))
            assert run.wait() == 0, run.said
            run.ended_well(8)
        assert memory.left() == []

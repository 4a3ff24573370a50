"""kill -9 of the trainer in a push, of an engine in a pull, of the store; a flipped byte; all in one real job.

No engine ever serves a mix of versions: the hash of its live parameters is, after every swap and every swap that
failed, that of a version which the trainer pushed under that number. The job goes on, and nothing is left.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollart.events import schema
from tests.contracts.test_store import Mooncake
from tests.real.harness import SOON_S, Run, job, running
from tests.real.hashed import NOTES, Strike

STEPS = 12
POOLS = [
    {"name": "cpu", "engines": {"count": 2, "max_batch": 32, "kv_tokens": 8192}},
    {"name": "environments", "slots": 3, "isolation": "inline"},
]


class Notes:
    """What the workers wrote down."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self, **wanted: Any) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]

    @contextmanager
    def held(self, run: Run, event: str, first: int) -> Iterator[dict[str, Any]]:
        """A push or pull of this version or a newer one stands still meanwhile."""
        strike = Strike(self.path.parent, event)
        strike.ask(first)

        def stopped() -> list[dict[str, Any]]:
            return [row for row in self.all(event=f"held {event}") if row["version"] >= first]

        until(run, stopped, f"{event} of version {first} or newer")
        try:
            yield stopped()[-1]
        finally:
            strike.release()


def until(run: Run, true: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + SOON_S
    while not true():
        assert run.process is not None
        assert run.process.poll() is None, f"ended before {what}: {run.said}"
        assert time.monotonic() < until_s, f"no {what}: {run.said}"
        time.sleep(0.01)


def flip(run: Run, version: int, folder: Path) -> None:
    """A byte of the version's first file, where the engines will read it."""
    found: list[Path] = []

    def there() -> bool:
        for index in folder.glob(f"*{run.name}*/v{version:08d}/buckets.jsonl"):
            found[:] = sorted(index.parent.glob("model-*.safetensors"))
            return bool(found) and len(index.read_text().splitlines()) > 1
        return False

    until(run, there, f"a bucket of version {version}")
    with found[0].open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        byte = file.read(1)
        file.seek(-8, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def kill_the_store(run: Run, mooncake: Mooncake | None) -> None:
    """The processes that keep weights; Mooncake's master comes back, without anything that it knew."""
    hosts = [pid for pid in run.members() if b"rollart.store.host" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert hosts
    for pid in hosts:
        os.kill(pid, signal.SIGKILL)
    if mooncake is not None:
        mooncake.master.kill()
        mooncake.master.wait()
        mooncake.start_master()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("store", ["shm", "files", "tcp", "mooncake", "nccl"])
def test_no_engine_ever_serves_a_mix(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    if store == "mooncake" and find_spec("mooncake") is None:
        pytest.skip("needs the extra mooncake")
    notes = Notes(tmp_path / "notes.jsonl")
    monkeypatch.setenv(NOTES, str(notes.path))
    mooncake = Mooncake(tmp_path, 256 << 20) if store == "mooncake" else None
    weights = {"type": store, "bucket_mb": 1} | ({"master": mooncake.address} if mooncake else {})
    train = {"pool": "cpu", "steps": STEPS, "lr": 1e-3}
    raw = job(model, train=train, weights=weights, pools=POOLS, checkpoint={"every": 2})
    folder = tmp_path / "run" / "weights" if store == "files" else Path("/dev/shm")
    try:
        with running(tmp_path, raw, module="tests.real.hashed") as run:
            with notes.held(run, "push", 2) as row:
                os.kill(row["pid"], signal.SIGKILL)
            if store != "nccl":  # there each engine has it in memory of its own
                Strike(tmp_path, "pull").ask(5)  # before the push, or its first buckets are mapped by then
                with notes.held(run, "push", 5) as row, notes.held(run, "pull", row["version"]):
                    flip(run, row["version"], folder)
            with notes.held(run, "pull", 7) as row:
                os.kill(row["pid"], signal.SIGKILL)
            if store in ("tcp", "mooncake"):
                with notes.held(run, "push", 9):
                    kill_the_store(run, mooncake)
            assert run.wait() == 0, run.said
            run.ended_well(STEPS)
            events = run.events()
    finally:
        if mooncake is not None:
            mooncake.close()
    assert_no_mix(notes)
    damaged = [event for event in events if isinstance(event, schema.WeightsDamaged)]
    if store in ("shm", "files", "tcp"):  # a copy of Mooncake's is made again, and nobody needs to know
        assert notes.all(event="failed"), "the flipped byte was seen"
        assert damaged
    assert any(isinstance(event, schema.TrainerDown) for event in events)
    assert any(isinstance(event, schema.EngineDown) for event in events)


def assert_no_mix(notes: Notes) -> None:
    pushed: dict[int, set[str]] = {}
    for row in notes.all(event="push"):
        pushed.setdefault(row["version"], set()).add(row["hash"])
    held = [row for row in notes.all() if row["event"] in ("swapped", "failed")]
    assert {row["engine"] for row in held} == {"cpu-0", "cpu-1"}
    assert len([row for row in held if row["event"] == "swapped"]) >= STEPS
    (initial,) = {row["hash"] for row in notes.all(event="began")}
    for row in held:
        assert row["hash"] in pushed.get(row["version"], {initial}), f"a mix: {row}"
        assert (row["version"] == row["asked"]) == (row["event"] == "swapped")

"""kill -9 of the trainer in a push, of an engine in a pull, of the store; a flipped byte; all in one real job.

No engine ever serves a mix of versions: the hash of its live parameters is, after every swap and every swap that
failed, that of a version which the trainer pushed under that number. The job goes on, and nothing is left.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.events import schema
from tests.real import hashed
from tests.real.harness import SOON_S, Run, job, running

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

    def wait(self, run: Run, true: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + SOON_S
        while not true():
            assert run.process is not None
            assert run.process.poll() is None, f"ended before {what}: {run.said}"
            assert time.monotonic() < until_s, f"no {what}: {run.said}"
            time.sleep(0.01)

    def under_way(self, run: Run, event: str, over: str, first: int) -> dict[str, Any]:
        """The next of these, of at least this version, while it is not over."""
        found: list[dict[str, Any]] = []

        def now() -> bool:
            begun = [row for row in self.all(event=event) if row["version"] >= first]
            found[:] = [
                row
                for row in begun[-1:]
                if not [one for one in self.all(event=over, pid=row["pid"]) if one["version"] >= row["version"]]
            ]
            return bool(found)

        self.wait(run, now, f"{event} of version {first} or newer")
        return found[0]


def kill_in_push(run: Run, notes: Notes, first: int) -> None:
    row = notes.under_way(run, "push", "pushed", first)
    time.sleep(hashed.PUSH_S / 2)
    os.kill(row["pid"], signal.SIGKILL)
    assert not notes.all(event="pushed", pid=row["pid"], version=row["version"]), "it was in the middle of the push"


def kill_in_pull(run: Run, notes: Notes, first: int) -> None:
    row = notes.under_way(run, "pull", "swapped", first)
    time.sleep(hashed.PULL_S / 4)
    os.kill(row["pid"], signal.SIGKILL)


def flip_a_byte(run: Run, notes: Notes, first: int, folder: Path) -> None:
    """In the first file of a version, when its first bucket is there and no engine has looked."""

    def flipped() -> bool:
        for index in folder.glob(f"*{run.name}*/v*/buckets.jsonl"):
            version, files = int(index.parent.name[1:]), sorted(index.parent.glob("model-*.safetensors"))
            if version >= first and files and len(index.read_text().splitlines()) > 1:
                with files[0].open("r+b") as file:
                    file.seek(-8, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-8, os.SEEK_END)
                    file.write(bytes([byte[0] ^ 1]))
                return True
        return False

    notes.wait(run, flipped, f"a file of version {first} or newer")


def kill_the_store(run: Run, notes: Notes, first: int) -> None:
    """The process that serves weights, where there is one."""
    notes.under_way(run, "push", "pushed", first)
    hosts = [pid for pid in run.members() if b"rollart.store.host" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert hosts
    for pid in hosts:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("store", ["shm", "files", "tcp"])
def test_no_engine_ever_serves_a_mix(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    notes = Notes(tmp_path / "notes.jsonl")
    monkeypatch.setenv(hashed.NOTES, str(notes.path))
    train = {"pool": "cpu", "steps": STEPS, "lr": 1e-3}
    raw = job(model, train=train, weights={"type": store, "bucket_mb": 1}, pools=POOLS, checkpoint={"every": 2})
    folder = tmp_path / "run" / "weights" if store == "files" else Path("/dev/shm")
    with running(tmp_path, raw, module="tests.real.hashed") as run:
        kill_in_push(run, notes, 2)
        flip_a_byte(run, notes, 5, folder)
        kill_in_pull(run, notes, 7)
        if store == "tcp":
            kill_the_store(run, notes, 9)
        assert run.wait() == 0, run.said
        run.ended_well(STEPS)
        events = run.events()
    pushed: dict[int, set[str]] = {}
    for row in notes.all(event="push"):
        pushed.setdefault(row["version"], set()).add(row["hash"])
    assert set(pushed) >= set(range(1, STEPS))
    held = [row for row in notes.all() if row["event"] in ("swapped", "failed")]
    assert {row["engine"] for row in held} == {"cpu-0", "cpu-1"}
    assert len([row for row in held if row["event"] == "swapped"]) >= STEPS
    (initial,) = {row["hash"] for row in notes.all(event="began")}
    for row in held:
        assert row["hash"] in pushed.get(row["version"], {initial}), f"a mix: {row}"
        assert (row["version"] == row["asked"]) == (row["event"] == "swapped")
    assert [row for row in held if row["event"] == "failed"], "the flipped byte was seen"
    assert any(isinstance(event, schema.WeightsDamaged) for event in events)
    assert any(isinstance(event, schema.TrainerDown) for event in events)
    assert any(isinstance(event, schema.EngineDown) for event in events)

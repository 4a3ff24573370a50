"""Files of a job on a machine that does not have them: two directories stand for two machines."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.errors import ClusterError
from rollart.workers import carried as module
from rollart.workers.carried import Carried, Receiver, carried_by, chunks, described, here
from rollart.workers.setup import StoreSetup, WorkerSetup
from tests.cluster.small import small_job


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "WHOLE_BYTES", 100_000)
    monkeypatch.setattr(module, "CHUNK_BYTES", 60_000)
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "empty.txt").touch()
    (path / "weights.safetensors").write_bytes(os.urandom(5_000_000))
    return path


def send(carried: Carried) -> None:
    """From a machine that has it, to this one."""
    parts = list(chunks(carried))
    gone = Path(f"{carried.path}-elsewhere")
    os.rename(carried.path, gone)
    receiver = Receiver(carried)
    for name, data in parts:
        receiver.take(name, data)
    receiver.finish()


def test_a_machine_without_the_directory_gets_a_copy_that_is_kept_by_content(model: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    carried = described(model)
    assert here(carried) == model, "its own, where it has it"

    send(carried)

    found = here(carried)
    assert found == tmp_path / "cache" / "rollart" / "files" / carried.digest
    assert {file.name: file.read_bytes() for file in found.iterdir()} == before
    assert [path.name for path in found.parent.iterdir()] == [carried.digest], "nothing else stays"


def test_other_weights_of_the_same_shapes_under_the_same_path_are_not_taken(model: Path) -> None:
    carried = described(model)
    (model / "weights.safetensors").write_bytes(os.urandom(5_000_000))

    assert here(carried) is None


def test_what_changes_while_it_is_sent_is_refused_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    carried = described(model)
    parts = list(chunks(carried))
    os.rename(model, tmp_path / "elsewhere")
    receiver = Receiver(carried)
    for name, data in parts[:-1]:
        receiver.take(name, data)

    with pytest.raises(ClusterError, match="changed while it was sent"):
        receiver.finish()
    assert list((tmp_path / "cache" / "rollart" / "files").iterdir()) == []
    assert here(carried) is None


def test_a_process_killed_while_it_received_leaves_nothing_for_long(model: Path, tmp_path: Path) -> None:
    carried = described(model)
    code = (
        "import os, signal, sys; from rollart.workers.carried import Carried, Receiver;"
        "r = Receiver(Carried.model_validate_json(sys.argv[1])); r.take('config.json', b'{');"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, carried.model_dump_json()], check=False)
    cache = tmp_path / "cache" / "rollart" / "files"
    assert killed.returncode == -signal.SIGKILL
    assert len(list(cache.iterdir())) == 1

    living = Receiver(carried)
    assert len(list(cache.iterdir())) == 1, "the dead one's is gone, the living one's is there"
    Receiver(carried)
    assert len(list(cache.iterdir())) == 2, "a living one's stays"
    living.take("config.json", b"{}")


def test_a_worker_reads_its_files_where_its_machine_has_them(model: Path, tmp_path: Path) -> None:
    task = tmp_path / "mine.py"
    task.write_text("# a task set\n")
    agent = tmp_path / "agent.py"
    agent.write_text("# an agent\n")
    played = {"agent": {"function": f"{agent}:solve"}, "isolation": "process"}
    raw_task = {"name": "mine", "use": f"{task}:Mine", "group_size": 2, "max_tokens": 8, **played}
    job = small_job(model, tasks=[raw_task], sim={"model": "qwen3-0.6b"})
    setup = WorkerSetup(
        job=job,
        out=tmp_path,
        store=StoreSetup(weights=job.weights, run_id="x", model=str(model)),
        carried=tuple(carried_by(job)),
    )
    assert setup.on_this_machine().job == job
    rooms = setup.environments("environments-0", "environments")
    assert [Path(one.path).name for one in rooms.needed] == ["mine.py", "agent.py"]
    assert [Path(one.path).name for one in setup.needed] == ["model"]
    for one in setup.carried:
        send(one)

    moved = setup.on_this_machine()

    cache = str(tmp_path / "cache")
    assert moved.job.model.path == moved.store.model
    assert moved.job.model.path.startswith(cache)
    assert json.loads((Path(moved.job.model.path) / "config.json").read_text()) == {}
    assert moved.out == setup.out
    there = rooms.on_this_machine().job.tasks[0]
    assert there.agent is not None
    assert there.agent.function.startswith(cache)
    use = there.use
    assert use.startswith(cache)
    assert use.endswith("/mine.py:Mine")
    shutil.rmtree(cache)
    with pytest.raises(ClusterError, match="is not on this machine"):
        setup.on_this_machine()

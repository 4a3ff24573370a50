"""What a run keeps in a Mooncake store: nothing piles up there, also where a drop and a push cross."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollart.config.settings import WeightSettings
from rollart.errors import StoreFull
from rollart.store.open import open_store
from rollart.types import WeightManifest
from rollart.workers.setup import StoreSetup
from tests.contracts.store import eventually, is_version, tensors
from tests.contracts.test_store import Mooncake

pytestmark = [
    pytest.mark.slow,  # a store of two processes
    pytest.mark.skipif(find_spec("mooncake") is None, reason="needs the extra mooncake"),
]


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[Mooncake]:
    mooncake = Mooncake(tmp_path, 16 << 20)
    yield mooncake
    mooncake.close()


@pytest.fixture
def setup(mooncake: Mooncake) -> Any:
    from rollart.store.mooncake_client import MooncakeSetup

    return MooncakeSetup(master=mooncake.address, run_id="x")


def test_a_small_value_that_is_replaced_takes_no_more_room(setup: Any) -> None:
    from rollart.store.mooncake_client import MooncakeClient

    writer, reader = MooncakeClient(setup), MooncakeClient(setup)
    for number in range(1500):
        wanted = {"number": number, "text": "x" * (10_000 + 97 * (number % 101))}
        writer.note("head", wanted)
        if number % 50 == 0:
            assert reader.noted("head") == wanted
    assert reader.noted("nothing") is None
    for client in (writer, reader):
        client.close()


def test_a_drop_that_crosses_a_push_leaves_nothing_of_the_old(
    setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollart.store.mooncake import MooncakeStore
    from rollart.store.mooncake_client import MooncakeClient, bucket_key

    root = tmp_path / "root"
    root.mkdir()
    trainer, coordinator = (MooncakeStore(setup, bucket_bytes=4096, root=root, linger_s=2.0) for _ in range(2))
    first = trainer.push(1, tensors(1))
    key = bucket_key(trainer.connect().noted("head")["1"]["push"], first.buckets[0])
    trainer.push(2, tensors(2))
    client = coordinator.connect()
    assert vars(client)["_store"].is_exist(f"x/{key}") == 1
    note = client.note

    def crossed(name: str, value: Any) -> None:
        note(name, value)
        if name == "dropped":
            trainer.push(3, tensors(3))  # what is dropped is not in its `head` any more

    monkeypatch.setattr(client, "note", crossed)
    asyncio.run(coordinator.drop_before(2))
    assert isinstance(client, MooncakeClient)
    eventually(lambda: vars(client)["_store"].is_exist(f"x/{key}") == 0)
    assert is_version(trainer.fetch(trainer.push(4, tensors(4))), 4)
    monkeypatch.undo()
    for store in (coordinator, trainer):
        store.close()


@pytest.mark.timeout(180)
def test_the_memory_of_the_store_is_killed_and_another_comes(mooncake: Mooncake, setup: Any, tmp_path: Path) -> None:
    """Its bytes are gone; the master finds out after a while. The engine goes on with its host's copy, and the next
    push is whole."""
    from rollart.store.mooncake import MooncakeStore

    root = tmp_path / "root"
    root.mkdir()
    trainer, engine = (MooncakeStore(setup, bucket_bytes=4096, root=root, linger_s=2.0) for _ in range(2))
    first = trainer.push(1, tensors(1))
    assert is_version(engine.fetch(first), 1)
    mooncake.kill_memory()
    assert is_version(engine.fetch(first), 1)
    mooncake.start_memory(16 << 20)
    second = trainer.push(2, tensors(2))
    assert is_version(engine.fetch(second), 2)
    for store in (engine, trainer):
        store.close()


def test_an_engines_host_gives_its_memory_before_the_first_push(mooncake: Mooncake, tmp_path: Path) -> None:
    """Or that push finds no room, and is tried again later."""
    mooncake.kill_memory()
    weights = WeightSettings(type="mooncake", master=mooncake.address, segment_mb=64, bucket_mb=1)
    where = StoreSetup(weights=weights, run_id=f"test-{uuid.uuid4().hex}", model=str(tmp_path))
    trainer, engine = open_store(where, "trainer"), open_store(where, "engine")
    made: list[WeightManifest] = []

    def pushed() -> bool:
        with suppress(StoreFull):
            made.append(trainer.push(1, tensors(1)))
        return bool(made)

    try:
        eventually(pushed)
        assert is_version(engine.fetch(made[0]), 1)
    finally:
        for store in (trainer, engine):
            store.close()
        mooncake.start_memory(16 << 20)


PLAYER = """
import sys, time
from pathlib import Path
from rollart.store.mooncake import MooncakeStore
from rollart.store.mooncake_client import MooncakeSetup
from tests.contracts.store import tensors

store = MooncakeStore(MooncakeSetup(master=sys.argv[2], run_id="x"), root=Path(sys.argv[3]), linger_s=2.0)
if sys.argv[1] == "trainer":
    store.serve()
    print(store.push(1, tensors(1)), flush=True)
else:
    while store.manifest(1) is None:
        time.sleep(0.05)
    print("there", flush=True)
time.sleep(600)
"""


@contextmanager
def player(part: str, mooncake: Mooncake, root: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", PLAYER, part, mooncake.address, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.timeout(180)
def test_what_a_run_that_was_killed_as_a_whole_had_there_goes(mooncake: Mooncake, setup: Any, tmp_path: Path) -> None:
    """It is pinned, and nobody will ever end that run. While its trainer lives it stays, whoever else is dead."""
    from rollart.store.mooncake_client import MooncakeClient

    client, root = MooncakeClient(setup), tmp_path / "root"
    root.mkdir()
    with player("trainer", mooncake, root), player("engine", mooncake, root):
        with player("engine", mooncake, tmp_path):  # on another host, which is of no use any more
            pass
        eventually(lambda: not (tmp_path / "rollart-x-copy").exists(), 60.0)
        assert client.noted("head"), "the trainer lives"
    eventually(lambda: client.noted("head") is None, 60.0)
    assert client.noted("alive") is None
    eventually(lambda: not list(root.iterdir()))
    client.close()

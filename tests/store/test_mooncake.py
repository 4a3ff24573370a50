"""What a run keeps in a Mooncake store: nothing piles up there, also where a drop and a push cross."""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

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

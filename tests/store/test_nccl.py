"""Versions that are broadcast: engines come, go, hang and are killed; so is the trainer. Between CPUs, by gloo."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from rollart.errors import WeightError
from rollart.store import nccl, nccl_group, prefetch
from rollart.store.device import CHUNK_BYTES, ROW_BYTES, digest_on_device
from rollart.store.nccl import NcclStore
from rollart.store.prefetch import FetchAhead
from rollart.types import WeightManifest
from tests.contracts.store import Gated, eventually, is_version, tensors
from tests.contracts.test_store import free_port

CPU = torch.device("cpu")
ENGINE = """
import sys, time, torch
from rollart.store.nccl import NcclStore
store = NcclStore(sys.argv[1], torch.device("cpu"), 4096)
store.receive()
assert store.joined(20)
print("joined", flush=True)
while not store.appeared(int(sys.argv[2])): time.sleep(0.001)
print("a part is here", flush=True)
time.sleep(600)
"""
TRAINER = """
import sys, torch
from rollart.store.nccl import NcclStore
from tests.contracts.store import Gated, tensors
store = NcclStore(sys.argv[1], torch.device("cpu"), 4096)
store.serve()
sys.stdin.readline()
store.push(1, tensors(1))
print("pushed", flush=True)
store.push(2, Gated(9))
"""
"""The second push never ends."""


@contextmanager
def stores(address: str, engines: int) -> Iterator[list[NcclStore]]:
    """That many engines' stores; they join whoever serves at the address."""
    with ExitStack() as stack:
        made = [NcclStore(address, CPU, 4096, patience_s=20.0) for _ in range(engines)]
        for store in made:
            store.receive()
            stack.callback(store.close)
        yield made


@contextmanager
def process(code: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def said(started: "subprocess.Popen[str]") -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def trainer(address: str) -> Iterator[NcclStore]:
    store = NcclStore(address, CPU, 4096)
    store.serve()
    yield store
    store.close()


def test_one_push_reaches_every_engine(address: str, trainer: NcclStore) -> None:
    with stores(address, 3) as engines:
        assert all(engine.joined(10) for engine in engines)
        for version in (1, 2):
            manifest = trainer.push(version, tensors(version))
            assert all(is_version(engine.fetch(manifest), version) for engine in engines)
            assert all(engine.pulled(version).seconds > 0 for engine in engines)


def test_a_trainer_that_is_killed_in_a_push(address: str) -> None:
    """The next one pushes the same version with other bytes; an engine has had a part of the first."""
    with process(TRAINER, address) as dying, stores(address, 2) as engines:
        assert all(engine.joined(20) for engine in engines)
        assert dying.stdin is not None
        print(file=dying.stdin, flush=True)
        assert said(dying) == "pushed"
        first = engines[0].manifest(1)
        assert first is not None
        eventually(lambda: all(engine.appeared(2) for engine in engines))
        ahead = FetchAhead(engines[0])
        ahead.stage(2)
        eventually(lambda: ahead.pulled(2).seconds > 0)
        dying.kill()
        dying.wait()
        eventually(lambda: not any(engine.appeared(2) for engine in engines))
        assert all(engine.manifest(2) is None for engine in engines)
        assert is_version(engines[0].fetch(first), 1)
        trainer = NcclStore(address, CPU, 4096)
        trainer.serve()
        eventually(lambda: all(engine.joined(0) for engine in engines))
        again = trainer.push(2, tensors(2))
        assert is_version(ahead.fetch(again), 2), "nothing of what the dead one sent"
        assert is_version(engines[1].fetch(again), 2)
        trainer.close()


def test_an_engine_that_is_killed_in_a_push_costs_the_others_nothing(
    address: str, trainer: NcclStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "ANSWER_S", 0.5)
    slow, pushed = Gated(1), list[WeightManifest]()
    with stores(address, 1) as (engine,), process(ENGINE, address, "1") as dying:
        assert said(dying) == "joined"
        assert engine.joined(10)
        push = threading.Thread(target=lambda: pushed.append(trainer.push(1, slow)))
        push.start()
        try:
            assert said(dying) == "a part is here"
            dying.kill()
            dying.wait()
        finally:
            slow.gate.set()
            push.join()
        assert is_version(engine.fetch(pushed[0]), 1)
        assert is_version(engine.fetch(trainer.push(2, tensors(2))), 2)


def test_an_engine_that_comes_later_is_told_and_has_it_when_it_is_pushed_again(
    address: str, trainer: NcclStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for it: nobody would send it."""
    monkeypatch.setattr(prefetch, "LATE_S", 0.2)
    manifest = trainer.push(1, tensors(1))
    with stores(address, 1) as (engine,):
        assert engine.joined(10)
        ahead = FetchAhead(engine)
        ahead.stage(1).result(10)
        with pytest.raises(WeightError, match="not sent to this engine"):
            ahead.fetch(manifest)
        assert is_version(engine.fetch(trainer.push(1, tensors(1))), 1)


def test_an_engine_that_hangs_is_left_out_and_joins_again(
    address: str, trainer: NcclStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "ANSWER_S", 0.5)
    monkeypatch.setattr(nccl, "STALL_S", 0.5)
    monkeypatch.setattr(nccl_group, "STALL_S", 1.0)
    with process(ENGINE, address, "2") as hung, stores(address, 1) as (engine,):
        assert said(hung) == "joined"
        assert engine.joined(10)
        os.kill(hung.pid, signal.SIGSTOP)
        assert is_version(engine.fetch(trainer.push(1, tensors(1))), 1)
        os.kill(hung.pid, signal.SIGCONT)
        eventually(lambda: trainer.push(2, tensors(2)) and len(trainer.members) == 2)
        assert said(hung) == "a part is here"


def test_a_part_that_was_received_is_checked_by_the_swap(address: str, trainer: NcclStore) -> None:
    with stores(address, 1) as (engine,):
        assert engine.joined(10)
        manifest = trainer.push(1, tensors(1))
        ahead = FetchAhead(engine)
        held = vars(engine)["_versions"][1].files
        held[manifest.buckets[0].name][100] ^= 1
        ahead.stage(1).result(10)
        with pytest.raises(WeightError, match="damaged, digest"):
            ahead.fetch(manifest)


def test_messages_and_versions_do_not_pile_up(address: str, trainer: NcclStore) -> None:
    coordinator = NcclStore(address, CPU)
    counts = []
    with stores(address, 1) as (engine,):
        assert engine.joined(10)
        for version in range(1, 31):
            engine.fetch(trainer.push(version, tensors(version)))
            asyncio.run(coordinator.drop_before(version))
            counts.append(trainer.connected().num_keys())
        assert max(counts[20:]) <= max(counts[:10])
        assert len(vars(engine)["_versions"]) <= 1
    coordinator.close()


def test_a_port_that_is_taken_is_named(address: str, trainer: NcclStore) -> None:
    with pytest.raises(WeightError, match=f"weights.address: {address}"):
        NcclStore(address, CPU).serve()


def test_nobody_answers(address: str) -> None:
    engine = NcclStore(address, CPU, patience_s=0.1)
    engine.receive()
    with pytest.raises(WeightError, match=f"no trainer answers at {address}"):
        engine.fetch(WeightManifest(version=1, buckets=()))
    engine.close()


@pytest.mark.parametrize("size", [0, 1, 3, 100, ROW_BYTES, ROW_BYTES + 2, CHUNK_BYTES + 4 * ROW_BYTES + 7])
def test_a_digest_sees_each_bit_the_length_and_the_order(size: int) -> None:
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    digest = digest_on_device(raw)
    assert digest == digest_on_device(raw.clone())
    assert digest != digest_on_device(torch.cat([raw, raw.new_zeros(1)]))
    apart = torch.cat([raw.new_zeros(1), raw])[1:]
    assert digest == digest_on_device(apart), "wherever it lies"
    for at in {0, size // 2, size - 1} if size else set():
        flipped = raw.clone()
        flipped[at] ^= 1 << (at % 8)
        assert digest_on_device(flipped) != digest
    if size >= 8:
        assert digest_on_device(torch.cat([raw[4:8], raw[:4], raw[8:]])) != digest

"""Deltas are bit-exact whatever changed, small where little did, and not made where they would not pay."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.store import delta
from rollart.store.delta import apply, encode
from rollart.store.mirror import Mirror
from rollart.store.prefetch import FetchAhead
from rollart.store.shm import ShmStore
from rollart.store.tcp_source import TcpSource
from rollart.types import WeightManifest
from tests.store.test_tcp import TOKEN, Served, eventually

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def pair(num_bytes: int, density: float, seed: int = 0) -> tuple[Bytes, Bytes]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, num_bytes, dtype=np.uint8)
    new = old.copy()
    words = new[: num_bytes // 2 * 2].view(np.uint16)
    chosen = rng.random(len(words)) < density
    words[chosen] ^= rng.integers(1, 2**16, int(chosen.sum()), dtype=np.uint16)
    return old, new


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 7, 1000, 40_001])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.1, 0.4])
def test_what_is_applied_is_the_new_one_bit_by_bit(
    num_bytes: int, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "BLOCK_WORDS", 1000)
    monkeypatch.setattr(delta, "PAYS", 10.0)
    old, new = pair(num_bytes, density)
    made = encode(old, new)
    assert made.data is not None
    into = np.full(num_bytes, 3, dtype=np.uint8)
    apply(old, made.data, into)
    assert np.array_equal(into, new)
    if num_bytes > 1000:
        assert made.density == pytest.approx(density, abs=0.02)


def test_all_four_ways_are_used_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK_WORDS", 1000)
    monkeypatch.setattr(delta, "PAYS", 10.0)
    old = np.zeros(8000, dtype=np.uint8)
    new = old.copy()
    words = new.view(np.uint16)
    words[1003] = 7  # a list
    words[2000:2400] = 7  # a map
    words[3000:4000] = 7  # whole
    made = encode(old, new)
    assert made.data is not None
    ways, place = [], 0
    for _ in range(4):
        how, count = delta.HEAD.unpack_from(made.data, place)
        ways.append(how)
        place += delta.HEAD.size + {0: 0, 1: 6 * count, 2: 125 + 2 * count, 3: 2000}[how]
    assert ways == [delta.SAME, delta.LIST, delta.MAP, delta.WHOLE]
    into = np.ones_like(old)
    apply(old, made.data, into)
    assert np.array_equal(into, new)


def test_it_is_small_where_little_changed_and_not_made_where_much_did() -> None:
    old, new = pair(1_000_000, 0.01)
    made = encode(old, new)
    assert made.data is not None
    assert len(made.data) < 0.04 * len(new)
    old, new = pair(1_000_000, 0.6)
    assert encode(old, new).data is None
    assert encode(old, new).density == pytest.approx(0.6, abs=0.02)


def test_a_change_that_the_sample_does_not_see_is_encoded_all_the_same() -> None:
    old = np.zeros(4_000_000, dtype=np.uint8)
    new = old.copy()
    new[-3] = 1
    made = encode(old, new)
    assert made.data is not None
    into = np.ones_like(old)
    apply(old, made.data, into)
    assert np.array_equal(into, new)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x09\x00\x00\x00\x00", b"\x01\xff\x00\x00\x00"])
def test_what_is_no_delta_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"delta|buffer"):
        apply(np.zeros(100, np.uint8), data, np.zeros(100, np.uint8))


def test_small_steps_change_few_bfloat16_weights_and_only_those_cross(tmp_path: Path) -> None:
    """AdamW at 1e-6 on float32 masters, as the trainer has them; five versions, one of them pushed with all changed."""
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(0.02 * torch.randn(200_000, generator=generator))
    optimizer = torch.optim.AdamW([master], lr=1e-6)
    trainer = ShmStore("x", bucket_bytes=100_000, root=tmp_path / "a")
    trainer.directory.mkdir(parents=True)
    copy = ShmStore("x", root=tmp_path / "b")
    served = Served(trainer.directory)
    link = TcpSource(served.address, TOKEN, deltas=True)
    mirror = Mirror(copy.directory, link)
    thread = threading.Thread(target=mirror.run, daemon=True)
    thread.start()
    weights: dict[str, torch.Tensor] | None = None
    try:
        crossed: list[float] = []
        engine = FetchAhead(copy)
        for version in range(1, 6):
            if version == 4:
                with torch.no_grad():
                    master.neg_()
            else:
                master.grad = torch.randn(master.shape, generator=generator)
                optimizer.step()
            before, sent = weights, served.server.sent_bytes
            weights = {"w": master.detach().bfloat16(), "flags": torch.tensor([True, False, version % 2 == 0])}
            manifest: WeightManifest = trainer.push(version, weights)
            eventually(lambda at=version, found=manifest: copy.manifest(at) == found)  # type: ignore[misc]
            assert torch.equal(copy.fetch(manifest)["w"], weights["w"])
            came = engine.pulled(version)
            assert came.bytes == served.server.sent_bytes - sent
            assert came.seconds > 0
            crossed.append(came.bytes / manifest.num_bytes)
            if before is None:
                assert came.density is None, "there is nothing to compare it with"
            else:
                differs = weights["w"].view(torch.int16) != before["w"].view(torch.int16)
                assert came.density == pytest.approx(float(differs.float().mean()), abs=0.01)
        assert crossed[0] == 1.0, "the first has nothing to be made from"
        assert crossed[3] > 0.99, "all of it changed"
        assert all(part < 0.2 for part in (crossed[1], crossed[2], crossed[4]))
    finally:
        served.server.closed = True
        mirror.stopped.set()
        thread.join(10)
        served.close()


def test_a_copy_that_is_not_what_it_should_be_gives_no_wrong_result(tmp_path: Path) -> None:
    """The base is damaged on this host after it was checked: the digest of what is made from it says so."""
    trainer = ShmStore("x", bucket_bytes=100_000, root=tmp_path / "a")
    trainer.directory.mkdir(parents=True)
    copy = ShmStore("x", root=tmp_path / "b")
    served = Served(trainer.directory)
    mirror = Mirror(copy.directory, TcpSource(served.address, TOKEN, deltas=True))
    thread = threading.Thread(target=mirror.run, daemon=True)
    thread.start()
    try:
        first = trainer.push(1, {"w": torch.arange(2000.0)})
        eventually(lambda: copy.manifest(1) == first)
        path = copy.directory / first.buckets[0].name
        with path.open("r+b") as file:
            file.seek(4000)
            file.write(b"\xff")
        changed = torch.arange(2000.0)
        changed[3] = 9.0
        second = trainer.push(2, {"w": changed})
        eventually(lambda: copy.manifest(2) == second)
        assert torch.equal(copy.fetch(second)["w"], changed)
    finally:
        served.server.closed = True
        mirror.stopped.set()
        thread.join(10)
        served.close()

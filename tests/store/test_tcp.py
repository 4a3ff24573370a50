"""Weights over TCP: a host's copy is fed bucket by bucket, survives cut links and deaths, and is nobody's without the
token. Two hosts are two directories: neither is seen by the other's processes."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from rollart.errors import StoreFull, WeightError
from rollart.store import tcp_source
from rollart.store.host import read_ready
from rollart.store.index import Writer, drop_before, read_index, read_manifest
from rollart.store.media import SharedMemory
from rollart.store.mirror import Mirror, read_state
from rollart.store.owner import is_owned, is_used, users_file
from rollart.store.prefetch import FetchAhead
from rollart.store.serve import StoreServer
from rollart.store.shm import ShmStore
from rollart.store.tcp import TcpStore
from rollart.store.tcp_source import TcpSource
from rollart.types import Bucket, WeightManifest
from tests.small_disk import small_disk

TOKEN = "the token of this run"


def weights(version: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((100,), float(10 * version + number)) for number in range(6)} | {
        "big": torch.arange(700.0) + version
    }


def is_version(tensors: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(tensors[name], wanted) for name, wanted in weights(version).items())


def eventually(true: Callable[[], object], within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def all_have(copies: list[ShmStore], manifest: WeightManifest) -> bool:
    return all(copy.manifest(manifest.version) == manifest for copy in copies)


class Served:
    """A server in a thread of this process."""

    def __init__(self, directory: Path, coming: Callable[[str], bool] = lambda push: False) -> None:
        self.loop = asyncio.new_event_loop()
        memory = SharedMemory(directory)
        self.server = StoreServer(
            directory,
            TOKEN,
            drop=lambda before: drop_before(directory, memory, before),
            closing=lambda: None,
            coming=coming,
        )
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = self.start(0)

    def start(self, port: int) -> int:
        return asyncio.run_coroutine_threadsafe(self.server.start("127.0.0.1", port), self.loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop).result(10)

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class TwoHosts:
    """The trainer's host and another; `copy` is what engines of the other would map."""

    def __init__(self, root: Path) -> None:
        self.trainer = ShmStore("x", bucket_bytes=1024, root=root / "a")
        self.trainer.directory.mkdir(parents=True)
        self.copy = ShmStore("x", bucket_bytes=1024, root=root / "b")
        self.served = Served(self.trainer.directory)
        self.mirrors: list[Mirror] = []
        self.threads: list[threading.Thread] = []
        self.follow()

    def follow(self) -> Mirror:
        mirror = Mirror(self.copy.directory, TcpSource(self.served.address, TOKEN))
        self.mirrors.append(mirror)
        self.threads.append(threading.Thread(target=mirror.run, daemon=True))
        self.threads[-1].start()
        return mirror

    def came(self, manifest: WeightManifest) -> bool:
        return self.copy.manifest(manifest.version) == manifest

    def close(self) -> None:
        for mirror in self.mirrors:
            mirror.stopped.set()
        self.served.server.closed = True
        for thread in self.threads:
            thread.join(10)
        self.served.close()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setattr(tcp_source, "STALL_S", 1.0)
    hosts = TwoHosts(tmp_path)
    yield hosts
    hosts.close()


def test_what_is_pushed_comes_and_what_is_dropped_goes(hosts: TwoHosts) -> None:
    for version in (1, 2, 3):
        manifest = hosts.trainer.push(version, weights(version))
        eventually(partial(hosts.came, manifest))
        assert is_version(hosts.copy.fetch(manifest), version)
    asyncio.run(hosts.trainer.drop_before(3))
    eventually(lambda: not hosts.copy.folder(2).exists())
    assert is_version(hosts.copy.fetch(manifest), 3)


def test_buckets_come_while_the_push_goes_on(hosts: TwoHosts) -> None:
    gate = threading.Event()

    class Slow(dict[str, torch.Tensor]):
        def items(self):  # type: ignore[no-untyped-def,override]
            for number, item in enumerate(weights(1).items()):
                if number == 4:
                    gate.wait(20)
                yield item

    pushed: list[WeightManifest] = []
    push = threading.Thread(target=lambda: pushed.append(hosts.trainer.push(1, Slow(weights(1)))))
    push.start()
    eventually(lambda: len(hosts.copy.appeared(1)) >= 1)
    assert hosts.copy.manifest(1) is None
    gate.set()
    push.join()
    eventually(lambda: hosts.came(pushed[0]))


def test_a_version_pushed_again_replaces_what_came(hosts: TwoHosts) -> None:
    first = hosts.trainer.push(1, weights(7))
    eventually(lambda: hosts.came(first))
    held = hosts.copy.fetch(first)
    second = hosts.trainer.push(1, weights(1))
    eventually(lambda: hosts.came(second))
    assert is_version(hosts.copy.fetch(second), 1)
    assert is_version(held, 7), "whoever still reads the first has it as it was"


def test_a_line_of_the_index_that_finds_no_room_spoils_nothing(tmp_path: Path) -> None:
    first, second = Bucket("v1/a", 7, "x"), Bucket("v1/b", 8, "y")
    with small_disk(tmp_path / "small", "64k"):
        folder = tmp_path / "small" / "v1"
        folder.mkdir()
        writer = Writer(folder)
        filler, large = folder / "filler", Bucket("v1/" + "z" * 5000, 9, "z")
        writer.add(first)
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with pytest.raises(OSError, match="No space left"):
            writer.add(large)  # its beginning has room in the last page
        filler.unlink()
        writer.add(second)
        assert read_index(folder) == (writer.push, (first, second))
        assert writer.buckets == [first, second]


def test_the_link_is_cut_and_comes_back(hosts: TwoHosts) -> None:
    first = hosts.trainer.push(1, weights(1))
    eventually(lambda: hosts.came(first))
    port = hosts.served.port
    hosts.served.stop()
    second = hosts.trainer.push(2, weights(2))
    time.sleep(0.5)
    assert hosts.copy.manifest(2) is None
    hosts.served.start(port)
    eventually(lambda: hosts.came(second))
    assert is_version(hosts.copy.fetch(second), 2)


def test_a_part_goes_on_where_the_link_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer ends after two pieces: what came counts, and only the rest is asked for again."""
    monkeypatch.setattr(tcp_source, "PIECE_BYTES", 1000)
    trainer = ShmStore("x", bucket_bytes=1_000_000, root=tmp_path)
    manifest = trainer.push(1, {"w": torch.arange(2000.0)})
    [bucket] = manifest.buckets
    data = (trainer.directory / bucket.name).read_bytes()
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[tuple[int, int]] = []

    def serve() -> None:
        for cut in (True, False):
            connection, _ = listener.accept()
            with connection:
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(4096)
                line = next(line for line in request.decode().splitlines() if line.startswith("Range"))
                start, end = (int(part) for part in line.rpartition("=")[2].split("-"))
                asked.append((start, end))
                head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {end - start + 1}\r\n\r\n".encode()
                connection.sendall(head + (data[start : start + 2000] if cut else data[start : end + 1]))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    into = torch.zeros(bucket.num_bytes, dtype=torch.uint8).numpy()
    came: list[int] = []
    link = TcpSource(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN)
    link.read("p", bucket, into, came.append)
    link.close()
    listener.close()
    thread.join()
    assert into.tobytes() == data
    assert asked[0] == (0, len(data) - 1)
    assert asked[1] == (2000, len(data) - 1)
    assert sum(came) == len(data)


def test_a_bucket_that_came_damaged_is_fetched_again(hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    read = TcpSource.read
    damaged: list[object] = []

    def flips(self: TcpSource, push: str, bucket: object, into: object, came: object, base: object = None) -> None:
        read(self, push, bucket, into, came)  # type: ignore[arg-type]
        if not damaged:
            damaged.append(bucket)
            into[5] ^= 1  # type: ignore[index]

    monkeypatch.setattr(TcpSource, "read", flips)
    manifest = hosts.trainer.push(1, weights(1))
    eventually(lambda: hosts.came(manifest))
    assert damaged
    assert is_version(hosts.copy.fetch(manifest), 1)


def test_the_next_mirror_goes_on_with_what_a_dead_one_brought(hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.mirrors[0].stopped.set()
    manifest = hosts.trainer.push(1, weights(1))
    asked: list[tuple[str, int]] = []
    read = TcpSource.read

    def three(self: TcpSource, push: str, bucket, into, came, base=None) -> None:  # type: ignore[no-untyped-def]
        if len(asked) == 3:
            raise OSError("the link is cut")
        asked.append((bucket.name, bucket.start))
        read(self, push, bucket, into, came)

    monkeypatch.setattr(TcpSource, "read", three)
    hosts.threads[0].join(15)
    dying = hosts.follow()
    eventually(lambda: len(asked) == 3)
    dying.stopped.set()
    hosts.threads[-1].join(15)
    (hosts.copy.directory / manifest.buckets[3].name).touch()
    asked.clear()

    def all_of_it(self: TcpSource, push: str, bucket, into, came, base=None) -> None:  # type: ignore[no-untyped-def]
        asked.append((bucket.name, bucket.start))
        read(self, push, bucket, into, came)

    monkeypatch.setattr(TcpSource, "read", all_of_it)
    hosts.follow()
    eventually(lambda: hosts.came(manifest))
    assert asked == [(bucket.name, bucket.start) for bucket in manifest.buckets[3:]]
    assert is_version(hosts.copy.fetch(manifest), 1)


def test_nobody_gets_anything_without_the_token(hosts: TwoHosts) -> None:
    manifest = hosts.trainer.push(1, weights(1))
    push = json.loads((hosts.trainer.folder(1) / "buckets.jsonl").read_text().splitlines()[0])
    name = Path(manifest.buckets[0].name).name

    def ask(method: str, path: str, headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection(hosts.served.address, timeout=10)
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        status = connection.getresponse().status
        connection.close()
        return status

    file = f"/files/v00000001/{name}?push={push}&start=0"
    good = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=0-99"}
    assert ask("GET", file, good) == 206
    for wrong in ({}, {"Authorization": "Bearer the token of another"}, {"Authorization": TOKEN}):
        assert ask("GET", file, good | wrong if wrong else {"Range": "bytes=0-99"}) == 401
        assert all(ask("POST", f"/{path}", wrong) == 401 for path in ("news", "where", "drop", "close"))
    assert ask("GET", "/files/v00000001/..%2f..%2fx", good) == 404
    assert ask("GET", "/files/..%2f../x", good) == 404
    assert ask("GET", "/files/v00000001/.manifest.json", good) == 404
    assert ask("GET", file, good | {"Range": "bytes=0-9999999"}) == 400, "beyond the bucket"
    assert not hosts.served.server.closed


def test_each_bucket_crosses_once_per_site(tmp_path: Path) -> None:
    """Four hosts of two sites: the trainer's host sends each bucket twice, the others pass it on."""
    trainer = ShmStore("x", bucket_bytes=1024, root=tmp_path / "a")
    trainer.directory.mkdir(parents=True)
    origin = Served(trainer.directory)
    copies: list[ShmStore] = []
    servers: list[Served] = []
    mirrors: list[Mirror] = []
    threads: list[threading.Thread] = []
    links: list[TcpSource] = []
    for number in range(4):
        copy = ShmStore("x", root=tmp_path / f"host-{number}")
        copy.directory.mkdir(parents=True)
        served = Served(copy.directory, coming=lambda push, at=number: mirrors[at].coming(push))  # type: ignore[misc]
        link = TcpSource(origin.address, TOKEN, site=f"site-{number % 2}", peer=served.address)
        mirrors.append(Mirror(copy.directory, link))
        copies.append(copy)
        servers.append(served)
        links.append(link)
        threads.append(threading.Thread(target=mirrors[-1].run, daemon=True))
        threads[-1].start()
    try:
        for version in (1, 2):
            manifest = trainer.push(version, weights(version))
            eventually(partial(all_have, copies, manifest))
            assert origin.server.sent_bytes == 2 * version * manifest.num_bytes
        assert sum(link.from_peers_bytes for link in links) == 4 * manifest.num_bytes
        servers[0].close()  # a host that others were sent to is gone
        mirrors[0].stopped.set()
        manifest = trainer.push(3, weights(3))
        eventually(lambda: all(copy.manifest(3) == manifest for copy in copies[1:]), 40)
    finally:
        origin.server.closed = True
        for mirror in mirrors:
            mirror.stopped.set()
        for thread in threads:
            thread.join(15)
        for served in servers[1:]:
            served.close()
        origin.close()


# --- the process that does it ---------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    for name in "abc":
        (tmp_path / name).mkdir()
    yield tmp_path
    eventually(lambda: not [path for name in "abc" for path in (tmp_path / name).iterdir()], 30)


def store_on(root: Path, port: int, **more: float) -> TcpStore:
    settings = {"linger_s": 1.0} | more
    return TcpStore("x", f"127.0.0.1:{port}", TOKEN, bucket_bytes=1024, root=root, **settings)  # type: ignore[arg-type]


def pid_of(directory: Path) -> int:
    return int(read_ready(directory)["pid"])


def test_processes_serve_survive_and_clean_up(shm: Path) -> None:
    """A trainer's store, an engine's on another host and a coordinator's on a third; both processes are killed."""
    port = free_port()
    trainer, engine, coordinator = (store_on(shm / name, port) for name in "abc")
    assert trainer.serve() == port
    assert "Bearer" not in Path(f"/proc/{pid_of(trainer.directory)}/cmdline").read_text()
    assert TOKEN not in Path(f"/proc/{pid_of(trainer.directory)}/environ").read_text()
    manifest = trainer.push(1, weights(1))
    assert is_version(engine.fetch(manifest), 1)
    assert engine.directory.parent == shm / "b"
    asyncio.run(coordinator.drop_before(2))
    eventually(lambda: not trainer.folder(1).exists())
    for directory in (trainer.directory, engine.directory):
        dead = pid_of(directory)
        os.kill(dead, signal.SIGKILL)
        eventually(lambda at=directory: not is_owned(at))  # type: ignore[misc]
    manifest = trainer.push(2, weights(2))
    assert is_version(engine.fetch(manifest), 2)
    assert not any(TOKEN in path.read_text(errors="replace") for path in shm.rglob("*.json*"))
    coordinator.close()
    eventually(lambda: not trainer.directory.exists())
    eventually(lambda: not engine.directory.exists())
    trainer.serving.stop()
    trainer.close()
    engine.close()


def test_a_host_without_room_for_a_copy_says_so_and_goes_on_when_there_is_some(shm: Path) -> None:
    """It has room for one version, and not for two."""
    port = free_port()
    with small_disk(shm / "b", "96k"):
        trainer, engine = store_on(shm / "a", port), store_on(shm / "b", port, linger_s=30.0)
        ahead = FetchAhead(engine)
        held = dict[int, dict[str, torch.Tensor]]()
        for version in (1, 2):
            manifest = trainer.push(version, {"large": torch.full((12_000,), float(version))})
            if version == 2:
                with pytest.raises(StoreFull, match=r"has no room for a copy of the weights in .*No space left"):
                    ahead.stage(2).result(20)
                subprocess.run(["mount", "-o", "remount,size=8m", str(shm / "b")], check=True)
                eventually(lambda: not read_state(engine.directory).full)
            assert ahead.stage(version).result(20) == manifest
            held[version] = ahead.fetch(manifest)
        assert [float(one["large"][-1]) for one in held.values()] == [1.0, 2.0]
        del held
        trainer.serving.stop()
        for store in (trainer, engine):
            store.close()
        eventually(lambda: not engine.directory.exists())


def test_engines_of_the_trainers_host_map_what_it_wrote(shm: Path) -> None:
    trainer, engine = (store_on(shm / "a", 0) for _ in range(2))
    manifest = trainer.push(1, weights(1))
    assert is_version(engine.fetch(manifest), 1)
    assert engine.directory == trainer.directory
    trainer.serving.stop()
    engine.close()
    assert not trainer.directory.exists()


def test_a_host_removes_what_it_has_when_nobody_uses_it(shm: Path) -> None:
    trainer = store_on(shm / "a", 0)
    trainer.push(1, weights(1))
    trainer.serving.stop()
    eventually(lambda: not trainer.directory.exists())
    eventually(lambda: not list((shm / "a").iterdir()))


def test_who_uses_a_copy_is_seen_also_after_its_file_was_removed(shm: Path) -> None:
    """By a process that ended at the very moment at which another user came."""
    store = store_on(shm / "a", 0, linger_s=4.0)
    store.push(1, weights(1))
    users_file(store.directory).unlink()
    eventually(lambda: is_used(store.directory))
    store.serving.stop()
    store.close()


def test_a_trainer_that_is_not_reached_is_named(shm: Path) -> None:
    port = free_port()
    trainer = ShmStore("y", root=shm / "a")
    manifest = trainer.push(3, weights(3))
    trainer.close()
    engine = store_on(shm / "b", port, patience_s=2.0)
    with pytest.raises(WeightError, match=f"version 3: nothing of it came from 127.0.0.1:{port} .*refused"):
        engine.fetch(manifest)
    engine.close()


def test_a_port_that_is_taken_is_named(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.store.host.START_S", 6.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        trainer = store_on(shm / "a", taken.getsockname()[1])
        with pytest.raises(WeightError, match=r"cannot listen at 127.0.0.1:.*in use"):
            trainer.serve()
        os.kill(trainer.serving.pid, signal.SIGTERM)
    trainer.serving.stop()
    trainer.close()
    assert read_manifest(trainer.folder(1)) is None

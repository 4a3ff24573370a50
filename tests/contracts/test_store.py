"""The store contract: simulated, in shared memory, in files, over TCP, in Mooncake."""

import asyncio
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rollart.errors import WeightError
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.shm import ShmStore
from rollart.types import Bucket, WeightManifest, WeightVersion
from tests.contracts.store import StoreBench, StoreContract, TensorBench, TensorStoreContract, eventually
from tests.sim.engines import Bench, run


class TestSimStore(StoreContract):
    def play(self, work: Callable[[StoreBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            bench = Bench()

            def whole(manifest: WeightManifest) -> bool:
                try:
                    return set(bench.store.read(manifest)) == {manifest.version}
                except WeightError:
                    return False

            await work(StoreBench(store=bench.store, put=bench.put, whole=whole))

        run(awaited)


class TestShmStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self) -> BucketStore:
        return ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=512)

    def play(self, work: Callable[[StoreBench], Awaitable[None]]) -> None:
        store = self.make()

        def weights(version: WeightVersion) -> dict[str, torch.Tensor]:
            return {f"w{number}": torch.full((100,), float(10 * version + number)) for number in range(6)}

        def whole(manifest: WeightManifest) -> bool:
            try:
                found = store.fetch(manifest)
            except WeightError:
                return False
            return all(torch.equal(found[name], wanted) for name, wanted in weights(manifest.version).items())

        async def main() -> None:
            await work(StoreBench(store=store, put=lambda version: store.push(version, weights(version)), whole=whole))

        try:
            asyncio.run(main())
        finally:
            store.close()


class TestFileStore(TestShmStore):
    def make(self) -> BucketStore:
        return FileStore(self.folder / "weights", bucket_bytes=512, patience_s=0.0)


# --- real tensors ---------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(at: Path, num_bytes: int = 1_000_000) -> Iterator[Path]:
    """A file system of its own that is full soon. Needs root."""
    at.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(at)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


class TestTensorsInMemory(TensorStoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, root: Path) -> BucketStore:
        return ShmStore("x", bucket_bytes=4096, root=root)

    @contextmanager
    def below(self, root: Path) -> Iterator[TensorBench]:
        trainer, engine, coordinator = (self.make(root) for _ in range(3))
        coordinator.claim()
        yield TensorBench(trainer=trainer, engine=engine, coordinator=coordinator, left=lambda: sorted(root.rglob("*")))
        coordinator.close()

    def opened(self) -> AbstractContextManager[TensorBench]:
        root = self.folder / "root"
        root.mkdir()
        return self.below(root)

    def full(self) -> AbstractContextManager[TensorBench]:
        return self.on_a_small_disk()

    @contextmanager
    def on_a_small_disk(self) -> Iterator[TensorBench]:
        with small_disk(self.folder / "small") as root, self.below(root) as bench:
            yield bench


class TestTensorsInFiles(TestTensorsInMemory):
    def make(self, root: Path) -> BucketStore:
        return FileStore(root / "weights", bucket_bytes=4096, patience_s=0.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.slow  # two processes for each test
class TestTensorsOverTcp(TestTensorsInMemory):
    @contextmanager
    def below(self, root: Path) -> Iterator[TensorBench]:
        from rollart.store.tcp import TcpStore

        port = free_port()
        places = [root if name == "a" else self.folder / name for name in "abc"]
        for place in places:
            place.mkdir(exist_ok=True)
        trainer, engine, coordinator = (
            TcpStore("x", f"127.0.0.1:{port}", "t", bucket_bytes=4096, root=place, patience_s=5.0, linger_s=2.0)
            for place in places
        )
        bench = TensorBench(
            trainer=trainer,
            engine=engine,
            coordinator=coordinator,
            left=lambda: [path for place in places for path in place.rglob("*")],
            copies=True,
        )
        try:
            yield bench
        finally:
            trainer.serving.stop()
            for store in (coordinator, trainer, engine):
                store.close()
        eventually(lambda: not bench.left())


class ReceivedBench(TensorBench):
    """The engine has what it received in memory of its own."""

    def damage(self, bucket: Bucket) -> None:
        held = vars(self.engine)["_versions"][int(bucket.name[1:9])].files[bucket.name]
        held[bucket.start + bucket.num_bytes // 2] ^= 4

    def has(self, version: WeightVersion) -> bool:
        return bool(self.engine.appeared(version))


class TestTensorsBroadcast(TestTensorsInMemory):
    """Between CPUs, by gloo."""

    @contextmanager
    def below(self, root: Path) -> Iterator[TensorBench]:
        from rollart.store.nccl import NcclStore

        address = f"127.0.0.1:{free_port()}"
        trainer, engine, coordinator = (
            NcclStore(address, torch.device("cpu"), bucket_bytes=4096, patience_s=10.0) for _ in range(3)
        )
        trainer.serve()
        engine.receive()
        assert engine.joined(10.0)
        bench = ReceivedBench(
            trainer=trainer,
            engine=engine,
            coordinator=coordinator,
            left=lambda: list(vars(engine)["_versions"]),
        )
        try:
            yield bench
        finally:
            for store in (engine, coordinator, trainer):
                store.close()

    def full(self) -> AbstractContextManager[TensorBench]:
        pytest.skip("its memory is the engines' own")


class SharedGpuBench(TensorBench):
    def damage(self, bucket: Bucket) -> None:
        held = vars(self.engine.map_file(bucket.name))["_whole"]
        held[bucket.start + bucket.num_bytes // 2] ^= 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestTensorsOnOneGpu(TestTensorsInMemory):
    """CUDA IPC, within one process."""

    @contextmanager
    def below(self, root: Path) -> Iterator[TensorBench]:
        from rollart.store.cuda_ipc import CudaIpcStore

        trainer, engine, coordinator = (
            CudaIpcStore("x", torch.device("cuda:0"), bucket_bytes=4096, root=root) for _ in range(3)
        )
        yield SharedGpuBench(
            trainer=trainer, engine=engine, coordinator=coordinator, left=lambda: sorted(root.rglob("*"))
        )
        coordinator.close()

    def full(self) -> AbstractContextManager[TensorBench]:
        pytest.skip("its memory is the GPU's")


class Mooncake:
    """A master, and the memory of its store, in processes of their own."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.port = free_port()
        self.log = (folder / "mooncake.log").open("wb")
        self.start_master()
        self.start_memory(segment_bytes)

    def start_memory(self, segment_bytes: int) -> None:
        code = (
            "import sys, time; from mooncake.store import MooncakeDistributedStore as Store; store = Store();"
            "assert not store.setup('127.0.0.1', 'P2PHANDSHAKE', int(sys.argv[2]), 1 << 24, 'tcp', '', sys.argv[1]);"
            "print('there', flush=True); sys.stdin.read()"
        )
        self.memory = subprocess.Popen(
            [sys.executable, "-c", code, self.address, str(segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        assert self.memory.stdout is not None
        while self.memory.stdout.readline() != b"there\n":
            assert self.memory.poll() is None, Path(self.log.name).read_text()

    def kill_memory(self) -> None:
        self.memory.kill()
        self.memory.wait()
        for pipe in (self.memory.stdin, self.memory.stdout):
            assert pipe is not None
            pipe.close()

    def start_master(self) -> None:
        program = str(Path(sys.executable).with_name("mooncake_master"))
        command = [program, f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"]
        self.master = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        deadline_s = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self.kill_memory()
        self.master.kill()
        self.master.wait()
        self.log.close()


@pytest.mark.slow  # a store of three processes for each test
@pytest.mark.skipif(find_spec("mooncake") is None, reason="needs the extra mooncake")
class TestTensorsInMooncake(TestTensorsInMemory):
    @contextmanager
    def with_memory(self, segment_bytes: int) -> Iterator[TensorBench]:
        from rollart.store.mooncake import MooncakeStore
        from rollart.store.mooncake_client import MooncakeSetup

        root = self.folder / "root"
        root.mkdir()
        mooncake = Mooncake(self.folder, segment_bytes)
        setup = MooncakeSetup(master=mooncake.address, run_id="x")
        stores = [MooncakeStore(setup, bucket_bytes=4096, root=root, patience_s=5.0, linger_s=2.0) for _ in range(3)]
        bench = TensorBench(
            trainer=stores[0],
            engine=stores[1],
            coordinator=stores[2],
            left=lambda: sorted(root.rglob("*")),
            copies=True,
        )
        try:
            yield bench
        finally:
            for store in stores:
                store.close()
            mooncake.close()

    def opened(self) -> AbstractContextManager[TensorBench]:
        return self.with_memory(64 << 20)

    def full(self) -> AbstractContextManager[TensorBench]:
        return self.with_memory(16 << 20)  # the least that it takes

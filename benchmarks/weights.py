"""Each weight store against what its medium allows, in the same run. `python -m benchmarks.weights --json`.

For each size: a version is pushed and pulled through each store, and beside each round the medium's own limit is taken:
a copy of memory for `shm`, a plain write and read of a file for `files`, one socket over loopback (the kernel's
sendfile to a buffer) for `tcp` (whose push is one to `shm`), Mooncake's own put and get_into for `mooncake`. Rounds are
interleaved; ratios are of medians.
`delta` is `tcp` where few weights change from version to version, as many as in a step of AdamW at `LEARNING_RATE`
(measured first, on a million bfloat16 weights with float32 masters), against the same socket carrying all of it.
`push_s`: until the version is whole in the store. `pull_s`: all of it brought to this host and checked, as if nothing
hid it. `exposed_s`: what is left of that at a swap, when it was staged before. `files` are read twice: from the page
cache of the system, and, `cold`, from the disk. The first push of each store is not counted: it touches memory for
the first time (`first_push_s`). `of_limit` is of the medians; `spread` has the ratios of single rounds.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch

from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.mirror import Mirror, Source
from rollart.store.prefetch import FetchAhead
from rollart.store.shm import ShmStore
from rollart.store.tcp import TcpStore
from rollart.store.tcp_source import TcpSource
from rollart.types import WeightManifest

SIZES_GB = (0.25, 1.0, 2.0)
ROUNDS = 5
BUCKET_BYTES = 128_000_000
STORES = ("shm", "files", "tcp", "delta", "mooncake")
GOALS = {"shm": 0.6, "files": 0.6, "tcp": 0.5, "mooncake": 0.8}
LEARNING_RATE = 1e-6
WARM = 3
"""Pushes before the first one that counts: two versions are alive at a time, and a third one's memory is in reserve."""


def weights(num_bytes: int) -> dict[str, torch.Tensor]:
    """bfloat16, a quarter of it in one tensor, the rest in layers of 8 MB."""
    large, layer = num_bytes // 4, 8_000_000
    made = {"embedding": torch.randint(-(2**15), 2**15, (large // 2,), dtype=torch.int16).view(torch.bfloat16)}
    for number in range((num_bytes - large) // layer):
        made[f"layer.{number}"] = torch.randint(-(2**15), 2**15, (layer // 2,), dtype=torch.int16).view(torch.bfloat16)
    return made


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


TARGET = np.ones(512_000_000, dtype=np.uint8)
"""Memory to copy to: more than any cache holds, less than a second copy of the model."""


def copy_of_memory(model: dict[str, torch.Tensor]) -> float:
    def work() -> None:
        at = 0
        for tensor in model.values():
            raw = tensor.view(torch.uint8).numpy()
            at = at if at + len(raw) <= len(TARGET) else 0
            np.copyto(TARGET[at : at + len(raw)], raw)
            at += len(raw)

    return seconds(work)


class Limited(NamedTuple):
    """A store, and what its medium takes for as many bytes."""

    sides: "Sides"
    push_limit: Callable[[], float]
    pull_limit: Callable[[], float]
    forget: Callable[[], None] | None = None
    """Where the system keeps what was read: have it forget that."""


class Sides:
    """One store: its trainer's side, and how a version is brought to an engine's host."""

    def __init__(self, trainer: BucketStore, engine: BucketStore, mirror: Mirror | None, source: Source | None) -> None:
        self.trainer = trainer
        self.engine = engine
        self._mirror = mirror
        self._source = source
        self._ahead = FetchAhead(engine)

    def pull(self, manifest: WeightManifest) -> None:
        """Bring it here where it is elsewhere, and check it."""
        while self._mirror is not None and self.engine.manifest(manifest.version) != manifest:
            assert self._source is not None
            self._mirror._follow(self._source.news(self._mirror._have()))
        self.engine.fetch(manifest)

    def exposed_s(self, manifest: WeightManifest) -> float:
        """At a swap for which everything was staged."""
        self._ahead.stage(manifest.version)
        while self._ahead._awaited:
            time.sleep(0.01)
        return seconds(lambda: self._ahead.fetch(manifest))

    @property
    def sent_bytes(self) -> int:
        """That crossed the link so far; 0 where there is none."""
        return self._mirror.received_bytes if self._mirror is not None else 0

    def drop(self, version: int) -> None:
        asyncio.run(self.trainer.drop_before(version))


@contextmanager
def shm(folder: Path, model: dict[str, torch.Tensor]) -> Iterator[Limited]:
    run = f"bench-{uuid.uuid4().hex}"
    trainer, engine = (ShmStore(run, bucket_bytes=BUCKET_BYTES) for _ in range(2))
    copy = partial(copy_of_memory, model)
    try:
        yield Limited(Sides(trainer, engine, None, None), copy, copy)
    finally:
        trainer.close()


@contextmanager
def files(folder: Path, model: dict[str, torch.Tensor]) -> Iterator[Limited]:
    trainer, engine = (FileStore(folder / "weights", bucket_bytes=BUCKET_BYTES) for _ in range(2))
    raw = [tensor.view(torch.uint8).numpy() for tensor in model.values()]
    buffer = bytearray(8 << 20)
    path = folder / "plain"

    def write() -> float:
        path.unlink(missing_ok=True)
        with open(path, "wb", buffering=0) as file:

            def work() -> None:
                for one in raw:
                    left = one.data
                    while left:
                        left = left[file.write(left) :]

            return seconds(work)

    def read() -> float:
        with open(path, "rb", buffering=0) as file:

            def work() -> None:
                while file.readinto(buffer):
                    pass

            return seconds(work)

    def forget() -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)

    try:
        yield Limited(Sides(trainer, engine, None, None), write, read, forget)
    finally:
        trainer.close()


def small_step_density() -> float:
    """The part of bfloat16 weights that a step of AdamW changes, with gradients of changing sign."""
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(0.02 * torch.randn(1_000_000, generator=generator))
    optimizer = torch.optim.AdamW([master], lr=LEARNING_RATE)
    for _ in range(5):
        before = master.detach().bfloat16()
        master.grad = torch.randn(master.shape, generator=generator)
        optimizer.step()
    return float((before != master.detach().bfloat16()).float().mean())


def change(model: dict[str, torch.Tensor], density: float, seed: int) -> None:
    """Flip the last bit of this part of the weights, in place."""
    rng = np.random.default_rng(seed)
    for tensor in model.values():
        words = tensor.view(torch.int16).numpy()
        words[rng.integers(0, len(words), int(density * len(words)))] ^= 1


@contextmanager
def delta(folder: Path, model: dict[str, torch.Tensor]) -> Iterator[Limited]:
    with tcp(folder, model, deltas=True) as limited:
        yield limited


@contextmanager
def tcp(folder: Path, model: dict[str, torch.Tensor], *, deltas: bool = False) -> Iterator[Limited]:
    run, port = f"bench-{uuid.uuid4().hex}", _free_port()
    there = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="rollart-bench-"))
    trainer = TcpStore(run, f"127.0.0.1:{port}", "token", bucket_bytes=BUCKET_BYTES, root=there)
    trainer.serve()
    engine, link = (
        ShmStore(f"{run}-here", bucket_bytes=BUCKET_BYTES),
        TcpSource(f"127.0.0.1:{port}", "token", deltas=deltas),
    )
    num_bytes = sum(tensor.nbytes for tensor in model.values())
    plain, target = there / "plain", np.ones(BUCKET_BYTES, dtype=np.uint8)
    plain.write_bytes(target.tobytes())
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(plain)], stdout=subprocess.PIPE)
    assert sender.stdout is not None
    at = int(sender.stdout.readline())

    def receive() -> float:
        def work() -> None:
            for _ in range(num_bytes // BUCKET_BYTES):
                with socket.create_connection(("127.0.0.1", at)) as connection:
                    left = target.data
                    while left:
                        left = left[connection.recv_into(left) :]

        return seconds(work) * num_bytes / (num_bytes // BUCKET_BYTES * BUCKET_BYTES)

    try:
        sides = Sides(trainer, engine, Mirror(engine.directory, link), link)
        yield Limited(sides, partial(copy_of_memory, model), receive)
    finally:
        sender.kill()
        sender.wait()
        sender.stdout.close()
        link.close()
        trainer.serving.stop()
        trainer.close()
        engine.close()
        shutil.rmtree(there, ignore_errors=True)


SENDER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0)); print(listener.getsockname()[1], flush=True)
with open(sys.argv[1], "rb") as file:
    size = os.fstat(file.fileno()).st_size
    while True:
        connection, _ = listener.accept()
        with connection:
            done = 0
            while done < size: done += os.sendfile(connection.fileno(), file.fileno(), done, size - done)
"""


@contextmanager
def mooncake_service(folder: Path, memory_bytes: int) -> Iterator[str]:
    """A master and the store's memory, in processes of their own. Yields the master's address."""
    address = f"127.0.0.1:{_free_port()}"
    with ExitStack() as stack:
        log = stack.enter_context(open(folder / "mooncake.log", "wb"))
        program = str(Path(sys.executable).with_name("mooncake_master"))
        where = [f"--rpc_port={address.partition(':')[2]}", "--rpc_address=127.0.0.1"]
        master = [program, *where, f"--metrics_port={_free_port()}"]
        for command in (master, [sys.executable, "-c", MEMORY, address, str(memory_bytes)]):
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            time.sleep(3)
        yield address


@contextmanager
def mooncake(folder: Path, model: dict[str, torch.Tensor]) -> Iterator[Limited]:
    from rollart.store.mooncake import MooncakeStore
    from rollart.store.mooncake_client import MooncakeClient, MooncakeSetup, MooncakeSource

    num_bytes = sum(tensor.nbytes for tensor in model.values())
    with mooncake_service(folder, 4 * num_bytes) as address:
        setup = MooncakeSetup(master=address, run_id=f"bench-{uuid.uuid4().hex}")
        trainer = MooncakeStore(setup, bucket_bytes=BUCKET_BYTES)
        engine = ShmStore(f"{setup.run_id}-here", bucket_bytes=BUCKET_BYTES)
        source, plain = MooncakeSource(MooncakeClient(setup)), MooncakeClient(setup)
        raw, target = (np.zeros(BUCKET_BYTES, dtype=np.uint8) for _ in range(2))
        raw[:] = 7
        for one in (raw, target):
            plain.register(one)
        sizes = [min(BUCKET_BYTES, num_bytes - at) for at in range(0, num_bytes, BUCKET_BYTES)]

        def put() -> float:
            plain.remove("plain.*")

            def work() -> None:
                for at, size in enumerate(sizes):
                    plain.put(f"plain{at}", raw[:size])

            return seconds(work)

        def get() -> float:
            def work() -> None:
                for at, size in enumerate(sizes):
                    plain.get_into(f"plain{at}", target[:size])

            return seconds(work)

        try:
            yield Limited(Sides(trainer, engine, Mirror(engine.directory, source), source), put, get)
        finally:
            plain.close()
            source.close()
            trainer.close()
            engine.close()


MEMORY = (
    "import sys; from mooncake.store import MooncakeDistributedStore as Store; import time; store = Store();"
    "assert not store.setup('127.0.0.1', 'P2PHANDSHAKE', int(sys.argv[2]), 1 << 24, 'tcp', '', sys.argv[1]);"
    "time.sleep(100000)"
)
MAKERS = {"shm": shm, "files": files, "tcp": tcp, "delta": delta, "mooncake": mooncake}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def measure_store(name: str, num_bytes: int, folder: Path, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = weights(num_bytes)
    keys = ("push", "push_limit", "pull", "pull_limit", "cold_pull", "cold_pull_limit", "exposed")
    taken: dict[str, list[float]] = {key: [] for key in keys}
    density = small_step_density() if name == "delta" else 1.0
    with MAKERS[name](folder, model) as (sides, push_limit, pull_limit, forget):
        first_s = 0.0
        for version in range(1, rounds + WARM + 1):
            if name == "delta":
                change(model, density, version)
            sent_bytes = sides.sent_bytes
            limit_s = push_limit()
            manifests: list[WeightManifest] = []
            push_s = seconds(lambda v=version, into=manifests: into.append(sides.trainer.push(v, model)))  # type: ignore[misc]
            read_s = pull_limit()
            pull_s = seconds(lambda found=manifests: sides.pull(found[0]))  # type: ignore[misc]
            cold_s: list[float] = []
            if forget is not None:
                for work in (pull_limit, partial(sides.pull, manifests[0])):
                    forget()
                    cold_s.append(seconds(work))
            exposed_s = sides.exposed_s(manifests[0])
            sides.drop(version)
            first_s = first_s or push_s
            if version > WARM:
                row = {"push": push_s, "push_limit": limit_s, "pull": pull_s, "pull_limit": read_s}
                row |= dict(zip(("cold_pull_limit", "cold_pull"), cold_s, strict=False)) | {"exposed": exposed_s}
                for key, value in row.items():
                    taken[key].append(value)
    taken = {key: values for key, values in taken.items() if values}
    middle = {key: statistics.median(values) for key, values in taken.items()}
    paced = [key for key in ("push", "pull", "cold_pull") if key in taken]
    total = manifests[0].num_bytes
    return {
        "store": name,
        "gb": round(total / 1e9, 3),
        "buckets": len(manifests[0].buckets),
        "density": round(density, 4),
        "sent_of_bytes": round((sides.sent_bytes - sent_bytes) / total, 4),
        "first_push_s": round(first_s, 3),
        **{f"{key}_s": round(value, 4) for key, value in middle.items()},
        **{f"{key}_gb_s": round(total / value / 1e9, 2) for key, value in middle.items() if key != "exposed"},
        **{f"{key}_of_limit": round(middle[f"{key}_limit"] / middle[key], 2) for key in paced},
        "spread": {
            key: [round(limit / own, 2) for own, limit in zip(taken[key], taken[f"{key}_limit"], strict=True)]
            for key in paced
        },
        "exposed_of_pull": round(middle["exposed"] / middle["pull"], 3),
        "goal": GOALS.get(name),
        "rounds": {key: [round(value, 4) for value in values] for key, values in taken.items()},
    }


def measure(sizes_gb: list[float], stores: list[str], rounds: int, folder: Path | None) -> dict[str, Any]:
    found = []
    for name in stores:
        if name == "mooncake" and find_spec("mooncake") is None:
            print("mooncake: not installed, left out", file=sys.stderr)
            continue
        for size in sizes_gb:
            # A process for each, since what one of them has mapped takes memory until it ends.
            alone = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            with tempfile.TemporaryDirectory(dir=folder) as own, alone as process:
                found.append(process.submit(measure_store, name, int(size * 1e9), Path(own), rounds).result())
            print(found[-1], file=sys.stderr)  # so that nothing is lost where the next one is
    return {"load": os.getloadavg(), "threads": threading.active_count(), "bucket_bytes": BUCKET_BYTES, "stores": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--gb", type=float, nargs="+", default=SIZES_GB, help="sizes of the model")
    parser.add_argument("--stores", nargs="+", default=STORES, choices=STORES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, help="the disk that `files` is measured on; default: that of /tmp")
    asked = parser.parse_args()
    figures = measure(asked.gb, asked.stores, asked.rounds, asked.folder)
    if asked.json:
        sys.stdout.buffer.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        return 0
    for one in figures["stores"]:
        print(
            f"{one['store']:>9} {one['gb']:5.2f} GB  push {one['push_gb_s']:5.2f} GB/s ({one['push_of_limit']:.0%} of "
            f"its medium)  pull {one['pull_gb_s']:5.2f} GB/s ({one['pull_of_limit']:.0%}"
            f"{', from the disk {:.0%}'.format(one['cold_pull_of_limit']) if 'cold_pull_of_limit' in one else ''})  "
            f"exposed {one['exposed_s']:.3f} s"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What a push of a sharded trainer takes beside the shards, on each rank: `python -m benchmarks.push_memory --json`.

Two ranks, each a process with half the rows of every tensor, do what `train.type: fsdp2` does with them: copy the
shards (`host_copy`, in shards of the rank), and push the copy, gathered tensor by tensor on rank 0, which writes the
store's buckets. `push_buckets`: the most private memory of each rank during any push above what it had before the
first, with one copy held both times, in buckets: what libraries and the allocator keep from push to push is in it.
Memory is looked at every millisecond. That of the store itself is shared, and not counted here.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from benchmarks.weights import mooncake_service
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.shm import ShmStore
from rollart.train.gathering import Gathered, Shard, copied, follow, own_rows
from rollart.train.offload import HostMemory

STORES = ("shm", "files", "mooncake")
RANKS = 2
TENSOR_ROWS, WIDTH = 2048, 2048
"""8 MB in bfloat16."""
PUSHES = 4


def private_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


class Peak:
    """The most private memory of this process meanwhile."""

    def __enter__(self) -> "Peak":
        self.before = self.most = private_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, private_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def above(self) -> int:
        return self.most - self.before


def opened(kind: str, folder: Path, address: str, bucket_bytes: int) -> BucketStore:
    if kind == "shm":
        return ShmStore(f"push-{uuid.uuid4().hex[:8]}", bucket_bytes=bucket_bytes)
    if kind == "files":
        return FileStore(folder / "weights", bucket_bytes=bucket_bytes)
    from rollart.store.mooncake import MooncakeStore
    from rollart.store.mooncake_client import MooncakeSetup

    store = MooncakeStore(MooncakeSetup(master=address, run_id=uuid.uuid4().hex), bucket_bytes=bucket_bytes)
    store.connect()  # its client has memory of its own, as libraries do
    return store


def rank_of(
    rank: int, folder: Path, kind: str, address: str, num_bytes: int, bucket_bytes: int, link: Connection
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    rows = own_rows(TENSOR_ROWS, rank, RANKS)
    count = num_bytes // (2 * TENSOR_ROWS * WIDTH)
    live = {
        f"layer.{number}": Shard(
            local=torch.ones((rows.stop - rows.start, WIDTH), dtype=torch.bfloat16), shape=(TENSOR_ROWS, WIDTH)
        )
        for number in range(count)
    }
    own_bytes = sum(shard.local.nbytes for shard in live.values())
    store = opened(kind, folder, address, bucket_bytes) if rank == 0 else None
    memory = HostMemory()
    copies, most, seconds, base = [], 0, [], 0
    for version in range(1, PUSHES + 1):
        with Peak() as copying:
            held = copied(live, memory)
        dist.barrier()
        base = base or private_bytes()
        began_s = time.perf_counter()
        with Peak() as pushing:
            if store is not None:
                with closing(Gathered(held, group)) as tensors:
                    store.push(version, tensors.in_parts())
                del tensors
            else:
                follow(held, group)
        seconds.append(time.perf_counter() - began_s)
        if store is not None:
            asyncio.run(store.drop_before(version))
        copies.append(copying.above / own_bytes)
        most = max(most, pushing.most - base)
        del held
    if store is not None:
        store.close()
    dist.destroy_process_group()
    link.send({"host_copy": copies[0], "push": most / bucket_bytes, "push_s": seconds[1:]})


def measure_store(kind: str, num_bytes: int, bucket_bytes: int) -> dict[str, Any]:
    started = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = stack.enter_context(mooncake_service(folder, 3 * num_bytes)) if kind == "mooncake" else ""
        links, ranks = [], []
        for rank in range(RANKS):
            own, other = started.Pipe()
            given = (rank, folder, kind, address, num_bytes, bucket_bytes, other)
            ranks.append(started.Process(target=rank_of, args=given, daemon=True))
            ranks[-1].start()
            links.append(own)
        found = [link.recv() for link in links]
        for process in ranks:
            process.join()
    return {
        "store": kind,
        "gb": round(num_bytes / 1e9, 3),
        "bucket_mb": round(bucket_bytes / 1e6),
        "ranks": [
            {
                "host_copy": round(one["host_copy"], 2),
                "push_buckets": round(one["push"], 2),
                "push_s": round(max(one["push_s"]), 2),
            }
            for one in found
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--stores", nargs="+", default=STORES, choices=STORES)
    asked = parser.parse_args()
    found = [measure_store(kind, int(asked.gb * 1e9), asked.bucket_mb * 1_000_000) for kind in asked.stores]
    for one in found:
        print(one, file=sys.stderr, flush=True)
    if asked.json:
        figures = {"load": os.getloadavg(), "stores": found}
        sys.stdout.buffer.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A sharded model is published from copies of its shards, bytes by bytes: what that takes on each rank, and that every
part of a tensor comes from where it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollart.train.gathering import PART_BYTES
from rollart.train.offload import HostMemory

RANKS, TENSORS, ROWS, COLUMNS = 2, 24, 2048, 1024
TENSOR_BYTES = ROWS * COLUMNS * 4
BUCKET_BYTES = 4 * TENSOR_BYTES

RANK = """
import asyncio, json, sys
from pathlib import Path
import torch, torch.distributed as dist
from rollart.store.files import FileStore
from rollart.train.gathering import Gathered, Shard, copied, follow, own_rows
from rollart.train.offload import HostMemory
from rollart.train.versions import Versions

rank, ranks, tensors, rows, columns, bucket_bytes, folder = *map(int, sys.argv[1:7]), Path(sys.argv[7])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
store = FileStore(folder / "weights", bucket_bytes)

def whole(number):
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + number

def shard(number):
    return Shard(local=whole(number)[own_rows(rows, rank, ranks)].clone(), shape=(rows, columns))

def memory(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def push(version):
    shards = versions.of(version)
    if rank != 0:
        return follow(shards, dist.group.WORLD)
    gathered = Gathered(shards, dist.group.WORLD)
    manifest = store.push(version, gathered.in_parts())
    gathered.close()
    return manifest

live = {f"layer.{number}": shard(number) for number in range(tensors)}
host = HostMemory()
versions = Versions(lambda: copied(live, host))
for version in range(2):  # copies of this and of the last version are held from here on
    push(version)
    versions.advance()
dist.barrier()
open("/proc/self/clear_refs", "w").write("5")  # the most so far is what there is now
before = memory("VmRSS")
for version in range(2, 6):
    manifest = push(version)
    versions.advance()
peak = memory("VmHWM") - before
if rank == 0:
    found = store.fetch(manifest)
    assert len(manifest.buckets) > 4
    assert all(torch.equal(found[f"layer.{number}"], whole(number)) for number in range(tensors))
dist.barrier()
print(json.dumps(peak))
"""

WHOLE = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from rollart.train import gathering
from rollart.train.gathering import Gathered, Shard, follow, own_rows

gathering.PART_BYTES = 1000
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
SHAPES = {"even": (ranks * 3, 50), "uneven": (ranks * 3 + 1, 7), "short": (1, 400), "flat": (1001,), "empty": (0, 4)}

def whole(name):
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)

cut = {name: own_rows(shape[0], rank, ranks) for name, shape in SHAPES.items()}
shards = {name: Shard(local=whole(name)[cut[name]], shape=shape) for name, shape in SHAPES.items()}
shards["everywhere"] = Shard(local=torch.arange(700.0), shape=(700,), whole=True)
if rank == 0:
    gathered = Gathered(shards, dist.group.WORLD)
    parts = gathered.in_parts()
    for name, shard in reversed(list(shards.items())):
        expected = shard.local if shard.whole else whole(name)
        assert torch.equal(gathered[name], expected), name
        size = parts[name].part_bytes
        ranges = [(at, min(at + size, parts[name].nbytes)) for at in range(0, parts[name].nbytes, size)]
        read = torch.cat([parts[name].read(*one).clone() for one in ranges] or [torch.empty(0, dtype=torch.uint8)])
        assert torch.equal(read, expected.contiguous().view(-1).view(torch.uint8)), name
    gathered.close()
else:
    follow(shards, dist.group.WORLD)
dist.barrier()
"""


def run(script: str, ranks: int, *arguments: object) -> list[str]:
    """What each rank prints."""
    commands = [[sys.executable, "-c", script, str(rank), str(ranks), *map(str, arguments)] for rank in range(ranks)]
    own = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) for command in commands]
    said = [one.communicate(timeout=120)[0] for one in started]
    assert [one.returncode for one in started] == [0] * ranks
    return said


@pytest.mark.slow
def test_a_push_takes_a_part_of_a_tensor_and_no_more(tmp_path: Path) -> None:
    """24 tensors of 8 MB on two ranks, in buckets of four, version after version. A trainer holds copies of two; beside
    these a push may take two buckets, and takes less than one."""
    said = run(RANK, RANKS, TENSORS, ROWS, COLUMNS, BUCKET_BYTES, tmp_path)
    first, other = (json.loads(lines.splitlines()[-1]) for lines in said)
    whole = TENSORS * TENSOR_BYTES
    shown = f"of {whole / 1e6:.0f} MB: rank 0 {first / 1e6:.0f} MB, rank 1 {other / 1e6:.0f} MB beside its copies"
    assert first < min(PART_BYTES, TENSOR_BYTES) + 4e6, shown
    assert other < 4e6, shown


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_byte_comes_from_the_rank_that_has_it(ranks: int, tmp_path: Path) -> None:
    run(WHOLE, ranks, tmp_path)


def test_memory_of_a_copy_is_used_again_when_nobody_has_it() -> None:
    memory, wanted = HostMemory(), {"a": ((3, 5), torch.bfloat16), "b": ((2,), torch.float32), "c": ((), torch.int64)}
    first = memory.like(wanted)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in first.items()} == wanted
    for tensor in first.values():
        tensor.fill_(1)
    second = memory.like(wanted)
    for tensor in second.values():
        tensor.fill_(2)
    assert [float(tensor.sum()) for tensor in first.values()] == [15, 2, 1]
    at, kept = first["a"].data_ptr(), first.pop("b")
    del tensor, first
    assert memory.like(wanted)["a"].data_ptr() != at, "somebody has a part of it"
    del kept
    assert {memory.like(wanted)["a"].data_ptr(), memory.like(wanted)["a"].data_ptr()} >= {at}
    other = memory.like({"a": ((4000,), torch.float32)})
    assert other["a"].data_ptr() != at

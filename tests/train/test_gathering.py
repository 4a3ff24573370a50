"""A sharded model is put together in host memory, tensor by tensor: what that takes on each rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS, TENSORS, ROWS, COLUMNS = 2, 24, 2048, 1024
TENSOR_BYTES = ROWS * COLUMNS * 4
BUCKET_BYTES = 4 * TENSOR_BYTES

RANK = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from rollart.store.files import FileStore
from rollart.train.gathering import Gathered, Shard, follow, own_rows

rank, ranks, tensors, rows, columns, bucket_bytes, folder = *map(int, sys.argv[1:7]), Path(sys.argv[7])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)

def whole(number):
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + number

def shard(number):
    return Shard(local=whole(number)[own_rows(rows, rank, ranks)].clone(), shape=(rows, columns))

def memory(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

shards = {f"layer.{number}": shard(number) for number in range(tensors)}
if rank == 0:  # what the first of everything takes: libraries, buffers of the group
    FileStore(folder / "first", bucket_bytes).push(0, {"a": whole(0)})
dist.barrier()
open("/proc/self/clear_refs", "w").write("5")  # the most so far is what there is now
before = memory("VmRSS")
if rank == 0:
    gathered = Gathered(shards, dist.group.WORLD)
    store = FileStore(folder / "weights", bucket_bytes)
    manifest = store.push(1, gathered)
    gathered.close()
    peak = memory("VmHWM") - before
    found = store.fetch(manifest)
    assert len(manifest.buckets) > 4
    assert all(torch.equal(found[f"layer.{number}"], whole(number)) for number in range(tensors))
else:
    follow(shards, dist.group.WORLD)
    peak = memory("VmHWM") - before
dist.barrier()
print(json.dumps(peak))
"""


@pytest.mark.slow
def test_no_rank_ever_holds_more_than_a_bucket_and_a_tensor(tmp_path: Path) -> None:
    """24 tensors of 8 MB on two ranks, in buckets of four."""
    arguments = [str(value) for value in (RANKS, TENSORS, ROWS, COLUMNS, BUCKET_BYTES, tmp_path)]
    # What is freed goes back at once, as it does with tensors of more than 32 MB whatever is set.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments], stdout=subprocess.PIPE, text=True, env=variables
        )
        for rank in range(RANKS)
    ]
    first, other = (json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks)
    whole = TENSORS * TENSOR_BYTES
    said = f"of {whole / 1e6:.0f} MB: rank 0 {first / 1e6:.0f} MB, rank 1 {other / 1e6:.0f} MB beside its shards"
    assert first < BUCKET_BYTES + 3 * TENSOR_BYTES, said
    assert other < TENSOR_BYTES / 2, said

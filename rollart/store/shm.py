"""Weight versions in shared memory: safetensors files under /dev/shm, mapped by engines without a copy.

Owns: `/dev/shm/rollart-<run>/`, and the lock beside it.
Files, not `multiprocessing.shared_memory`: a reader's resource tracker (Python 3.11) would unlink segments at exit.
"""

import re
from pathlib import Path

from rollart.store.buckets import BucketStore
from rollart.store.media import Disk, Memory
from rollart.store.owner import left_behind

ROOT = Path("/dev/shm")
PREFIX = "rollart-"
RUN_ID = re.compile(r"[A-Za-z0-9._+-]+")


class ShmStore(BucketStore):
    """Versions of the run `run_id`, for the processes of one machine."""

    def __init__(self, run_id: str, bucket_bytes: int = 1 << 30, *, root: Path = ROOT) -> None:
        if not RUN_ID.fullmatch(run_id):
            raise ValueError(f"run_id: {run_id!r} is not a file name; use letters, digits, dot, dash, plus, underscore")
        directory = root / f"{PREFIX}{run_id}"
        super().__init__(directory, bucket_bytes, Memory(directory))


def remove_left_behind(root: Path = ROOT) -> None:
    """Free the memory that runs left which were killed and never resumed. What a live run owns stays."""
    for directory in left_behind(root, PREFIX):
        BucketStore(directory, 1 << 30, Disk()).close()

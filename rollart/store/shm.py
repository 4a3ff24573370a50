"""Weight versions in shared memory: safetensors files under /dev/shm, mapped by engines without a copy.

Owns: `/dev/shm/rollart-<run>/`, and the lock beside it.
Files, not `multiprocessing.shared_memory`: a reader's resource tracker (Python 3.11) would unlink segments at exit.
"""

import re
from pathlib import Path

from rollart.store.buckets import BucketStore
from rollart.store.media import SharedMemory
from rollart.store.owner import PREFIX, ROOT

RUN_ID = re.compile(r"[A-Za-z0-9._+-]+")


def folder_of(run_id: str, root: Path = ROOT) -> Path:
    """Where the weights of a run lie in a host's shared memory."""
    if not RUN_ID.fullmatch(run_id):
        raise ValueError(f"run_id: {run_id!r} is not a file name; use letters, digits, dot, dash, plus, underscore")
    return root / f"{PREFIX}{run_id}"


class ShmStore(BucketStore):
    """Versions of the run `run_id`, for the processes of one machine."""

    def __init__(self, run_id: str, bucket_bytes: int = 1 << 30, *, root: Path = ROOT) -> None:
        directory = folder_of(run_id, root)
        super().__init__(directory, bucket_bytes, SharedMemory(directory))

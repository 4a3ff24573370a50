"""Weight buckets in shared memory: files under /dev/shm, mapped by engines without a copy.

Owns: `/dev/shm/rollart-<run>/`. A bucket is its tensors end to end, raw, 64-byte aligned: `v00000003/00000.bucket`.
Files, not `multiprocessing.shared_memory`: a reader's resource tracker (Python 3.11) would unlink segments at exit.
"""

import re
from pathlib import Path

from rollart.weights.buckets import BucketStore, Members

ROOT = Path("/dev/shm")
RUN_ID = re.compile(r"[A-Za-z0-9._+-]+")


class ShmStore(BucketStore):
    """Versions of the run `run_id`, for the processes of one machine."""

    def __init__(self, run_id: str, bucket_bytes: int = 1 << 30, *, root: Path = ROOT) -> None:
        if not RUN_ID.fullmatch(run_id):
            raise ValueError(f"run_id: {run_id!r} is not a file name; use letters, digits, dot, dash, plus, underscore")
        super().__init__(root / f"rollart-{run_id}", bucket_bytes)

    def _file_name(self, index: int, count: int) -> str:
        return f"{index:05d}.bucket"

    def _head(self, members: Members) -> bytes:
        return b""

"""Which store a job's weights travel through: the one place that knows them all.

A `StoreSetup` is plain data, so that every worker of a job opens the same store, in whatever process it runs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.shm import ShmStore

StoreSetup = Mapping[str, Any]
"""`{"type": "shm", "run_id": ...}` or `{"type": "files", "directory": ..., "model": ...}`, each with `bucket_bytes`."""


def open_store(setup: StoreSetup) -> BucketStore:
    match setup["type"]:
        case "shm":
            return ShmStore(setup["run_id"], bucket_bytes=setup["bucket_bytes"])
        case "files":
            return FileStore(
                Path(setup["directory"]), bucket_bytes=setup["bucket_bytes"], model_path=Path(setup["model"])
            )
    raise ValueError(f"no such weight store: {setup['type']}")

"""Which store a job's weights travel through: the one place that knows them all."""

import secrets
from pathlib import Path

from rollart.config.job import Job
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.shm import ShmStore
from rollart.workers.setup import StoreSetup


def new_store(job: Job, out: Path) -> StoreSetup:
    """A store of this life of this run alone."""
    weights = job.weights
    if weights.type == "files":
        weights = weights.model_copy(update={"path": str(Path(weights.path or out / "weights").absolute())})
    model = str(Path(job.model.path).absolute())
    token = secrets.token_urlsafe(32) if weights.type == "tcp" else ""
    return StoreSetup(weights=weights, run_id=f"{job.name}-{secrets.token_hex(8)}", model=model, token=token)


def open_store(setup: StoreSetup, *, site: str = "", pushes: bool = False) -> BucketStore:
    """`site`: of who opens it. `pushes`: it is the trainer's, which others may ask from now on. Raises WeightError."""
    weights, bucket_bytes = setup.weights, setup.weights.bucket_mb * 1_000_000
    match weights.type:
        case "shm":
            return ShmStore(setup.run_id, bucket_bytes=bucket_bytes)
        case "files":
            assert weights.path is not None
            folder = Path(weights.path) / setup.run_id
            return FileStore(folder, bucket_bytes=bucket_bytes, model_path=Path(setup.model))
        case "tcp":
            from rollart.store.tcp import TcpStore

            store = TcpStore(
                setup.run_id,
                weights.address,
                setup.token,
                bind=weights.bind,
                site=site,
                deltas=weights.delta == "auto",
                bucket_bytes=bucket_bytes,
            )
            if pushes:
                store.serve()
            return store
        case "mooncake":
            from rollart.store.mooncake import MooncakeStore
            from rollart.store.mooncake_client import MooncakeSetup

            assert weights.master is not None
            where = MooncakeSetup(
                master=weights.master,
                run_id=setup.run_id,
                metadata=weights.metadata,
                protocol=weights.protocol,
                devices=weights.devices,
                segment_bytes=weights.segment_mb * 1_000_000,
            )
            in_mooncake = MooncakeStore(where, bucket_bytes=bucket_bytes)
            if pushes:
                in_mooncake.connect()
            return in_mooncake
    raise ValueError(f"no such weight store: {setup.weights.type}")

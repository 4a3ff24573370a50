"""Which store a job's weights travel through: the one place that knows them all."""

import secrets
import socket
from pathlib import Path
from typing import Literal

import torch

from rollart.config.job import Job
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.shm import ShmStore
from rollart.workers.setup import StoreSetup

Part = Literal["trainer", "engine", "coordinator"]
"""The trainer pushes, an engine fetches, the coordinator drops and closes; so does who has another part."""


def new_store(job: Job, out: Path) -> StoreSetup:
    """A store of this life of this run alone."""
    weights = job.weights
    if weights.type == "files":
        weights = weights.model_copy(update={"path": str(Path(weights.path or out / "weights").absolute())})
    if weights.type == "nccl" and weights.address.endswith(":0"):
        with socket.create_server((weights.address.rpartition(":")[0], 0)) as free:
            weights = weights.model_copy(update={"address": "{}:{}".format(*free.getsockname())})
    model = str(Path(job.model.path).absolute())
    token = secrets.token_urlsafe(32) if weights.type == "tcp" else ""
    return StoreSetup(weights=weights, run_id=f"{job.name}-{secrets.token_hex(8)}", model=model, token=token)


def open_store(
    setup: StoreSetup, part: Part = "coordinator", *, site: str = "", device: torch.device | None = None
) -> BucketStore:
    """`site`: of an engine. `device`: where who opens it has its weights. Raises WeightError."""
    weights, bucket_bytes = setup.weights, setup.weights.bucket_mb * 1_000_000
    device = device or torch.device("cpu")
    match weights.type:
        case "shm":
            return ShmStore(setup.run_id, bucket_bytes=bucket_bytes)
        case "files":
            assert weights.path is not None
            folder = Path(weights.path) / setup.run_id
            return FileStore(folder, bucket_bytes=bucket_bytes, model_path=Path(setup.model))
        case "cuda_ipc":
            from rollart.store.cuda_ipc import CudaIpcStore

            return CudaIpcStore(setup.run_id, device, bucket_bytes=bucket_bytes)
        case "nccl":
            from rollart.store.nccl import NcclStore

            group = NcclStore(weights.address, device, bucket_bytes=bucket_bytes, bind=weights.bind)
            if part == "trainer":
                group.serve()
            elif part == "engine":
                group.receive()
            return group
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
            if part == "trainer":
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
            if part == "trainer":
                in_mooncake.serve()
            elif part == "engine":
                in_mooncake.begin()
            return in_mooncake
    raise ValueError(f"no such weight store: {setup.weights.type}")

"""What the tests build workers from."""

import uuid
from pathlib import Path
from typing import Any

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import WeightSettings
from rollart.workers.setup import StoreSetup, WorkerSetup

JOB: dict[str, Any] = {
    "name": "test",
    "tasks": [{"name": "a", "use": "rollart.tasks.frozen_lake"}],
    "pools": [{"name": "cpu", "engines": {}, "slots": 8}],
}


def worker_setup(job: Job | None, out: Path, **more: Any) -> WorkerSetup:
    """With a store in shared memory that nobody else has."""
    run_id = f"test-{uuid.uuid4().hex}"
    job = job or build_job(JOB)
    where = StoreSetup(weights=WeightSettings(bucket_mb=1), run_id=run_id, model=job.model.path)
    return WorkerSetup(job=job, out=out, store=where, **more)

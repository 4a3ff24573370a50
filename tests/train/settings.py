"""Trainer settings for tests: a small job, with these keys below `train`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import TrainSettings
from rollart.train.settings import TrainerSettings


def job_of(model: Path, *, engines: str = "embedded", temperature: float = 1.0, **train: Any) -> Job:
    return build_job(
        {
            "name": "test",
            "model": {"path": str(model)},
            "tasks": [{"name": "bandit", "temperature": temperature}],
            "pools": [{"name": "cpu", "engines": {"type": engines}, "slots": 8}],
            "train": train,
        }
    )


def trainer_settings(model: Path, out: Path, **keys: Any) -> TrainerSettings:
    return TrainerSettings(job=job_of(model, **keys), out=out)


def changed(settings: TrainerSettings, **train: Any) -> TrainerSettings:
    """With these keys below `train`."""
    values = settings.job.train.model_dump() | train
    return replace(settings, job=settings.job.model_copy(update={"train": TrainSettings(**values)}))


def elsewhere(settings: TrainerSettings) -> TrainerSettings:
    """In another run directory: knows nothing of what was set aside."""
    settings.out.joinpath("elsewhere").mkdir(exist_ok=True)
    return replace(settings, out=settings.out / "elsewhere")

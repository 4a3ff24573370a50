"""What a trainer is started from, single or sharded, and what follows from it.

A job that was resumed with other settings has those of its earlier steps too: a replayed step is trained as it was.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from rollart.config.job import Job
from rollart.model.adapters import Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The job, and where its files go."""

    job: Job
    out: Path
    """The run directory."""
    earlier: tuple[tuple[int, Job], ...] = ()
    """(n, the job that the steps before n are trained under), n rising."""

    def at(self, step: int) -> Job:
        """What this step is trained under."""
        return next((job for until, job in self.earlier if step < until), self.job)

    @property
    def model_path(self) -> Path:
        """A Hugging Face directory: the initial weights, and the tokenizer's files."""
        return Path(self.job.model.path)

    @property
    def checkpoint_dir(self) -> Path:
        return self.out.absolute() / "checkpoints"

    @property
    def set_aside_path(self) -> Path:
        """The file of what could not be trained on."""
        return self.out.absolute() / "set_aside.jsonl"

    @property
    def reference_path(self) -> Path | None:
        """The model that the KL is taken to; None where no step needs it."""
        if not any(job.train.kl_coef for job in (self.job, *(job for _, job in self.earlier))):
            return None
        return Path(self.job.train.reference or self.job.model.path)

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained; None where all weights are."""
        given = self.job.train.lora
        return None if given is None else Lora(rank=given.rank, alpha=given.alpha, targets=given.targets)

    @property
    def adapter_path(self) -> Path | None:
        """Those that training begins with, where there are any."""
        given = self.job.train.lora
        return None if given is None or given.adapter is None else Path(given.adapter)

    @property
    def probe(self) -> bool:
        """Publish each version with its log-probabilities of the probe: servers need it, embedded engines do not."""
        return any(engines.type != "embedded" for _, engines in self.job.engines)


def temperatures(job: Job) -> dict[str, float]:
    """What each domain is sampled at."""
    return {task.name: task.temperature for task in job.tasks}


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """Of one step: warm-up times decay."""
    train = settings.at(step).train
    warm = min(1.0, (step + 1) / max(1, train.warmup_steps))
    left = max(0.0, 1 - step / train.steps)
    match train.lr_decay:
        case "none":
            return train.lr * warm
        case "linear":
            return train.lr * warm * left
        case "cosine":
            return train.lr * warm * (1 - math.cos(math.pi * left)) / 2

"""A very small real job: a tiny model with few warm-up steps, two tasks, a few steps."""

from pathlib import Path
from typing import Any

from rollart.config.job import Job
from rollart.config.load import build_job

STEPS = 3
WARMUP_STEPS = 5
"""Enough to answer in the right form now and then; what is tested here is not learning."""


def raw_job(model: Path, **settings: Any) -> dict[str, Any]:
    """One pool of engines, one of environments; any top-level key may be replaced."""
    raw: dict[str, Any] = {
        "name": "small",
        "model": {"path": str(model), "context_tokens": 512},
        "tasks": [
            {"name": "lake", "use": "rollart.tasks.frozen_lake", "group_size": 4, "max_turns": 6, "max_tokens": 4},
            {"name": "maths", "use": "rollart.tasks.calculator_math", "group_size": 4, "max_turns": 3, "max_tokens": 8},
        ],
        "rollout": {"groups_per_step": 4, "zero_variance": "keep"},
        "pools": [
            {"name": "cpu", "engines": {"count": 1, "kv_tokens": 16384, "max_batch": 64}},
            {"name": "environments", "slots": 32, "isolation": "inline"},
        ],
        "rewards": {"workers": 1},
        "train": {"pool": "cpu", "steps": STEPS, "lr": 1e-4, "entropy_coef": 0.01},
        "weights": {"bucket_mb": 16},
        "checkpoint": {"every": 1},
        "limits": {"backoff_s": 0.2},
        "sim": {
            "model": "qwen3-0.6b",
            "tasks": {
                name: {"turns": 3, "prompt_tokens": 30, "observation_tokens": 10, "answer_tokens": 4}
                for name in ("lake", "maths")
            },
        },
    }
    return {**raw, **settings}


def small_job(model: Path, **settings: Any) -> Job:
    return build_job(raw_job(model, **settings))

"""From a job to what each worker process is built from: plain data, read by `rollart.launch.worker`."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.config.job import Job
from rollart.config.settings import EngineSettings


def store_setup(job: Job, out: Path) -> dict[str, Any]:
    """A store of this life of this run alone: no other has its name, on any machine."""
    run_id = f"{job.name}-{secrets.token_hex(8)}"
    common = {"type": job.weights.type, "bucket_bytes": job.weights.bucket_mb * 1_000_000}
    if job.weights.type == "shm":
        return {**common, "run_id": run_id}
    parent = Path(job.weights.path) if job.weights.path else out / "weights"
    return {**common, "directory": str((parent / run_id).absolute()), "model": str(Path(job.model.path).absolute())}


def engine_setups(
    job: Job, out: Path, store: Mapping[str, Any], stop_tokens: Sequence[int] = ()
) -> dict[str, dict[str, Any]]:
    """By pool. `stop_tokens` end an answer, beside those that the model's files name."""
    return {
        pool.name: {
            "type": pool.engines.type,
            "store": store,
            "threads": pool.engines.threads,
            **(
                _embedded_setup(job, pool.engines, stop_tokens)
                if pool.engines.type == "embedded"
                else {"server": _server_setup(job, out, pool.engines, stop_tokens, cpu=pool.hardware == "cpu")}
            ),
        }
        for pool in job.pools
        if pool.engines
    }


def _embedded_setup(job: Job, engines: EngineSettings, stop_tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "stop_tokens": list(stop_tokens),
        "model": job.model.path,
        "device": _first(engines.device),
        "dtype": engines.dtype,
        "cores": engines.cores,
        "settings": {
            "kv_tokens": engines.kv_tokens,
            "max_batch": engines.max_batch,
            "step_tokens": engines.step_tokens,
            "keep_kv": engines.keep_kv,
            "draft_tokens": engines.draft_tokens,
            "seed": job.seed,
        },
    }


def _first(device: str) -> str:
    """Whoever has a GPU of its own sees no other."""
    return "cuda:0" if device == "cuda" else device


def _server_setup(
    job: Job, out: Path, engines: EngineSettings, stop_tokens: Sequence[int], *, cpu: bool
) -> dict[str, Any]:
    return {
        "stop_tokens": list(stop_tokens),
        "context_tokens": job.model.context_tokens,
        "log_dir": str((out / "logs").absolute()),
        "dtype": engines.dtype,
        "max_batch": engines.max_batch,
        "gpus": engines.gpus,
        "threads": engines.threads,
        "cpu": cpu,
        "python": engines.python,
        "url": engines.url,
        "args": engines.args,
        "connector": engines.split.connector if engines.split else None,
        "prefill_gpus": engines.split.prefill_gpus if engines.split else 1,
        "start_s": job.limits.start_s,
    }


def task_variables(job: Job) -> list[str]:
    """What environments are given of our environment. All tasks': a process plays now this one, now that one."""
    return sorted({name for task in job.tasks for name in task.environment})


def trainer_setup(
    job: Job, out: Path, store: Mapping[str, Any], earlier: Sequence[tuple[int, Job]] = ()
) -> dict[str, Any]:
    """`earlier`: (n, the job that the steps before n are trained under), n rising."""
    return {
        **_trainer_setup(job, out, store),
        "earlier": [[until, _trainer_setup(before, out, store)] for until, before in earlier],
    }


def _trainer_setup(job: Job, out: Path, store: Mapping[str, Any]) -> dict[str, Any]:
    train = job.train
    return {
        "type": train.type,
        "world_size": train.gpus,
        "log_dir": str((out / "logs").absolute()),
        "store": store,
        "threads": train.threads,
        "cores": train.cores,
        "settings": {
            "model_path": job.model.path,
            "checkpoint_dir": str((out / "checkpoints").absolute()),
            "lr": train.lr,
            "warmup_steps": train.warmup_steps,
            "lr_decay": train.lr_decay,
            "steps": train.steps,
            "weight_decay": train.weight_decay,
            "grad_clip": train.grad_clip,
            "updates_per_step": train.updates_per_step,
            "microbatch_tokens": train.microbatch_tokens,
            "bf16": train.bf16,
            "device": _first(train.device),
            "threads": train.threads,
            "skip_zero_variance": job.rollout.zero_variance == "skip",
            "temperatures": {task.name: task.temperature for task in job.tasks},
            "reference_path": train.reference,
            "keep_checkpoints": job.checkpoint.keep,
            "probe": any(pool.engines.type != "embedded" for pool in job.pools if pool.engines),
            "set_aside_path": str((out / "set_aside.jsonl").absolute()),
        },
        "loss": {
            "algorithm": train.algorithm,
            "eps_low": train.eps_low,
            "eps_high": train.eps_high,
            "length_constant": train.length_constant,
            "correction": train.correction,
            "weight_cap": train.weight_cap,
            "weight_level": train.weight_level,
            "over_cap": train.over_cap,
            "weight_floor": train.weight_floor,
            "kl_coef": train.kl_coef,
            "entropy_coef": train.entropy_coef,
        },
    }

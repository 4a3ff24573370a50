"""Models of the Hugging Face hub: `model.path: Qwen/Qwen3-0.6B`, or with `@REVISION`, in place of a directory.

Found before anything is checked or started, by huggingface_hub and in its cache. What checks, workers and the run
directory get is the directory of one commit (`.../snapshots/COMMIT`), so a run that is resumed has the model that it
began with, whatever the hub has by then.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rollart.config.job import Job
from rollart.config.paths import hub_id
from rollart.errors import JobError, install

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Of a model, what is read: config, weights, tokenizer, templates. Not the same weights in other formats."""
Find = Callable[[str, str], str]
"""(key, what it says) -> what it is to say."""


def with_models_here(job: Job) -> Job:
    """The job with a directory for each model that it names by its id, downloaded where it is not in the cache. Raises
    JobError."""
    return _with_models(job, lambda key, value: str(found(key, value)) if hub_id(value) else value)


def with_models_of(before: Job, job: Job) -> Job:
    """The job of a run that goes on: an id without a revision means the commit that the run began with."""
    had: dict[str, str] = {}

    def remember(key: str, value: str) -> str:
        had[key] = value
        return value

    def same(key: str, value: str) -> str:
        _, at, _ = value.partition("@")
        folder = f"models--{value.replace('/', '--')}"
        return had[key] if hub_id(value) and not at and folder in Path(had.get(key, "")).parts else value

    _with_models(before, remember)
    return _with_models(job, same)


def _with_models(job: Job, find: Find) -> Job:
    """The job, with what stands in each key that names a model replaced."""
    train = job.train
    if train.reference:
        train = train.model_copy(update={"reference": find("train.reference", train.reference)})
    if train.lora is not None and train.lora.adapter:
        lora = train.lora.model_copy(update={"adapter": find("train.lora.adapter", train.lora.adapter)})
        train = train.model_copy(update={"lora": lora})
    pools = tuple(
        pool.model_copy(
            update={
                "judge": pool.judge.model_copy(update={"path": find(f"pools.{pool.name}.judge.path", pool.judge.path)})
            }
        )
        if pool.judge is not None
        else pool
        for pool in job.pools
    )
    model = job.model.model_copy(update={"path": find("model.path", job.model.path)})
    return job.model_copy(update={"model": model, "train": train, "pools": pools})


@functools.cache
def found(key: str, text: str) -> Path:
    """The directory of this model. What is downloaded shows its progress on standard error. Raises JobError."""
    name, _, revision = text.partition("@")
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ModuleNotFoundError:
        raise JobError(
            f"{key}: {text} is no directory here, and the hub needs huggingface_hub: {install('train')}"
        ) from None
    where = f"{key}: {text} is no directory here; taken from the hub, or from its cache {constants.HF_HUB_CACHE}"
    sys.stderr.write(f"{where}\n")
    known = f"{key}: {text} is no directory here, and as a model of the hub"
    fix = "correct it, give a directory, or make a small model: rollart model tiny DIR"
    try:
        place = snapshot_download(name, revision=revision or None, allow_patterns=list(FILES), ignore_patterns=["*/*"])
    except GatedRepoError:
        raise JobError(f"{known} it is gated: ask for access on its page, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise JobError(f"{known} it is not known, or not to you (HF_TOKEN); {fix}") from None
    except RevisionNotFoundError:
        raise JobError(f"{known} it has no revision {revision!r}; correct it, or leave it out") from None
    except Exception as error:  # the boundary to the hub: a network raises many things
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} was not reached"
        said = " ".join(str(error).split())[:200]
        raise JobError(
            f"{known} it is not whole in the cache {constants.HF_HUB_CACHE}, and {offline} ({type(error).__name__}: "
            f"{said}); where there is a network run `hf download {name}` and bring that cache here (HF_HOME names it), "
            f"or {fix}"
        ) from None
    return Path(os.path.abspath(place))

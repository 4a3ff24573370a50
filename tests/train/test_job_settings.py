"""What a job says of training reaches the trainer, and is refused by the job wherever the trainer would refuse it."""

from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest
import torch

from rollart.config.changes import as_replayed
from rollart.config.load import build_job
from rollart.config.settings import Algorithm
from rollart.errors import JobError
from rollart.setups import trainer_setup
from rollart.train.losses import LossSettings
from rollart.train.single import SingleTrainer
from rollart.worker import _trainer_settings
from tests.train.samples import make_batch, random_samples, tiny_model

JOB: dict[str, Any] = {
    "name": "base",
    "tasks": [{"name": "bandit"}],
    "pools": [{"name": "cpu", "engines": {}, "slots": 8}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def trainer(model: Path, out: Path, *, keep: int = 2, **train: Any) -> SingleTrainer:
    """As the trainer's process builds it."""
    job = build_job(
        {**JOB, "model": {"path": str(model)}, "train": {"lr": 1e-2, **train}, "checkpoint": {"keep": keep}}
    )
    return SingleTrainer(_trainer_settings(trainer_setup(job, out, {})))


@pytest.mark.parametrize(
    ("train", "clips"),
    [
        ({}, True),
        ({"correction": "decoupled"}, False),
        ({"correction": "decoupled", "updates_per_step": 3, "eps_low": 1e-3, "eps_high": 1e-3}, True),
    ],
)
def test_the_clip_acts_by_default_and_under_decoupled_with_several_updates(
    train: dict[str, Any], clips: bool, model: Path, tmp_path: Path
) -> None:
    metrics = trainer(model, tmp_path, **train).train_step(make_batch(0, random_samples(2, 24))).metrics
    assert (metrics["actor/clipfrac"] > 0) == clips


def test_the_length_constant_divides_the_loss(model: Path, tmp_path: Path) -> None:
    batch = make_batch(0, random_samples(2, 24))
    losses = [
        trainer(model, tmp_path, algorithm="dr_grpo", length_constant=length).train_step(batch).metrics["actor/pg_loss"]
        for length in (None, 512)
    ]
    assert losses[1] == pytest.approx(2 * losses[0])


def test_the_kl_is_taken_to_the_reference(model: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", seed=1)
    batch = make_batch(0, random_samples(2, 24))
    own, to_other = (
        trainer(model, tmp_path, kl_coef=0.1, reference=reference).train_step(batch).metrics["actor/kl_ref"]
        for reference in (None, str(other))
    )
    assert own == pytest.approx(0, abs=1e-9)
    assert to_other > 1e-3


def test_so_many_checkpoints_are_kept(model: Path, tmp_path: Path) -> None:
    one = trainer(model, tmp_path, keep=3)
    for step in range(5):
        one.train_step(make_batch(step, []))
        one.save()
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4", "5"]


def refusal(values: dict[str, Any]) -> str:
    try:
        LossSettings(**values)
    except ValueError as error:
        return str(error)
    return ""


def test_the_job_refuses_what_the_loss_refuses_in_the_same_words() -> None:
    """Every combination of the settings that a job can reach."""
    refused = 0
    numbers = (None, 0.2)
    for algorithm, low, high, length, correction in product(
        get_args(Algorithm), (*numbers, 1.0), numbers, (None, 64), ("decoupled", "bypass", "none")
    ):
        values = {
            "algorithm": algorithm, "eps_low": low, "eps_high": high, "length_constant": length,
            "correction": correction,
        }  # fmt: skip
        expected = refusal(values)
        refused += bool(expected)
        try:
            build_job({**JOB, "train": values | {"updates_per_step": 2}})
            said = ""
        except JobError as error:
            said = str(error)
        assert said == (expected and f"train.{expected}")
    assert refused


KINDS: list[dict[str, Any]] = [
    {"lr": 3e-2, "warmup_steps": 4},
    {"steps": 3, "lr_decay": "linear"},
    {"weight_decay": 0.5},
    {"grad_clip": 1e-3},
    {"entropy_coef": 0.5},
    {"kl_coef": 0.5},
    {"updates_per_step": 2},
    {"correction": "bypass", "eps_low": 1e-3, "eps_high": 1e-3},
]


@pytest.mark.parametrize("later", KINDS, ids=lambda later: next(iter(later)))
def test_a_replayed_step_is_trained_as_it_was_and_a_new_one_as_the_job_says_now(
    later: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Resumed with other settings after two steps, which are replayed."""
    batches = [make_batch(step, random_samples(step, 24)) for step in range(3)]
    base = {**JOB, "model": {"path": str(model)}}
    before = build_job({**base, "train": {"lr": 1e-2}})
    after = build_job({**base, "train": {"lr": 1e-2, **later}})
    first = SingleTrainer(_trainer_settings(trainer_setup(before, tmp_path / "a", {})))
    for batch in batches[:2]:
        first.train_step(batch)
    setup = msgpack.unpackb(msgpack.packb(trainer_setup(after, tmp_path / "b", {}, [(2, as_replayed(before, after))])))
    resumed = SingleTrainer(_trainer_settings(setup))
    for batch in batches[:2]:
        resumed.train_step(batch)
    assert all(torch.equal(tensor, resumed.named_tensors()[name]) for name, tensor in first.named_tensors().items())
    unchanged = first.train_step(batches[2])
    changed = resumed.train_step(batches[2])
    assert changed.version == unchanged.version == 3
    assert any(
        not torch.equal(tensor, resumed.named_tensors()[name]) for name, tensor in first.named_tensors().items()
    ), "from here on the new settings act"

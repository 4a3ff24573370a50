"""What a job says of training reaches the trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.config.changes import as_replayed
from rollart.config.load import build_job
from rollart.config.settings import WeightSettings
from rollart.train.settings import TrainerSettings
from rollart.train.single import SingleTrainer
from rollart.workers.setup import StoreSetup, WorkerSetup
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
    return SingleTrainer(TrainerSettings(job=job, out=out))


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


def test_beyond_the_cap_a_token_is_cut_or_left_out_or_its_sequence(model: Path, tmp_path: Path) -> None:
    """What the engine says of `random_samples` is far from what this model says."""
    ways: list[dict[str, Any]] = [
        {},
        {"over_cap": "mask"},
        {"over_cap": "mask", "weight_floor": 0.9},
        {"weight_level": "sequence"},
        {"over_cap": "mask", "weight_level": "sequence"},
    ]
    batch = make_batch(0, random_samples(2, 24))
    found = [
        trainer(model, tmp_path, correction="decoupled", weight_cap=1.1, **way).train_step(batch).metrics
        for way in ways
    ]
    cut, masked, floored, sequences, masked_sequences = (metrics["actor/weight_mean"] for metrics in found)
    assert cut > masked > floored > 0
    assert sequences > masked_sequences
    assert len({cut, masked, floored, sequences, masked_sequences}) == len(ways)
    shares = [metrics["actor/truncated_share"] for metrics in found]
    assert shares[0] == shares[1] < shares[2]
    assert shares[3] == shares[4] != shares[0]


KINDS: list[dict[str, Any]] = [
    {"lr": 3e-2, "warmup_steps": 4},
    {"steps": 3, "lr_decay": "linear"},
    {"weight_decay": 0.5},
    {"adam_eps": 0.1},
    {"grad_clip": 1e-3},
    {"entropy_coef": 0.5},
    {"kl_coef": 0.5},
    {"updates_per_step": 2},
    {"correction": "bypass", "eps_low": 1e-3, "eps_high": 1e-3},
    {"over_cap": "mask", "weight_floor": 0.9},
    {"weight_level": "sequence", "correction": "decoupled"},
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
    first = SingleTrainer(TrainerSettings(job=before, out=tmp_path / "a"))
    for batch in batches[:2]:
        first.train_step(batch)
    where = StoreSetup(weights=WeightSettings(), run_id="x", model=str(model))
    sent = WorkerSetup(job=after, out=tmp_path / "b", store=where, earlier=((2, as_replayed(before, after)),))
    setup = WorkerSetup.model_validate_json(sent.model_dump_json())
    assert setup == sent
    resumed = SingleTrainer(TrainerSettings(job=setup.job, out=setup.out, earlier=setup.earlier))
    for batch in batches[:2]:
        resumed.train_step(batch)
    assert all(torch.equal(tensor, resumed.named_tensors()[name]) for name, tensor in first.named_tensors().items())
    unchanged = first.train_step(batches[2])
    changed = resumed.train_step(batches[2])
    assert changed.version == unchanged.version == 3
    assert any(
        not torch.equal(tensor, resumed.named_tensors()[name]) for name, tensor in first.named_tensors().items()
    ), "from here on the new settings act"

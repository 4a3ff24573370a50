"""The single-device trainer on a CUDA device; skipped where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.model.network import load_model
from rollart.train import optimizer
from rollart.train.memory import recomputed_layers
from rollart.train.single import SingleTrainer
from tests.train.samples import make_batch, random_samples, tiny_model
from tests.train.settings import trainer_settings
from tests.train.test_single import MemoryStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LORA = {"rank": 3, "targets": ["q_proj", "down_proj"]}


def trained(path: Path, out: Path, steps: int = 3, **train: Any) -> SingleTrainer:
    out.mkdir(parents=True, exist_ok=True)
    trainer = SingleTrainer(trainer_settings(path, out, **{"device": "cuda", "lr": 1e-3} | train))
    for step in range(trainer.version, steps):
        result = trainer.train_step(make_batch(step, random_samples(step, 6)))
        assert not result.set_aside, "all of it can be computed"
        assert result.metrics["actor/skipped_updates"] == 0, "all gradients are finite"
    return trainer


@pytest.fixture(params=[1 << 30, 0], ids=["few", "many"], autouse=True)
def _many_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as if the model were large, with masters in 2 bytes beside the weights."""
    monkeypatch.setattr(optimizer, "MANY_WEIGHTS", request.param)


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"moments": "bfloat16"},
        {"master": "stochastic", "moments": "bfloat16"},
        {"recompute": "full"},
        {"compile": "on"},
        {"offload": "optimizer"},
    ],
    ids=str,
)
def test_a_step_moves_the_weights_as_on_a_cpu(train: dict[str, Any], tmp_path: Path) -> None:
    """Of one update: later ones depend on how the first was rounded."""
    path = tiny_model(tmp_path / "model")
    expected = trained(path, tmp_path / "cpu", steps=1, device="cpu").named_tensors()
    initial = load_model(path).state_dict()
    found = trained(path, tmp_path / "cuda", steps=1, **train).named_tensors()
    moved = torch.cat(
        [(tensor.float().cpu() - initial[name].bfloat16().float()).flatten() for name, tensor in found.items()]
    )
    wanted = torch.cat([(tensor - initial[name]).flatten() for name, tensor in expected.items()])
    assert float(torch.nn.functional.cosine_similarity(moved, wanted, dim=0)) > 0.7


@pytest.mark.parametrize("train", [{"offload": "optimizer"}, {"offload": "optimizer", "moments": "bfloat16"}], ids=str)
def test_state_on_the_host_gives_what_state_on_the_device_gives(train: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    here = trained(path, tmp_path / "here", **train | {"offload": "none"})
    away = trained(path, tmp_path / "away", **train)
    torch.cuda.synchronize()
    assert not any(tensor.is_cuda for tensor in away.optimizer.tensors().values())
    for name, tensor in here.named_tensors().items():
        torch.testing.assert_close(away.named_tensors()[name], tensor, atol=2e-3, rtol=0.02)


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
def test_what_is_published_is_of_its_version_and_in_host_memory(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    """Also where the weights changed right after the copy was begun."""
    path, store = tiny_model(tmp_path / "model"), MemoryStore()
    trainer = trained(path, tmp_path, steps=1, lora=lora)
    before = {name: tensor.cpu().clone() for name, tensor in trainer.named_tensors().items()}
    trainer.train_step(make_batch(1, random_samples(1, 6)))
    trainer.publish(1, store)
    trainer.publish(2, store)
    torch.testing.assert_close(store.pushed[0][1], before, atol=0, rtol=0)
    assert not any(tensor.is_cuda for _, tensors in store.pushed for tensor in tensors.values())
    after = {name: tensor.cpu() for name, tensor in trainer.named_tensors().items()}
    torch.testing.assert_close(store.pushed[1][1], after, atol=0, rtol=0)


@pytest.mark.parametrize("train", [{}, {"master": "stochastic"}, {"lora": LORA}, {"offload": "optimizer"}], ids=str)
def test_a_restored_trainer_has_the_same_weights_and_state(train: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    trainer = trained(path, tmp_path, **train)
    reference = trainer.save()
    again = SingleTrainer(trainer_settings(path, tmp_path, device="cuda", lr=1e-3, **train))
    again.restore(reference)
    torch.testing.assert_close(again.named_tensors(), trainer.named_tensors(), atol=0, rtol=0)
    torch.testing.assert_close(again.optimizer.tensors(), trainer.optimizer.tensors(), atol=0, rtol=0)


def test_a_small_model_recomputes_nothing_and_a_huge_batch_everything(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    network = load_model(path, torch.bfloat16, "cuda")
    found = [
        recomputed_layers(trainer_settings(path, tmp_path, device="cuda", microbatch_tokens=tokens).job.train, network)
        for tokens in (4096, 1 << 40)
    ]
    assert found == [0, 2]

"""AdamW over master weights: what it keeps where, and that nothing small is lost."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollart.config.settings import TrainSettings
from rollart.train.adamw import joined, noise, rounded, split
from rollart.train.offload import HostCopy, HostMemory, stream
from rollart.train.optimizer import MasterAdamW


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False)).to(dtype)


def settings(**keys: Any) -> TrainSettings:
    return TrainSettings(bf16=True, weight_decay=0.1, **keys)


def optimizer(model: nn.Module, **keys: Any) -> MasterAdamW:
    train = settings(**keys)
    found = MasterAdamW(model, train)
    found.tune(train)
    return found


def step(model: nn.Module, adam: MasterAdamW, number: int, lr: float = 1e-2) -> float:
    """Two micro-batches, one update."""
    generator = torch.Generator().manual_seed(number)
    for _ in range(2):
        rows = torch.randn(11, 7, generator=generator).to(next(model.parameters()).dtype)
        torch.autograd.backward(model(rows).float().square().sum())
    norm = adam.clip()
    adam.update(lr)
    return norm


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().float().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_adamw_computes_what_torch_s_computes(dtype: torch.dtype) -> None:
    """With moments in bfloat16, to what their rounding allows."""
    ends = []
    for moments in ("float32", "bfloat16"):
        model = network(dtype)
        adam = optimizer(model, moments=moments)
        norms = [step(model, adam, number) for number in range(5)]
        ends.append((weights(model), norms))
    moved = {name: tensor - weights(network(dtype))[name] for name, tensor in ends[0][0].items()}
    for name, tensor in moved.items():
        apart = ends[1][0][name] - ends[0][0][name]
        assert float(apart.norm() / tensor.norm()) < 0.05, name
    assert ends[0][1] == pytest.approx(ends[1][1], rel=0.01)


@pytest.mark.parametrize(
    "keys",
    [{"moments": "bfloat16"}, {"master": "stochastic"}, {"master": "stochastic", "moments": "bfloat16"}],
    ids=str,
)
def test_an_optimizer_loaded_goes_on_bit_for_bit(keys: dict[str, str]) -> None:
    model = network(torch.bfloat16)
    adam = optimizer(model, **keys)
    for number in range(3):
        step(model, adam, number)
    other = network(torch.bfloat16)
    other.load_state_dict(model.state_dict())
    again = optimizer(other, **keys)
    again.load({name: tensor.clone() for name, tensor in adam.tensors().items()})
    for number in range(3, 6):
        step(model, adam, number)
        step(other, again, number)
    torch.testing.assert_close(weights(other), weights(model), atol=0, rtol=0)
    torch.testing.assert_close(again.tensors(), adam.tensors(), atol=0, rtol=0)


def test_state_kept_otherwise_is_taken_over() -> None:
    """Of a run that is resumed with other settings."""
    model = network(torch.bfloat16)
    adam = optimizer(model)
    step(model, adam, 0)
    coarse = optimizer(model, moments="bfloat16")
    coarse.load(adam.tensors())
    for name, param in model.named_parameters():
        assert torch.equal(coarse.tensors()[f"master/{name}"], adam.tensors()[f"master/{name}"]), "to the last bit"
        assert torch.equal(param, adam.tensors()[f"master/{name}"].bfloat16())
    fine = optimizer(model)
    fine.load(coarse.tensors())
    for name, tensor in adam.tensors().items():
        torch.testing.assert_close(fine.tensors()[name], tensor, atol=1e-6, rtol=0.01)
        if name.startswith("exp_avg"):
            assert coarse.tensors()[name].dtype == torch.bfloat16


def test_rounding_at_random_loses_no_update_that_is_too_small_to_see() -> None:
    """A hundred updates of a hundredth of the last place: rounded to the nearest, the weight would never move."""
    model = nn.Linear(1000, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    train = settings(master="stochastic").model_copy(update={"weight_decay": 0.0, "grad_clip": 0.0})
    adam = MasterAdamW(model, train)
    adam.tune(train)
    for _ in range(100):
        torch.autograd.backward(model(torch.ones(1, 1000, dtype=torch.bfloat16)).sum())
        adam.update(lr=2.0**-8 / 100)  # Adam's step is the rate, where gradients are all alike
    assert float(model.weight.detach().float().mean()) == pytest.approx(1 - 2.0**-8, abs=5e-4)
    assert MasterAdamW(model, train).tensors() == {}, "no copy of the weights"


def test_a_master_in_two_parts_is_the_master() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-20, 20).repeat(250)
    high, low = split(values)
    assert torch.equal(joined(high, low), values)
    torch.testing.assert_close(high, values.bfloat16(), atol=0, rtol=0)


def test_rounding_at_random_is_fair() -> None:
    bits = noise(100_000, torch.tensor(7, dtype=torch.int32), torch.device("cpu")) & 0xFFFF
    value = torch.full((100_000,), 1 + 2.0**-7 * 0.3)
    found = rounded(value, torch.bfloat16, bits).float()
    assert found.unique().tolist() == [1.0, 1 + 2.0**-7]
    assert float(found.mean()) == pytest.approx(float(value[0]), abs=5e-5)
    assert not torch.equal(bits, noise(100_000, torch.tensor(8, dtype=torch.int32), torch.device("cpu")) & 0xFFFF)


def test_gradients_add_up_in_float32() -> None:
    """256 micro-batches of 1 on 1/256: a bfloat16 sum stops at 256 of them."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    adam = optimizer(model, master="stochastic")
    for _ in range(300):
        torch.autograd.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
    assert adam.clip() == pytest.approx(300)


def test_a_copy_is_of_the_weights_as_they_were() -> None:
    tensors = {"a": torch.ones(3)}
    copy = HostCopy.of(tensors, HostMemory())
    copy.hold_back()
    tensors["a"].zero_()
    assert copy.whole()["a"].tolist() == [1, 1, 1]


def test_streamed_state_is_changed_where_it_is() -> None:
    held = {name: (torch.zeros(2), torch.zeros(2)) for name in "abc"}
    stream(held, lambda name, first, second: first.fill_(ord(name)), torch.device("cpu"))
    assert [int(first[0]) for first, _ in held.values()] == [97, 98, 99]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"master": "stochastic"}, "train.master: stochastic rounds to bfloat16"),
        ({"master": "stochastic", "bf16": True, "type": "fsdp2"}, "train.master: train.type fsdp2"),
        ({"offload": "optimizer"}, "train.offload: on a CPU"),
        ({"offload": "optimizer", "device": "cuda", "type": "fsdp2"}, "train.offload: train.type fsdp2"),
        ({"master": "stochastic", "device": "cuda", "bf16": False}, "train.master: stochastic rounds to bfloat16"),
    ],
)
def test_what_would_save_no_memory_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TrainSettings(**keys)


def test_a_gpu_computes_in_bfloat16_unless_told_otherwise() -> None:
    assert [TrainSettings(device=device).uses_bf16 for device in ("cpu", "cuda", "cuda:1")] == [False, True, True]
    assert not TrainSettings(device="cuda", bf16=False).uses_bf16
    assert TrainSettings(bf16=True).uses_bf16

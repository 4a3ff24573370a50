"""The single-device trainer: it learns, counts versions, publishes what it says, and continues bit for bit."""

import asyncio
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from rollart.errors import StoreFull, TrainerError
from rollart.model import network
from rollart.model.directory import StoredTensors
from rollart.model.network import load_model
from rollart.ports import Trainer
from rollart.train import checkpoints, single
from rollart.train.settings import TrainerSettings
from rollart.train.single import AsyncTrainer, SingleTrainer
from rollart.types import Bucket, Probe, Sample, WeightManifest
from tests.train.samples import VOCAB, make_batch, make_sample, random_samples, tiny_model
from tests.train.settings import changed, trainer_settings

PROMPT, WANTED = [1, 2], 5


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(model_path: Path, tmp_path: Path) -> TrainerSettings:
    return trainer_settings(model_path, tmp_path, lr=1e-2)


class MemoryStore:
    """Keeps what was pushed."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, dict[str, Tensor]]] = []

    def push(self, version: int, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> WeightManifest:
        self.pushed.append((version, {name: tensor.clone() for name, tensor in tensors.items()}))
        return WeightManifest(version=version, buckets=(Bucket("b", 0, ""),))


def plain_logprobs(trainer: SingleTrainer, tokens: list[int]) -> Tensor:
    """(T, V) by transformers alone, on the trainer's present weights."""
    model = AutoModelForCausalLM.from_pretrained(trainer.settings.model_path, dtype=torch.float32)
    model.load_state_dict(trainer.named_tensors(), strict=False)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)


def bandit_batch(trainer: SingleTrainer, step: int, members: int = 32) -> list[Sample]:
    """One token sampled after the prompt; the wanted one earns 1, and the group's mean is the baseline."""
    logprobs_V = plain_logprobs(trainer, PROMPT)[-1]
    rng = np.random.default_rng(step)
    chosen = rng.choice(
        VOCAB, size=members, p=logprobs_V.double().exp().numpy() / float(logprobs_V.double().exp().sum())
    )
    rewards = (chosen == WANTED).astype(float)
    return [
        make_sample(
            "g", [*PROMPT, int(token)], [0, 0, 1],
            logprobs=[0, 0, float(logprobs_V[token])], advantage=reward - rewards.mean(), version=step, member=member,
        )
        for member, (token, reward) in enumerate(zip(chosen, rewards, strict=True))
    ]  # fmt: skip


def train_bandit(settings: TrainerSettings, steps: int) -> tuple[SingleTrainer, list[dict[str, float]]]:
    trainer = SingleTrainer(settings)
    metrics = []
    for step in range(steps):
        result = trainer.train_step(make_batch(step, bandit_batch(trainer, step)))
        metrics.append({name: value for name, value in result.metrics.items() if name.startswith("actor/")})
    return trainer, metrics


def wanted_probability(trainer: SingleTrainer) -> float:
    return float(plain_logprobs(trainer, PROMPT)[-1, WANTED].exp())


@pytest.mark.parametrize("bf16", [False, True])
def test_bandit_is_learnt_and_repeats(settings: TrainerSettings, bf16: bool) -> None:
    settings = changed(settings, bf16=bf16, entropy_coef=0.001)
    before = wanted_probability(SingleTrainer(settings))
    trainer, metrics = train_bandit(settings, 20)
    assert before < 0.1
    assert wanted_probability(trainer) > 0.9
    again, same = train_bandit(settings, 20)
    assert same == metrics
    for name, tensor in trainer.named_tensors().items():
        assert torch.equal(tensor, again.named_tensors()[name])
    assert {"actor/loss", "actor/grad_norm", "actor/entropy", "actor/clipfrac", "actor/kl_mismatch"} <= set(metrics[0])


@pytest.mark.parametrize("algorithm", ["dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++"])
@pytest.mark.parametrize("correction", ["decoupled", "bypass"])
def test_every_algorithm_learns(settings: TrainerSettings, algorithm: Any, correction: Any) -> None:
    updates = 2 if correction == "decoupled" else 1  # with one, decoupled never clips, and the job refuses it
    settings = changed(settings, algorithm=algorithm, correction=correction, updates_per_step=updates)
    trainer, metrics = train_bandit(settings, 12)
    assert wanted_probability(trainer) > 0.4
    assert max(step["actor/kl_mismatch"] for step in metrics) < 1e-6  # log-probs of plain transformers, same weights


def test_micro_batches_change_nothing(settings: TrainerSettings) -> None:
    """One step on uneven samples: the weights do not depend on how it was cut."""
    # A large eps makes Adam's first step linear in the gradient, so that a wrong scale would show.
    settings = changed(settings, adam_eps=1.0, grad_clip=0.0, lr=10.0, entropy_coef=0.1, kl_coef=0.1)
    samples = random_samples(0, 24)
    found = []
    for budget in (20, 64, 100_000):
        trainer = SingleTrainer(changed(settings, microbatch_tokens=budget))
        found.append((trainer.train_step(make_batch(0, samples)).metrics, trainer.named_tensors()))
    assert found[0][0]["perf/microbatches"] > 5
    initial = SingleTrainer(settings).named_tensors()
    for metrics, tensors in found[:-1]:
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/kl_mismatch", "actor/ratio_max"):
            assert metrics[name] == pytest.approx(found[-1][0][name], rel=1e-4, abs=1e-6)
        for name, tensor in found[-1][1].items():
            torch.testing.assert_close(tensors[name], tensor, atol=1e-6, rtol=1e-4)
    assert any(not torch.equal(initial[name], tensor) for name, tensor in found[0][1].items())


def test_bf16_micro_batches_add_up(settings: TrainerSettings) -> None:
    norms = []
    for budget in (20, 100_000):
        trainer = SingleTrainer(changed(settings, bf16=True, microbatch_tokens=budget))
        norms.append(trainer.train_step(make_batch(0, random_samples(0, 24))).metrics["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_temperature_is_the_samplers(settings: TrainerSettings) -> None:
    trainer = SingleTrainer(trainer_settings(settings.model_path, settings.out, temperature=0.5))
    model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=torch.float32)
    with torch.no_grad():
        scaled_TV = torch.log_softmax(model(torch.tensor([[1, 2, 3, 4]])).logits[0] / 0.5, -1)
    logprobs = [0.0, 0.0, float(scaled_TV[1, 3]), float(scaled_TV[2, 4])]
    metrics = trainer.train_step(
        make_batch(0, [make_sample("g", [1, 2, 3, 4], [0, 0, 1, 1], logprobs=logprobs)])
    ).metrics
    assert metrics["actor/kl_mismatch"] < 1e-8
    assert metrics["actor/ratio_max"] == pytest.approx(1, abs=1e-4)


def test_several_updates_anchor_to_the_steps_beginning(settings: TrainerSettings) -> None:
    """The second update moves away from the proximal policy of the step's start, and may clip."""
    samples = random_samples(2, 24)
    plain = changed(settings, correction="decoupled")
    one = SingleTrainer(plain).train_step(make_batch(0, samples))
    clipped = {"correction": "decoupled", "eps_low": 1e-3, "eps_high": 1e-3}
    trainer = SingleTrainer(changed(settings, updates_per_step=3, **clipped))
    three = trainer.train_step(make_batch(0, samples))
    assert one.metrics["actor/clipfrac"] == 0
    assert three.metrics["actor/clipfrac"] > 0
    assert three.version == trainer.version == 1
    assert three.metrics["perf/tokens"] == one.metrics["perf/tokens"]


def test_two_updates_anchor_to_the_steps_beginning_as_well(settings: TrainerSettings) -> None:
    """Where each update had its own anchor, the ratio would be 1 and nothing would clip."""
    clipped = {"correction": "decoupled", "eps_low": 1e-3, "eps_high": 1e-3}
    trainer = SingleTrainer(changed(settings, updates_per_step=2, **clipped))
    assert trainer.train_step(make_batch(0, random_samples(2, 24))).metrics["actor/clipfrac"] > 0


def test_kl_holds_the_policy_back(settings: TrainerSettings) -> None:
    free, _ = train_bandit(settings, 8)
    held, metrics = train_bandit(changed(settings, kl_coef=5.0), 8)
    assert wanted_probability(held) < 0.5 * wanted_probability(free)
    assert metrics[0]["actor/kl_ref"] == pytest.approx(0, abs=1e-9)
    assert metrics[-1]["actor/kl_ref"] > 0


def test_warm_up_rises_linearly(settings: TrainerSettings) -> None:
    _, metrics = train_bandit(changed(settings, warmup_steps=4), 6)
    assert [step["actor/lr"] for step in metrics] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("linear", [0.01, 0.0075, 0.005, 0.0025]), ("cosine", [0.01, 0.0085355, 0.005, 0.0014645])],
)
def test_the_learning_rate_falls_to_zero_over_the_steps(
    settings: TrainerSettings, decay: Literal["linear", "cosine"], expected: list[float]
) -> None:
    _, metrics = train_bandit(changed(settings, lr_decay=decay, steps=4), 4)
    assert [step["actor/lr"] for step in metrics] == pytest.approx(expected, rel=1e-4)


def test_steps_run_in_order_only(settings: TrainerSettings) -> None:
    trainer, _ = train_bandit(settings, 2)
    for step, text in ((1, "step 1 was already trained on"), (3, "step 3 is ahead")):
        with pytest.raises(TrainerError, match=f"{text}.*version 2; send the batch of step 2"):
            trainer.train_step(make_batch(step, []))
    assert trainer.version == 2


def test_batch_without_a_sampled_token_is_a_step(settings: TrainerSettings) -> None:
    trainer = SingleTrainer(settings)
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}
    result = trainer.train_step(make_batch(0, [make_sample("g", [1, 2], [0, 0])]))
    assert result.version == 1
    assert result.metrics["perf/tokens"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_tensors().items())


OVERFLOW = make_sample("g", [1, 2], [0, 1], advantage=1e30)
"""Its loss is finite, its gradient's norm is not."""


def test_overflow_skips_the_update(settings: TrainerSettings) -> None:
    trainer = SingleTrainer(changed(settings, correction="decoupled"))
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}
    result = trainer.train_step(make_batch(0, [OVERFLOW]))
    assert result.metrics["actor/skipped_updates"] == 1
    assert result.version == 1
    assert result.set_aside == ()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_tensors().items())


@pytest.mark.parametrize("bf16", [False, True])
def test_nothing_of_a_skipped_update_stays(settings: TrainerSettings, bf16: bool) -> None:
    """The step after it moves the weights as if there had been none."""
    good = random_samples(3, 6)
    settings = changed(settings, bf16=bf16, correction="decoupled")
    after, alone = SingleTrainer(settings), SingleTrainer(settings)
    after.train_step(make_batch(0, [OVERFLOW]))
    alone.train_step(make_batch(0, []))
    found, expected = after.train_step(make_batch(1, good)), alone.train_step(make_batch(1, good))
    assert found.metrics["actor/skipped_updates"] == 0
    assert found.metrics["actor/grad_norm"] == expected.metrics["actor/grad_norm"]
    assert all(torch.equal(tensor, alone.named_tensors()[name]) for name, tensor in after.named_tensors().items())


def test_step_that_fails_between_updates_needs_a_restore(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = SingleTrainer(changed(settings, updates_per_step=2))
    update, calls = trainer.optimizer.update, iter(range(2))

    def second_fails(lr: float) -> None:
        if next(calls) == 1:
            raise RuntimeError("the device is lost")
        update(lr)

    monkeypatch.setattr(trainer.optimizer, "update", second_fails)
    with pytest.raises(RuntimeError):
        trainer.train_step(make_batch(0, random_samples(0, 8)))
    for call in (lambda: trainer.train_step(make_batch(0, [])), trainer.save):
        with pytest.raises(TrainerError, match="restore first"):
            call()
    monkeypatch.undo()
    trainer.restore("")
    assert trainer.train_step(make_batch(0, random_samples(0, 8))).version == 1


def test_current_and_previous_version_can_be_published_again(settings: TrainerSettings) -> None:
    trainer, _ = train_bandit(settings, 1)
    trainer.publish(0, initial := MemoryStore())
    fresh = SingleTrainer(settings).named_tensors()
    assert all(torch.equal(initial.pushed[0][1][name], tensor) for name, tensor in fresh.items())
    store = MemoryStore()
    assert trainer.publish(1, store).version == 1
    live = {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}
    trainer.train_step(make_batch(1, bandit_batch(trainer, 1)))
    trainer.publish(1, store)
    trainer.publish(2, store)
    trainer.publish(1, store)
    for version in (0, 3):
        with pytest.raises(TrainerError, match=rf"version {version} is not held.*held: \[1, 2\]"):
            trainer.publish(version, store)
    assert [version for version, _ in store.pushed] == [1, 1, 2, 1]
    for at, weights in ((0, live), (1, live), (2, trainer.named_tensors()), (3, live)):
        assert all(torch.equal(store.pushed[at][1][name], tensor) for name, tensor in weights.items())
    assert any(not torch.equal(live[name], tensor) for name, tensor in trainer.named_tensors().items())


@pytest.mark.parametrize("bf16", [False, True])
def test_restore_continues_bit_for_bit(settings: TrainerSettings, bf16: bool) -> None:
    settings = changed(settings, bf16=bf16, warmup_steps=6, weight_decay=0.01)
    batches = [make_batch(step, random_samples(step, 12)) for step in range(6)]
    straight = SingleTrainer(settings)
    for batch in batches[:3]:
        straight.train_step(batch)
    reference = straight.save()
    rest = [straight.train_step(batch).metrics for batch in batches[3:]]
    resumed = SingleTrainer(settings)
    resumed.train_step(make_batch(0, random_samples(99, 4)))  # what it did before must not matter
    assert resumed.restore(reference) == 3
    again = [resumed.train_step(batch).metrics for batch in batches[3:]]
    for one, other in zip(rest, again, strict=True):
        assert {k: v for k, v in one.items() if k[:6] == "actor/"} == {
            k: v for k, v in other.items() if k[:6] == "actor/"
        }
    for name, tensor in straight.named_tensors().items():
        assert torch.equal(tensor, resumed.named_tensors()[name])
    for name, tensor in straight.optimizer.tensors().items():
        assert torch.equal(tensor, resumed.optimizer.tensors()[name])


def test_restore_of_nothing_is_the_beginning(settings: TrainerSettings) -> None:
    trainer, _ = train_bandit(settings, 2)
    assert trainer.restore("") == 0
    fresh = SingleTrainer(settings).named_tensors()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in trainer.named_tensors().items())
    with pytest.raises(TrainerError, match=r"checkpoint /nowhere: no trainer.json there; give"):
        trainer.restore("/nowhere")


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_is_a_hugging_face_directory(settings: TrainerSettings, tmp_path: Path, tied: bool) -> None:
    path = tiny_model(tmp_path / "model", tied=tied)
    trainer, _ = train_bandit(trainer_settings(path, settings.out, lr=1e-2), 1)
    saved = Path(trainer.save())
    assert saved.name == "step-00000001"
    assert (saved / "model" / "tokenizer.json").read_text() == "{}"
    loaded = AutoModelForCausalLM.from_pretrained(saved / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trainer.named_tensors().items())
    assert not list(saved.rglob("*.bin")) + list(saved.rglob("*.pt")) + list(saved.rglob("*.pkl"))


def test_old_checkpoints_go_and_the_needed_ones_stay(settings: TrainerSettings) -> None:
    root = settings.checkpoint_dir

    def names() -> list[str]:
        return sorted(path.name for path in root.iterdir())

    trainer = SingleTrainer(settings)
    for step in range(3):
        trainer.save()
        trainer.train_step(make_batch(step, random_samples(step, 2)))
    assert names() == ["step-00000001", "step-00000002"]
    # The coordinator committed step 1 only, then all was killed: step 1 must outlive the next save of step 2.
    resumed = SingleTrainer(settings)
    resumed.restore(str(root / "step-00000001"))
    resumed.train_step(make_batch(1, random_samples(1, 2)))
    assert Path(resumed.save()).name == "step-00000002.1"
    assert names() == ["step-00000001", "step-00000002.1"]


def test_save_cut_short_leaves_no_checkpoint(settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = train_bandit(settings, 1)
    root = settings.checkpoint_dir

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_json", fails)
    with pytest.raises(StoreFull, match=r"step-00000001: .*No space left"):
        trainer.save()
    assert not list(root.iterdir()), "a part of one takes the room that is missing"
    monkeypatch.undo()
    trainer.save()
    assert [path.name for path in root.iterdir()] == ["step-00000001"]


def test_bf16_updates_too_small_for_bf16_add_up(settings: TrainerSettings) -> None:
    """Each update is far below bfloat16's resolution; the float32 masters keep them all."""
    trainer = SingleTrainer(changed(settings, bf16=True, lr=1e-5))
    before = trainer.optimizer.tensors()["master/model.norm.weight"].clone()
    for step in range(5):
        trainer.train_step(make_batch(step, random_samples(0, 8)))
    after = trainer.optimizer.tensors()["master/model.norm.weight"]
    assert trainer.named_tensors()["model.norm.weight"].dtype == torch.bfloat16
    assert torch.equal(trainer.named_tensors()["model.norm.weight"], before.bfloat16())
    assert float((after - before).abs().max()) == pytest.approx(5e-5, rel=0.1)


class SlowStore(MemoryStore):
    """Waits in the middle of a push until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.go = threading.Event(), threading.Event()

    def push(self, version: int, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> WeightManifest:
        self.started.set()
        assert self.go.wait(30)
        return super().push(version, tensors)


def test_each_thread_is_told_which_gpu_it_works_on(settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the update would not wait until the weights are copied: on the first GPU there is nothing to wait for."""
    told: list[tuple[str, torch.device]] = []
    second = torch.device("cuda:1")
    core = SingleTrainer(settings)
    monkeypatch.setattr(core, "device", second)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: told.append((threading.current_thread().name.partition("_")[0], device)),
    )

    async def main() -> None:
        port = AsyncTrainer(core, MemoryStore())
        await port.publish(0)
        await port.train_step(make_batch(0, random_samples(0, 8)))
        port.close()

    asyncio.run(main())
    assert told == [("publish", second), ("train", second)]
    monkeypatch.setattr(single, "device_named", lambda name: second)
    monkeypatch.setattr(single, "load_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        SingleTrainer(settings)
    assert told[2:] == [("MainThread", second)]


def test_port_publishes_beside_the_next_step(settings: TrainerSettings) -> None:
    async def scenario() -> None:
        core, store = SingleTrainer(settings), SlowStore()
        adapter = AsyncTrainer(core, store)
        trainer: Trainer = adapter
        await trainer.train_step(make_batch(0, random_samples(0, 4)))
        expected = {name: tensor.clone() for name, tensor in core.named_tensors().items()}
        push = asyncio.create_task(trainer.publish(1))
        await asyncio.to_thread(store.started.wait, 30)
        result = await trainer.train_step(make_batch(1, random_samples(1, 4)))
        assert result.version == 2
        assert not push.done()
        store.go.set()
        assert (await push).version == 1
        assert all(torch.equal(store.pushed[0][1][name], tensor) for name, tensor in expected.items())
        assert await trainer.restore(await trainer.save()) == 2
        with pytest.raises(TrainerError, match="step 7 is ahead"):
            await trainer.train_step(make_batch(7, []))
        adapter.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("train", [{}, {"bf16": True}, {"bf16": True, "recompute": "full"}], ids=str)
def test_a_restore_holds_one_network_and_optimizer_at_a_time(
    train: dict[str, Any], settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = SingleTrainer(changed(settings, **train))
    trainer.train_step(make_batch(0, random_samples(0, 4)))
    trainer.publish(0, MemoryStore())
    reference = trainer.save()
    network = [weakref.ref(parameter) for parameter in trainer.network.parameters()]
    moments = [weakref.ref(one) for name, one in trainer.optimizer.tensors().items() if name.startswith("exp_avg/")]
    load, alive = load_model, []

    def watched(*arguments: Any) -> Any:
        alive.append([sum(one() is not None for one in kind) for kind in (network, moments)])
        return load(*arguments)

    monkeypatch.setattr(single, "load_model", watched)
    assert network
    assert moments
    assert trainer.restore(reference) == 1
    assert alive == [[0, 0]]


def test_a_restore_that_fails_leaves_no_weights_and_another_one_helps(settings: TrainerSettings) -> None:
    trainer = SingleTrainer(settings)
    trainer.train_step(make_batch(0, random_samples(0, 4)))
    reference = Path(trainer.save())
    (reference / "optimizer.safetensors").write_bytes(b"damaged")
    with pytest.raises(Exception, match="Error while deserializing"):
        trainer.restore(str(reference))
    for use in (
        lambda: trainer.train_step(make_batch(1, [])),
        lambda: trainer.publish(1, MemoryStore()),
        lambda: trainer.save(),
    ):
        with pytest.raises(TrainerError, match=r"holds no weights.*restore"):
            use()
    assert trainer.restore("") == 0
    assert trainer.train_step(make_batch(0, random_samples(0, 4))).version == 1


def test_the_optimizer_is_read_tensor_by_tensor(settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SingleTrainer(settings)
    trainer.train_step(make_batch(0, random_samples(0, 4)))
    reference, expected = trainer.save(), {name: one.clone() for name, one in trainer.optimizer.tensors().items()}
    alive, peak = [0], [0]
    read = StoredTensors.__getitem__

    def gone() -> None:
        alive[0] -= 1

    def counted(saved: StoredTensors, name: str) -> Tensor:
        tensor = read(saved, name)
        alive[0] += 1
        peak[0] = max(peak[0], alive[0])
        weakref.finalize(tensor, gone)
        return tensor

    monkeypatch.setattr(StoredTensors, "__getitem__", counted)
    trainer.restore(reference)
    assert 1 <= peak[0] <= 6, "the three moments of one weight, and of the one before it"
    for name, tensor in trainer.optimizer.tensors().items():
        assert torch.equal(tensor, expected[name])


def test_a_warm_up_for_which_there_is_no_room_holds_nothing_of_it(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next one would have no room either, and the device would not get its memory back."""
    trainer = SingleTrainer(settings)
    updater = trainer.updater
    plainly, graphs, freed = updater.scorer, weakref.WeakSet[Any](), []

    class NoRoom:
        def __call__(self, gradient: torch.Tensor) -> None:
            raise torch.OutOfMemoryError

    def scorer(*given: Any) -> Any:
        scores, hook = plainly(*given), NoRoom()
        graphs.add(hook)
        scores.logprobs_T.register_hook(hook)
        return scores

    monkeypatch.setattr(updater, "scorer", scorer)
    monkeypatch.setattr(updater.optimizer, "zero", lambda: freed.append(len(graphs)))
    updater.warm_up()
    assert freed == [0] * 5, "after each of four, and at the end"
    assert all(param.grad is None for param in trainer.network.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # they would end the compiling
@pytest.mark.parametrize("updates", [1, 2])
def test_layers_are_compiled_before_the_first_step(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    """For sequences with a beginning in common and for others, and what the updates of a step need of its beginning;
    and the weights are as they were."""
    monkeypatch.setattr(network, "flash_runs", lambda *_: True)  # whose kernels have a form for CPUs
    given = trainer_settings(model_path, tmp_path, compile="on", microbatch_tokens=1024, updates_per_step=updates)
    stats = counters["stats"]
    before = stats["unique_graphs"]
    trainer = SingleTrainer(given)
    compiled = stats["unique_graphs"]
    assert compiled >= before + 2 * updates
    initial = load_model(model_path).state_dict()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in trainer.named_tensors().items())
    together = [
        make_sample("g", [7] * 70 + [member] * (member + 2), [0] * 71 + [1] * (member + 1), member=member)
        for member in range(1, 6)
    ]
    for step, samples in enumerate((random_samples(1, 40), together, random_samples(2, 50))):
        trainer.train_step(make_batch(step, samples))
    assert stats["unique_graphs"] == compiled

"""LoRA: only adapters are trained and published, engines merge them exactly, peft's format goes in and out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollart.config.load import build_job
from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.errors import JobError, WeightError
from rollart.launch.checks import check_supported
from rollart.model.adapters import SCALING, Lora, adapter_tensors, add_adapters, read_adapters
from rollart.model.network import load_model, load_weights_, named_weights, packed_logprobs
from rollart.store.shm import ShmStore
from rollart.train.settings import TrainerSettings
from rollart.train.single import SingleTrainer
from tests.train.samples import VOCAB, make_batch, random_samples, tiny_model
from tests.train.settings import changed, job_of, trainer_settings

LORA = {"rank": 3, "alpha": 5.0, "targets": ["q_proj", "down_proj"]}
TOKENS, LENGTHS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)), (25, 15)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(model_path: Path, tmp_path: Path) -> TrainerSettings:
    return trainer_settings(model_path, tmp_path, lr=1e-2, lora=LORA)


def train(trainer: SingleTrainer, steps: int) -> None:
    for _ in range(steps):
        trainer.train_step(make_batch(trainer.version, random_samples(trainer.version, 6)))


def logprobs(model: Any) -> Tensor:
    with torch.no_grad():
        return packed_logprobs(model, TOKENS, LENGTHS)


def test_adapters_alone_are_trained_and_published(settings: TrainerSettings, model_path: Path) -> None:
    trainer = SingleTrainer(settings)
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}
    assert all(float(tensor.abs().max()) == 0 for name, tensor in before.items() if name.endswith("lora_B"))
    train(trainer, 2)
    after = trainer.named_tensors()
    assert {name.rpartition(".")[2] for name in after} == {"lora_A", "lora_B", SCALING}
    assert len(after) == 2 * 2 * 2 + 1, "two layers of two targets, and the factor"
    assert not any(torch.equal(after[name], before[name]) for name in after if name != SCALING)
    base = named_weights(load_model(model_path))
    own = {name: tensor for name, tensor in named_weights(trainer.network).items() if name in base}
    torch.testing.assert_close(own, base, atol=0, rtol=0)
    assert {name.partition("/")[2].rpartition(".")[2] for name in trainer.optimizer.tensors()} == {"lora_A", "lora_B"}


def test_an_engine_that_merged_adapters_says_what_the_trainer_says(
    settings: TrainerSettings, model_path: Path, tmp_path: Path
) -> None:
    """Through a store, as in a run; after versions in any order, without drift."""
    trainer, store = SingleTrainer(settings), ShmStore("lora-test", root=tmp_path)
    engine = EmbeddedEngine(load_model(model_path), settings=EngineSettings(), eos=frozenset())
    initial = logprobs(engine.model)
    published: dict[int, Mapping[str, Tensor]] = {}
    said: dict[int, Tensor] = {}
    try:
        for version in (0, 1, 2):
            train(trainer, version - trainer.version)
            published[version] = {name: t.clone() for name, t in store.fetch(trainer.publish(version, store)).items()}
            said[version] = logprobs(trainer.network)
    finally:
        store.close()
    assert float((said[2] - said[0]).abs().max()) > 0.01, "it learns something"
    for version in (0, 2, 1, 2, 1, 0):
        engine.swap(version, published[version])
        torch.testing.assert_close(logprobs(engine.model), said[version], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(logprobs(engine.model), initial, atol=0, rtol=0)


def test_other_weights_are_a_new_base(model_path: Path, tmp_path: Path) -> None:
    """Adapters that come after whole weights are merged into those."""
    first, second = load_model(model_path), load_model(tiny_model(tmp_path, seed=1))
    adapted = load_model(tmp_path)
    add_adapters(adapted, Lora(rank=2, alpha=4.0, targets=("q_proj",)))
    tensors = {name: torch.randn_like(tensor) for name, tensor in adapter_tensors(adapted).items()}
    load_weights_(first, tensors)
    load_weights_(first, named_weights(second))
    load_weights_(first, tensors)
    load_weights_(second, tensors)
    torch.testing.assert_close(named_weights(first), named_weights(second), atol=0, rtol=0)


def test_adapters_that_do_not_fit_change_nothing(model_path: Path) -> None:
    model = load_model(model_path)
    before = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    name = "model.layers.1.self_attn.q_proj"
    shape = (16, 16)
    for first, second, where in ((3, 3, "nowhere"), (3, 4, name), (3, None, name)):
        tensors = {SCALING: torch.ones(1), f"{where}.lora_A": torch.ones(first, shape[1])}
        if second is not None:
            tensors[f"{where}.lora_B"] = torch.ones(shape[0] + second - first, first)
        with pytest.raises(WeightError, match=where):
            load_weights_(model, tensors)
    torch.testing.assert_close(named_weights(model), before, atol=0, rtol=0)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_holds_adapters_and_continues_bit_for_bit(
    bf16: bool, settings: TrainerSettings, model_path: Path
) -> None:
    settings = changed(settings, bf16=bf16)
    trainer = SingleTrainer(settings)
    train(trainer, 2)
    reference = trainer.save()
    files = {path.name for path in (Path(reference) / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} <= files
    assert "model.safetensors" not in files
    train(trainer, 2)
    again = SingleTrainer(settings)
    assert again.restore(reference) == 2
    train(again, 2)
    torch.testing.assert_close(again.named_tensors(), trainer.named_tensors(), atol=0, rtol=0)


def test_a_directory_of_adapters_is_a_model_and_a_beginning(settings: TrainerSettings, model_path: Path) -> None:
    """As one of peft's: names, and what its config says."""
    trainer = SingleTrainer(settings)
    train(trainer, 2)
    folder = Path(trainer.save()) / "model"
    torch.testing.assert_close(logprobs(load_model(folder)), logprobs(trainer.network), atol=2e-6, rtol=1e-5)
    written = load_file(folder / "adapter_model.safetensors")
    assert written["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (3, 16)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 5.0, str(model_path))
    begun = SingleTrainer(changed(settings, lora=LORA | {"adapter": str(folder)}))
    torch.testing.assert_close(begun.named_tensors(), trainer.named_tensors(), atol=0, rtol=0)
    with pytest.raises(JobError, match="rank=4"):
        SingleTrainer(changed(settings, lora=LORA | {"adapter": str(folder), "rank": 4}))
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(JobError, match="use_dora"):
        read_adapters(folder)


def test_what_cannot_act_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"train.lora: .*fsdp2"):
        job_of(model_path, type="fsdp2", lora={})
    job = build_job(job_of(model_path, engines="sglang", lora={}).model_dump())
    with pytest.raises(JobError, match=r"train.lora: sglang engines"):
        check_supported(job)
    with pytest.raises(JobError, match=r"no linear layer 'nope'; it has down_proj, gate_proj"):
        SingleTrainer(trainer_settings(model_path, tmp_path, lora={"targets": ["nope"]}))


@pytest.mark.filterwarnings("ignore")
def test_peft_reads_ours_and_we_read_peft_s(settings: TrainerSettings, model_path: Path, tmp_path: Path) -> None:
    """Where peft is installed; no extra of ours asks for it."""
    peft: Any = pytest.importorskip("peft")

    def said(model: Any) -> Tensor:
        with torch.no_grad():
            logits = model(TOKENS[None]).logits[0]
        return logits.log_softmax(-1)[:-1].gather(1, TOKENS[1:, None])[:, 0]

    def ours(model: Any) -> Tensor:
        with torch.no_grad():
            return packed_logprobs(model, TOKENS, [len(TOKENS)])[1:]

    trainer = SingleTrainer(settings)
    train(trainer, 2)
    base = AutoModelForCausalLM.from_pretrained(model_path)
    read = peft.PeftModel.from_pretrained(base, str(Path(trainer.save()) / "model")).eval()
    torch.testing.assert_close(said(read), ours(trainer.network), atol=2e-6, rtol=1e-5)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=LORA["targets"])
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), config).eval()
    for name, param in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1)
    made.save_pretrained(tmp_path / "theirs")
    begun = SingleTrainer(changed(settings, lora=LORA | {"adapter": str(tmp_path / "theirs")}))
    torch.testing.assert_close(ours(begun.network), said(made), atol=2e-6, rtol=1e-5)

"""The whole loop learns: coordinator, embedded engine, trainer and weight store of a real job, on a bandit.

The control has every advantage set to zero: what then rises was not learnt from rewards.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import build_job
from tests import bandit_tasks
from tests.bandit_tasks import ANSWERS, LETTERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS = 50
SHOWN = 5
"""Steps at the beginning and at the end whose success is compared."""
CHANCE, LEARNT = 0.25, 0.5
"""One word in 19 is right, and steps that are not trained on yet may be learnt from already."""


def save_model(path: Path, seed: int) -> None:
    """A Qwen3 of 19 words with random weights."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from rollart_recipes.tiny import CHAT_TEMPLATE, END, PAD, ROLES, UNKNOWN

    words = [PAD, UNKNOWN, END, *ROLES, *LETTERS, *ANSWERS]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, additional_special_tokens=[*ROLES]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)


def success(folder: Path, seed: int = 0) -> list[float]:
    """Of the trajectories that ended before each step, in a run of the bandit."""
    from rollart.launch.training import train

    save_model(folder / "model", seed)
    raw: dict[str, Any] = {
        "name": "bandit",
        "seed": seed,
        "model": {"path": str(folder / "model"), "context_tokens": 32},
        "tasks": [
            {"name": "bandit", "use": str(bandit_tasks.__file__), "group_size": 8, "max_turns": 1, "max_tokens": 1}
        ],
        "rollout": {"groups_per_step": 8, "zero_variance": "keep"},
        "pools": [
            {"name": "cpu", "engines": {"max_batch": 64, "kv_tokens": 4096}},
            {"name": "environments", "slots": 64, "isolation": "inline"},
        ],
        "train": {"pool": "cpu", "steps": STEPS, "lr": 1.0e-2, "lr_decay": "linear", "entropy_coef": 0.02},
        "weights": {"bucket_mb": 1},
        "checkpoint": {"every": STEPS},
        "cluster": {"type": "inline"},
    }
    result = train(build_job(raw), folder / "run")
    assert result.summary.state == "finished", result.summary.reason
    assert result.violations == []
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    # A step before which no trajectory ended has no mean.
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_success_rises(tmp_path: Path) -> None:
    """By seed 0 to 4, from 0.05 to 0.13 at first to 0.75 to 0.96 at last."""
    rates = success(tmp_path)
    assert mean(rates[:SHOWN]) < CHANCE
    assert mean(rates[-SHOWN:]) > LEARNT


def test_nothing_is_learnt_without_advantages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.control.groups.advantages", lambda rewards, kind: (0.0,) * len(rewards))
    rates = success(tmp_path)
    assert max(mean(rates[:SHOWN]), mean(rates[-SHOWN:])) < CHANCE

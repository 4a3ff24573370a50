"""A whole job on a vLLM server that it starts itself: it trains, swaps with proof, and leaves no process behind."""

from pathlib import Path

import pytest
import torch

from rollart.config.load import load_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.training import train
from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer
from tests.vllm_python import HEAD_SIZE, PYTHON, ROOT, needs_vllm, none_left_in


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(
    ("more", "mismatch"),
    [
        (["weights.type=files", "pools.0.engines.dtype=float32"], 1e-6),
        (["pools.0.engines.dtype=bfloat16", "pools.0.engines.keep_kv=true"], 1e-2),
        (["train.lora={rank: 4, alpha: 8}"], 1e-6),
    ],
    ids=["files", "bfloat16-kept", "lora"],
)
def test_a_job_on_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], mismatch: float) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    save(tiny_model(len(tokenizer), head_size=HEAD_SIZE), tmp_path / "model")
    overrides = [
        f"model.path={tmp_path / 'model'}",
        f"pools.0.engines.python={PYTHON}",
        *more,
        "train.steps=3",
        "rollout.groups_per_step=3",
        "rollout.zero_variance=keep",  # a random model earns nothing: the entropy term alone moves the weights
        "tasks.0.max_turns=4",
    ]
    result = train(load_job(ROOT / "jobs" / "vllm.yaml", overrides), tmp_path / "run")
    assert result.summary.state == "finished"
    assert not result.violations
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    kinds = [type(event) for event in events]
    assert schema.EngineDown not in kinds
    assert {event.version for event in events if isinstance(event, schema.EngineSwap)} >= {1, 2}
    first = next(event for event in events if isinstance(event, schema.StepEnd))
    mismatched = first.metrics["actor/kl_mismatch"]
    assert mismatched is not None
    assert abs(mismatched) < mismatch, "the engine's log-probabilities are the trainer's"
    assert not list((tmp_path / "run" / "weights").glob("*/v*")), "the store was closed"
    none_left_in(tmp_path)

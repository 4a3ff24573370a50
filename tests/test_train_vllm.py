"""A whole job on a vLLM server that it starts itself: it trains, swaps with proof, and leaves no process behind."""

import os
import time
from pathlib import Path

import pytest
import torch

from rollart.config.load import load_job
from rollart.engines.launch import PYTHON_VARIABLES
from rollart.events import read_events
from rollart.models.tiny import save, tiny_model, tiny_tokenizer
from rollart.training import train

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get(PYTHON_VARIABLES["vllm"]) or str(ROOT / ".venv-vllm" / "bin" / "python")


@pytest.mark.slow
@pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no vLLM: {PYTHON} is not there; `make .venv-vllm` makes it")
def test_a_job_on_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    save(tiny_model(len(tokenizer), head_size=32), tmp_path / "model")
    overrides = [
        f"model.path={tmp_path / 'model'}",
        f"pools.0.engines.python={PYTHON}",
        "train.steps=3",
        "rollout.groups_per_step=3",
        "rollout.zero_variance=keep",  # a random model earns nothing: the entropy term alone moves the weights
        "tasks.0.max_turns=4",
    ]
    result = train(load_job(ROOT / "jobs" / "vllm.yaml", overrides), tmp_path / "run")
    assert result.summary["state"] == "finished"
    assert not result.violations
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    kinds = [event["e"] for event in events]
    assert "engine.down" not in kinds
    assert {event["version"] for event in events if event["e"] == "engine.swap"} >= {1, 2}
    first = next(event for event in events if event["e"] == "step.end")
    assert abs(first["metrics"]["actor/kl_mismatch"]) < 1e-6, "the engine's log-probabilities are the trainer's"
    assert not list((tmp_path / "run" / "weights").glob("*/v*")), "the store was closed"
    until = time.monotonic() + 30.0  # the guard lets the server end by itself first
    while _servers(tmp_path / "model") and time.monotonic() < until:
        time.sleep(0.2)
    assert not _servers(tmp_path / "model")


def _servers(model: Path) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(model).encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""

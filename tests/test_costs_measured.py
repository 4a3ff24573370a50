"""Predicted against measured, for every kind of cost that is used: docs/evaluation.md prints this table.

Sources: `gpu` is docs/gpu.md and docs/train.md (one H200, measured by this project); `ml.energy` is the ML.ENERGY
leaderboard (vLLM of 2025 on H100, median inter-token latency, LM-Arena chat); `sily` is silybench-data
(vLLM 0.30 on one H100, random prompts of 128 and 2,048); `qwen` is Qwen's speed benchmark (SGLang 0.4.6 on one H20).
"""

import pytest

from benchmarks.anchors import ANCHORS, Anchor, error
from rollart.hardware import HARDWARE, MODELS, train_costs
from scripts import evaluation

CLOSE = 0.15


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: f"{anchor.source}: {anchor.what}")
def test_predicted_as_measured(anchor: Anchor) -> None:
    assert abs(error(anchor)) < CLOSE


def test_the_page_has_this_table() -> None:
    page = evaluation.PAGE.read_text()
    assert evaluation.anchors() in page, "run python -m scripts.evaluation"


def test_a_small_model_loses_more_of_its_training_to_tensor_parallelism_than_a_large_one() -> None:
    """Eight H800 over links of 200 GB/s. 8B: 6 all-reduces of 8 kB in 36 layers, 1.75 times over the link, are 15.5 us
    a token; its products are 4 times 15.1 GFLOP, 10.9 us on eight."""

    def token_s(model: str, tensor: int) -> float:
        return train_costs(MODELS[model], HARDWARE["h800"], 8, tensor=tensor).token_s

    sent_s = token_s("qwen3-8b", 8) - token_s("qwen3-8b", 1)
    assert sent_s == pytest.approx(6 * 36 * 8192 * 1.75 / 200e9, rel=1e-6)
    slower = {model: token_s(model, 8) / token_s(model, 1) for model in ("qwen3-8b", "qwen3-14b", "qwen3-32b")}
    assert slower["qwen3-8b"] > slower["qwen3-14b"] > slower["qwen3-32b"] > 1.2
    assert token_s("qwen3-8b", 1) < token_s("qwen3-8b", 4) < token_s("qwen3-8b", 8)

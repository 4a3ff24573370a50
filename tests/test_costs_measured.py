"""Predicted against measured, for every kind of cost that is used: docs/evaluation.md prints this table.

Sources: `gpu` is docs/gpu.md and docs/train.md (one H200, measured by this project); `ml.energy` is the ML.ENERGY
leaderboard (vLLM of 2025 on H100, median inter-token latency, LM-Arena chat); `sily` is silybench-data
(vLLM 0.30 on one H100, random prompts of 128 and 2,048); `qwen` is Qwen's speed benchmark (SGLang 0.4.6 on one H20).
"""

import pytest

from benchmarks.anchors import ANCHORS, Anchor, error
from scripts import evaluation

CLOSE = 0.15


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: f"{anchor.source}: {anchor.what}")
def test_predicted_as_measured(anchor: Anchor) -> None:
    assert abs(error(anchor)) < CLOSE


def test_the_page_has_this_table() -> None:
    page = evaluation.PAGE.read_text()
    assert evaluation.anchors() in page, "run python -m scripts.evaluation"

"""A model made once for all tests here."""

from pathlib import Path

import pytest

from rollart_recipes.tiny import make_tiny
from tests.cluster.small import WARMUP_STEPS
from tests.vllm_python import HEAD_SIZE


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(path, warmup_steps=WARMUP_STEPS, head_size=HEAD_SIZE)
    return path

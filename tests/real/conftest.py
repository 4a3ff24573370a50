"""These tests need the `train` extra; without it there is nothing here to collect."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights: nothing here needs it to be good at anything."""
    from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(path)
    save(tiny_model(len(tokenizer)), path)
    return path

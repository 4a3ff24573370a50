"""What is looked up in the model directory before a run: exit code 2 means that nothing was written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.cli import main
from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.real import check_real
from tests.real.harness import job

POSITIONS = 1024
"""Of the tiny model."""


def long(model: Path, context_tokens: int, **engines: Any) -> dict[str, Any]:
    pool = {"name": "cpu", "engines": engines, "slots": 4}
    return job(model, pools=[pool]) | {"model": {"path": str(model), "context_tokens": context_tokens}}


def test_a_context_that_model_and_cache_can_hold_is_let_through(model: Path) -> None:
    check_real(build_job(long(model, POSITIONS, kv_tokens=POSITIONS)))


@pytest.mark.parametrize("engines", [{}, {"type": "vllm"}, {"type": "sglang"}])
def test_a_context_longer_than_the_model_is_refused(engines: dict[str, Any], model: Path) -> None:
    raw = long(model, POSITIONS + 1, **engines) | {"weights": {"type": "files"}}
    with pytest.raises(
        JobError, match=r"^model\.context_tokens: 1025 is more than the 1024 positions .*=1024 or less$"
    ):
        check_real(build_job(raw))


def test_the_positions_of_a_text_model_inside_another_are_found(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "nested")
    (tmp_path / "nested" / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 64}}))
    with pytest.raises(JobError, match="128 is more than the 64 positions"):
        check_real(build_job(long(tmp_path / "nested", 128)))


def test_a_context_longer_than_the_cache_is_refused(model: Path) -> None:
    text = r"^model\.context_tokens: 512 is more than pools\.cpu\.engines\.kv_tokens 511, .* or raise kv_tokens$"
    with pytest.raises(JobError, match=text):
        check_real(build_job(long(model, 512, kv_tokens=511)))


@pytest.mark.parametrize(
    "left_out", [["tokenizer.json", "tokenizer_config.json"], ["chat_template.jinja"]], ids=["tokenizer", "template"]
)
def test_a_model_without_its_tokenizer_leaves_no_run_directory(
    left_out: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "model", ignore=lambda *_: left_out)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(tmp_path / "model")))
    assert main(["train", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("rollart: model.path: the ")
    assert not (tmp_path / "run").exists()


def test_a_reference_that_is_no_model_is_refused(model: Path, tmp_path: Path) -> None:
    train = {"kl_coef": 0.1, "reference": str(tmp_path)}
    with pytest.raises(JobError, match=r"^train\.reference: .* has no config\.json"):
        check_real(build_job(job(model, train=train)))
    check_real(build_job(job(model, train={**train, "reference": str(model)})))

"""A judge as a pool of a real job, on embedded engines and on vLLM; a second job that uses the first one's judge; and
a judge on a vLLM server that is none of ours."""

import itertools
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.events import schema
from tests.real.harness import SOON_S, Run, job, running
from tests.vllm_python import HEAD_SIZE, PYTHON, needs_vllm, none_left_in

SAYS = "GRADE: 7"
RUBRIC = "Short is good."
EMBEDDED = {"count": 1, "max_batch": 16, "kv_tokens": 8192}
VLLM_STARTS_S = 600.0
"""30 s on two quiet cores, minutes on busy ones."""
VLLM = {"type": "vllm", "count": 1, "max_batch": 16, "python": PYTHON}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model whose layers add nothing: after each token it says the one that follows it in SAYS; the grade is 3
    as often as 7."""
    from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

    path = tmp_path_factory.mktemp("judge")
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    tokenizer = tiny_tokenizer(letters)
    tokenizer.save_pretrained(path)
    config = tiny_model(len(tokenizer), HEAD_SIZE).config  # vLLM takes no smaller heads
    config.hidden_size, config.max_position_embeddings = 512, 4096
    assert config.hidden_size >= len(tokenizer)
    model = type(tiny_model(len(tokenizer)))(config)
    ids = tokenizer.get_vocab()
    chain = ["<|assistant|>", *SAYS, "<|end|>"]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(config.vocab_size, config.hidden_size))
        model.lm_head.weight.zero_()
        for now, after in itertools.pairwise(chain):
            model.lm_head.weight[ids[after], ids[now]] = 3.0
        model.lm_head.weight[ids["3"], ids[" "]] = 3.0
        model.lm_head.weight[ids["<|end|>"], ids["3"]] = 3.0
    save(model, path)
    return path


def judged(policy: Path, **rewards: Any) -> dict[str, Any]:
    raw = job(policy, rewards={"type": "judge", "rubric": RUBRIC, "votes": 2, "max_tokens": 16, **rewards})
    raw["train"]["steps"] = 3
    return raw


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def was_judged(run: Run) -> None:
    """To its end, by the model that says GRADE: 7 and GRADE: 3."""
    assert run.wait() == 0, run.said
    told = run.ended_well(3)["reward"]
    assert told["judges"]["rewards"]["graded"] >= 3 * 4 * 4
    assert told["given_up"] == 0
    values = {event.value for event in run.events() if isinstance(event, schema.Reward)}
    assert values <= {0.3, 0.5, 0.7}
    assert len(values) > 1


@pytest.mark.slow
@pytest.mark.parametrize("engines", [EMBEDDED, pytest.param(VLLM, marks=needs_vllm)], ids=["embedded", "vllm"])
def test_a_job_with_a_judge_and_another_that_shares_it(
    model: Path, judge: Path, engines: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    port = free_port()
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    raw = judged(model, pool="judge")
    raw["train"]["steps"] = 1000  # until it is stopped
    listens = {"path": str(judge), "context_tokens": 2048, "listen": f"127.0.0.1:{port}"}
    raw["pools"].append({"name": "judge", "judge": listens, "engines": engines})
    with running(first, raw) as serves:
        serves.step(1, VLLM_STARTS_S)
        with running(second, judged(model, url=f"http://127.0.0.1:{port}/v1", model="judge")) as asks:
            was_judged(asks)
        assert serves.process is not None
        serves.process.terminate()
        serves.wait()
        swapped = {event.engine for event in serves.events() if isinstance(event, schema.EngineSwap)}
        assert swapped == {"cpu-0"}, "no swap reaches a judge"
        summary = serves.summary()
        assert summary["reward"]["given_up"] == 0
        assert summary["pools"]["judge"]["requests"] >= 2 * 4 * 4
        serves.nothing_remains()
    none_left_in(tmp_path)


@contextmanager
def vllm_serves(path: Path, port: int, folder: Path) -> Iterator[None]:
    """`python -m vllm.entrypoints.openai.api_server`, as its users start it."""
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    program = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "grader"]
    whole_prompts = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"]  # as docs/tasks.md says
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [*program, "--model", str(path), "--port", str(port), "--max-model-len", "2048", *whole_prompts],
            env={**environment, **offline},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        deadline_s = time.monotonic() + VLLM_STARTS_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, (folder / "vllm.log").read_text()[-3000:]
            assert time.monotonic() < deadline_s, (folder / "vllm.log").read_text()[-3000:]
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(SOON_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.slow
@needs_vllm
def test_a_judge_on_a_vllm_server_that_knows_nothing_of_us(model: Path, judge: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with vllm_serves(judge, port, tmp_path), running(tmp_path, judged(model, url=url, model="grader")) as asks:
        was_judged(asks)
    none_left_in(tmp_path)

"""A judge as a pool of a real job, on embedded engines; and a second job that uses the first one's judge."""

import itertools
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.events import schema
from tests.real.harness import job, running

SAYS = "GRADE: 7"
RUBRIC = "Short is good."


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model whose layers add nothing: after each token it says the one that follows it in SAYS; the grade is 3
    as often as 7."""
    from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

    path = tmp_path_factory.mktemp("judge")
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    tokenizer = tiny_tokenizer(letters)
    tokenizer.save_pretrained(path)
    config = tiny_model(len(tokenizer)).config
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


def judged(policy: Path, judge: Path, port: int, **rewards: Any) -> dict[str, Any]:
    raw = job(policy, rewards={"type": "judge", "rubric": RUBRIC, "votes": 2, "max_tokens": 16, **rewards})
    raw["train"]["steps"] = 3
    if "pool" in rewards:
        listens = {"path": str(judge), "context_tokens": 2048, "listen": f"127.0.0.1:{port}"}
        raw["pools"].append(
            {"name": "judge", "judge": listens, "engines": {"count": 1, "max_batch": 16, "kv_tokens": 8192}}
        )
    return raw


@pytest.mark.slow
def test_a_job_with_a_judge_and_another_that_shares_it(model: Path, judge: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    raw = judged(model, judge, port, pool="judge")
    raw["train"]["steps"] = 1000  # until it is stopped
    with running(first, raw) as serves:
        serves.step(1)
        with running(second, judged(model, judge, port, url=f"http://127.0.0.1:{port}/v1", model="judge")) as asks:
            assert asks.wait() == 0, asks.said
            told = asks.ended_well(3)["reward"]
        assert told["judges"]["rewards"]["graded"] >= 3 * 4 * 4
        assert told["given_up"] == 0
        values = {event.value for event in asks.events() if isinstance(event, schema.Reward)}
        assert values <= {0.3, 0.5, 0.7}
        assert len(values) > 1
        assert serves.process is not None
        serves.process.terminate()
        serves.wait()
        swapped = {event.engine for event in serves.events() if isinstance(event, schema.EngineSwap)}
        assert swapped == {"cpu-0"}, "no swap reaches a judge"
        summary = serves.summary()
        assert summary["reward"]["given_up"] == 0
        assert summary["pools"]["judge"]["requests"] >= 2 * 4 * 4
        serves.nothing_remains()

"""The tiny model: a normal directory, the same each time, that speaks the tasks in few tokens."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollart.cli import main
from rollart.errors import JobError
from rollart.model.tokenizer import ChatTokenizer
from rollart.tasks.api import as_observation
from rollart.tasks.load import load_task_set
from rollart_recipes.tiny import continue_warmup, make_tiny, pieces_of, tiny_tokenizer, vocabulary
from rollart_recipes.warmup import warm_up


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    losses: list[float] = []
    torch.set_num_threads(1)
    report = make_tiny(path, seed=5, warmup_steps=12, progress=lambda step, loss: losses.append(loss))
    assert (report.steps, len(losses)) == (12, 12)
    assert losses[-1] < 0.7 * losses[0]
    return path


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_any_hugging_face_tool_loads_it(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(str(tiny))
    tokenizer: Any = AutoTokenizer.from_pretrained(str(tiny))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(chat, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
    answer = model.generate(**prompt, max_new_tokens=4)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == ChatTokenizer(tiny).end_of_turn


def test_it_plays_in_the_terminal(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Qwen3ForCausalLM

    said = ChatTokenizer(tiny).encode("calc 1+1").tolist()
    seen: list[list[int]] = []

    def generate(model: Any, *, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return torch.cat([input_ids, torch.tensor([said])], dim=1)

    monkeypatch.setattr(Qwen3ForCausalLM, "generate", generate)
    assert main(["play", "rollart.tasks.guess_number", "--model", str(tiny), "--json"]) == 0
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert len(turns) == len(seen) > 2
    assert {turn["said"] for turn in turns} == {"calc 1+1"}
    for before, after in itertools.pairwise(seen):
        assert after[: len(before) + len(said)] == before + said, "what it said stays as it was"
    assert main(["play", "rollart.tasks.guess_number", "--model", str(tiny.parent)]) == 2
    assert "is not a Hugging Face directory" in capsys.readouterr().err


def test_the_same_seed_and_steps_make_the_same_model(tiny: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "again", seed=5, warmup_steps=12)
    assert same(tiny, tmp_path / "again")
    make_tiny(tmp_path / "other", seed=6, warmup_steps=1)
    assert not same(tiny, tmp_path / "other")


def test_the_warm_up_goes_on(tiny: Path, tmp_path: Path) -> None:
    report = continue_warmup(tiny, tmp_path / "more", seed=5, start_step=12, steps=2)
    assert report.steps == 2
    assert not same(tiny, tmp_path / "more")
    assert continue_warmup(tiny, tmp_path / "timed", seed=5, seconds=0.05).steps >= 1
    with pytest.raises(JobError, match="either steps or seconds"):
        warm_up(None, tiny)


@pytest.mark.parametrize("go_on", [False, True])
def test_an_interrupted_one_leaves_no_directory_and_can_be_made_again(tiny: Path, tmp_path: Path, go_on: bool) -> None:
    path, left = tmp_path / "model", tmp_path / "model.unfinished"

    def make(progress: Callable[[int, float], None] | None = None) -> None:
        if go_on:
            continue_warmup(tiny, path, steps=1, progress=progress)
        else:
            make_tiny(path, warmup_steps=1, progress=progress)

    def interrupt(step: int, loss: float) -> None:
        assert (left / "tokenizer.json").exists()
        assert not path.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(interrupt)
    assert list(tmp_path.iterdir()) == []
    left.mkdir()
    (left / "of one that was killed").touch()
    make()
    assert [found.name for found in tmp_path.iterdir()] == ["model"]
    assert {found.name for found in path.iterdir()} == {found.name for found in tiny.iterdir()}
    with pytest.raises(JobError, match=r"model: is not empty; give a new directory"):
        make()


def test_a_task_of_ones_own_is_what_it_is_warmed_up_on(tmp_path: Path) -> None:
    rows = [{"q": f"Größe {n}: how large is it?", "a": f"it is {n} metres"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "none.py").write_text(NO_PLAYER)
    words = [str(tmp_path / "model"), "--task"]
    job = {"path": str(tmp_path / "rows.jsonl"), "prompt": "q", "answer": "a"}
    own = load_task_set("rollart.tasks.dataset", job, domain="sizes")
    pieces = pieces_of([own])
    assert {" how", " metres", "ö", "ß"} <= set(pieces)
    report = make_tiny(tmp_path / "model", warmup_steps=3, tasks=[own])
    assert report.steps == 3
    tokenizer = ChatTokenizer(tmp_path / "model")
    text = own.task(0).payload["messages"][0]["content"]
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text, "letters that the plain one does not know"
    assert len(tokens) < len(text) / 2
    assert main(["model", "tiny", str(tmp_path / "other"), "--task", str(tmp_path / "none.py")]) == 2
    assert main(["model", "smollm2", *words, "rollart.tasks.guess_number"]) == 2


NO_PLAYER = """
from rollart.tasks.api import Environment, TaskSet, observe

class Said(Environment):
    def reset(self): return "Say something."
    def step(self, action): return observe(done=True)

class Tasks(TaskSet):
    def draw(self, rng): return {"n": rng.randint(0, 999)}
    def environment(self, task): return Said()
"""


def test_any_ascii_text_comes_back() -> None:
    tokenizer: Any = tiny_tokenizer()
    text = "Hello, (12+345)*6 = ?  \n\nP...\n.O.O\ncalc 12+7, answer 1234 ~|\\\n"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.unk_token_id not in tokens
    assert len(vocabulary()) == len(set(vocabulary())) == len(tokenizer)


def test_a_lake_turn_is_a_handful_of_tokens(tiny: Path) -> None:
    tokenizer = ChatTokenizer(tiny)
    task_set = load_task_set("rollart.tasks.frozen_lake")
    for index in range(50):
        env: Any = task_set.environment(task_set.task(index))
        first = as_observation(env.reset())
        assert len(tokenizer.render(first.messages, fresh=True)) == 7
        second = as_observation(env.step("up"))
        assert len(tokenizer.render(second.messages, fresh=False)) == 6
    assert [len(tokenizer.encode(move)) for move in ("up", "down", "left", "right")] == [1, 1, 1, 1]
    assert len(tokenizer.encode("calc 99+88")) == 4

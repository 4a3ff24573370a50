"""The player of the comparison with TRL: it plays right, and both sides play by the same rules."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import trl_frozen_lake
from benchmarks.lake_player import DOMAIN, FORMS, Episode, Form, held_out_success, play
from benchmarks.tool_lake import tool_tokenizer
from rollart.config.load import load_job
from rollart.model.tokenizer import ChatTokenizer
from rollart.tasks.api import text_of
from rollart.tasks.frozen_lake import MAX_MOVES
from rollart.tasks.load import load_task_set
from rollart_recipes.tiny import tiny_model, tiny_tokenizer

SEED = 3


TOKENIZERS = {"words": tiny_tokenizer, "tools": tool_tokenizer}
PLAYED = [(name, FORMS[name]) for name in TOKENIZERS]
"""`chat` is a real model's."""


def saved(path: Path, form: str) -> ChatTokenizer:
    """A tokenizer in a directory, and a random model beside it."""
    torch.manual_seed(SEED)
    tokenizer: Any = TOKENIZERS[form]()
    tokenizer.save_pretrained(path)
    model: Any = tiny_model(len(tokenizer))
    model.save_pretrained(path)
    return ChatTokenizer(path)


@pytest.mark.parametrize(("name", "form"), PLAYED)
def test_who_knows_the_way_gets_there(name: str, form: Form, tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, name)
    task_set, rng = form.tasks(seed=SEED, domain=DOMAIN), random.Random(0)
    tasks = [task_set.held_out(number) for number in range(20)]

    def answer(live: Sequence[Episode]) -> list[list[int]]:
        said = []
        for episode in live:
            action = task_set.scripted(tasks[episode.number], [text_of(episode.seen)], rng)
            said.append([*tokenizer.encode(action).tolist(), tokenizer.end_of_turn])
        return said

    episodes = play(tasks, tokenizer, task_set, form.max_turns, answer)
    assert [episode.reward for episode in episodes] == [1.0] * 20
    for episode in episodes:
        assert len(episode.rest) == len(episode.sampled)
        assert sum(episode.sampled) >= 2 * episode.turns, "a word, or a call, and its end"


@pytest.mark.parametrize(("name", "form"), PLAYED)
def test_the_judge_says_the_same_again(name: str, form: Form, tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, name)
    once, again = (held_out_success(form, tokenizer, tmp_path, episodes=30, seed=SEED) for _ in range(2))
    assert once == again
    assert 0.0 <= once < 0.5


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_both_sides_play_by_the_same_rules(name: str, form: Form) -> None:
    job = load_job(trl_frozen_lake.job_of(name))
    (task,) = job.tasks
    assert (task.max_turns, task.max_tokens, task.temperature) == (form.max_turns, form.max_tokens, 1.0)
    assert task.name == DOMAIN
    assert isinstance(load_task_set(task.use), form.tasks)
    assert form.max_turns <= MAX_MOVES, "the environment's own limit would come first"
    # what trl_side.settings() says; that file cannot be imported here, TRL is not installed
    side = Path(trl_frozen_lake.__file__).with_name("trl_side.py").read_text()
    train = job.train
    for text in (
        "num_generations=args.group_size",
        f"weight_decay={train.weight_decay}",
        f"beta={train.kl_coef}",
    ):
        assert text in side, text
    assert "learning_rate=form.lr" in side
    assert "max_grad_norm=form.grad_clip" in side
    assert "entropy_coef=form.entropy_coef" in side
    assert (train.lr, train.grad_clip, train.entropy_coef) == (form.lr, form.grad_clip, form.entropy_coef)
    assert train.lr_decay == "none"

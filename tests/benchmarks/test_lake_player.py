"""The player of the comparison with TRL: its cache changes nothing, and both sides play by the same rules."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import trl_frozen_lake
from benchmarks.lake_player import FORMS, CachedAnswers, Episode, Form, play
from rollart.config.load import load_job
from rollart.models.tiny import tiny_model, tiny_tokenizer
from rollart.models.tokenizer import ChatTokenizer
from rollart.tasks.frozen_lake import MAX_MOVES, FrozenLakeTasks
from rollart.tasks.load import load_task_set

SEED = 3
WORDS = FORMS["words"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    path = tmp_path_factory.mktemp("tiny")
    tiny_tokenizer().save_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).eos_token_id == 2
    return ChatTokenizer(path)


def model(tokenizer: ChatTokenizer) -> Any:
    """Random weights that say the four moves and the end of a turn much oftener than other tokens."""
    torch.manual_seed(SEED)
    made: Any = tiny_model(tokenizer.vocabulary_size)
    made.eval()
    likely = [tokenizer.end_of_turn, *(int(tokenizer.encode(move)[0]) for move in ("left", "down", "right", "up"))]
    scores = made.lm_head.forward
    bias = torch.full((tokenizer.vocabulary_size,), -6.0)
    bias[likely] = 0.0
    made.lm_head.forward = lambda hidden: scores(hidden) + bias
    return made


class WholeAnswers:
    """As CachedAnswers, without the cache: the whole episode is read again each turn, padded on the left."""

    def __init__(self, model: Any, *, max_tokens: int, end: int, pad: int) -> None:
        self._model, self._max_tokens, self._end, self._pad = model, max_tokens, end, pad

    def __call__(self, live: Sequence[Episode]) -> list[list[int]]:
        rows = [episode.prompt + episode.rest for episode in live]
        width = max(len(row) for row in rows)
        ids = torch.tensor([[self._pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self._max_tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=self._end,
            pad_token_id=self._pad,
        )
        said = out[:, width:].tolist()
        return [row[: row.index(self._end) + 1] if self._end in row else row for row in said]


def test_the_cache_changes_nothing(tokenizer: ChatTokenizer) -> None:
    network = model(tokenizer)
    task_set = FrozenLakeTasks(seed=SEED, domain="lake")
    tasks = [task_set.task(number) for number in range(24)]
    played = []
    for kind in (CachedAnswers, WholeAnswers):
        torch.manual_seed(SEED)
        answers: Any = kind(network, max_tokens=WORDS.max_tokens, end=tokenizer.end_of_turn, pad=0)
        episodes = play(tasks, tokenizer, task_set, WORDS.max_turns, answers)
        played.append([(episode.prompt, episode.rest, episode.sampled, episode.reward) for episode in episodes])
    assert played[0] == played[1]
    answers_said = [said for _, rest, sampled, _ in played[0] for said in _answers(rest, sampled)]
    assert len({len(said) for said in answers_said}) > 1, "answers of different lengths make the holes in the mask"
    assert len({len(rest) for _, rest, _, _ in played[0]}) > 1, "episodes of different lengths leave the batch"


def _answers(rest: list[int], sampled: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token, own in zip(rest, sampled, strict=True):
        if own:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [said for said in found if said]


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_both_sides_play_by_the_same_rules(name: str, form: Form) -> None:
    job = load_job(trl_frozen_lake.job_of(name))
    (task,) = job.tasks
    assert (task.max_turns, task.max_tokens, task.temperature) == (form.max_turns, form.max_tokens, 1.0)
    assert task.group_size == trl_frozen_lake.GROUP_SIZE
    assert isinstance(load_task_set(task.use), form.tasks)
    assert form.max_turns <= MAX_MOVES, "the environment's own limit would come first"
    # what trl_side.settings() says; that file cannot be imported here, TRL is not installed
    side = Path(trl_frozen_lake.__file__).with_name("trl_side.py").read_text()
    train = job.train
    for text in (
        f'DOMAIN = "{task.name}"',
        f"GROUP_SIZE = {task.group_size}",
        f"max_grad_norm={train.grad_clip}",
        f"weight_decay={train.weight_decay}",
        f"entropy_coef={train.entropy_coef}",
        f"beta={train.kl_coef}",
    ):
        assert text in side, text
    assert "learning_rate=form.lr" in side
    assert train.lr == form.lr
    assert train.lr_decay == "none"

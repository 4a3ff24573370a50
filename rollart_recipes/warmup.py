"""Supervised learning on novices' play: what makes a fresh model speak a task's action format.

Batches are drawn from the warm-up split of each task set, by step number: a warm-up that goes on later continues the
same sequence. The loss is on the model's answers only. Deterministic for a seed, a step range and a thread count.
"""

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollart.errors import JobError
from rollart.model.tokenizer import ChatTokenizer
from rollart.tasks.api import TaskSet, as_observation, text_of
from rollart.tasks.load import load_task_set
from rollart.types import Message, Task

TASKS = ("rollart.tasks.frozen_lake", "rollart.tasks.calculator_math")
MAX_TURNS = 12
EPISODES_PER_STEP = 32
"""Per task."""
LEARNING_RATE = 2e-3
PREPARED_EPISODES = 8192
"""Per task; a long warm-up uses them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """What a warm-up did."""

    steps: int
    seconds: float
    loss: float
    """Mean over the last tenth of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One played episode: its tokens, and which of them the player said."""

    tokens: list[int]
    mask: list[bool]


def warm_up(
    model: Any,
    tokenizer_path: str | Path,
    *,
    seed: int = 0,
    start_step: int = 0,
    steps: int | None = None,
    seconds: float | None = None,
    tasks: Sequence[TaskSet] = (),
    progress: Callable[[int, float], None] | None = None,
) -> WarmupReport:
    """Train in place for so many steps, or for so many seconds, on these tasks, or on those of the quick start."""
    import torch

    if (steps is None) == (seconds is None):
        raise JobError("warm-up: give either steps or seconds")
    tokenizer = ChatTokenizer(tokenizer_path)
    sets = tasks or [load_task_set(use, seed=seed) for use in TASKS]
    shelves = [Shelf(task_set, tokenizer, seed) for task_set in sets]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    began_s, losses, step = time.monotonic(), [], start_step
    while (steps is not None and step < start_step + steps) or (
        seconds is not None and time.monotonic() - began_s < seconds
    ):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step - start_step + 1) / 20)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for shelf in shelves:  # one task at a time: their episodes are of very different lengths
            loss = _loss(model, shelf.batch(step)) / len(shelves)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
        step += 1
        if progress is not None:
            progress(step, total)
    tail = losses[-max(1, len(losses) // 10) :]
    return WarmupReport(
        steps=step - start_step,
        seconds=time.monotonic() - began_s,
        loss=sum(tail) / len(tail) if tail else float("nan"),
    )


class Shelf:
    """Demonstrations of one task, made as they are first needed and drawn in an order fixed by the step."""

    def __init__(self, task_set: TaskSet, tokenizer: ChatTokenizer, seed: int) -> None:
        self._task_set = task_set
        self._tokenizer = tokenizer
        self._seed = seed
        self._made: dict[int, Demonstration] = {}

    def batch(self, step: int) -> list[Demonstration]:
        indices = [(step * EPISODES_PER_STEP + offset) % PREPARED_EPISODES for offset in range(EPISODES_PER_STEP)]
        return [self._at(index) for index in indices]

    def _at(self, index: int) -> Demonstration:
        if index not in self._made:
            rng = random.Random(f"{self._seed}/warmup/{self._task_set.domain}/{index}")
            self._made[index] = demonstrate(self._task_set, self._task_set.warmup(index), self._tokenizer, rng)
        return self._made[index]


def demonstrate(task_set: TaskSet, task: Task, tokenizer: ChatTokenizer, rng: random.Random) -> Demonstration:
    """Let the novice play one episode, and write it down as the model would have seen and said it."""
    tokens: list[int] = []
    mask: list[bool] = []
    for turn, (shown, action) in enumerate(asyncio.run(novice_plays(task_set, task, rng))):
        context = tokenizer.render(shown, fresh=turn == 0).tolist()
        answer = [*tokenizer.encode(action).tolist(), tokenizer.end_of_turn]
        tokens += [*context, *answer]
        mask += [False] * len(context) + [True] * len(answer)
    return Demonstration(tokens=tokens, mask=mask)


async def novice_plays(task_set: TaskSet, task: Task, rng: random.Random) -> list[tuple[tuple[Message, ...], str]]:
    """One episode of the novice: what it was shown and what it said, turn by turn."""
    env = task_set.environment(task)
    turns: list[tuple[tuple[Message, ...], str]] = []
    texts: list[str] = []
    try:
        observation = as_observation(await _finished(env.reset()))
        while len(turns) < MAX_TURNS and not (observation.done or observation.truncated):
            texts.append(text_of(observation))
            action = task_set.novice(task, texts, rng)
            turns.append((observation.messages, action))
            observation = as_observation(await _finished(env.step(action)))
    finally:
        await _finished(env.close())
    return turns


async def _finished(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _loss(model: Any, batch: Sequence[Demonstration]) -> Any:
    import torch

    longest = max(len(item.tokens) for item in batch)
    tokens_bt = np.zeros((len(batch), longest), dtype=np.int64)
    mask_bt = np.zeros((len(batch), longest), dtype=np.bool_)
    for row, item in enumerate(batch):
        tokens_bt[row, : len(item.tokens)] = item.tokens
        mask_bt[row, : len(item.mask)] = item.mask
    tokens, mask = torch.from_numpy(tokens_bt), torch.from_numpy(mask_bt)
    # Padding is on the right and attention is causal, so it needs no attention mask.
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][mask[:, 1:]]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), tokens[:, 1:][mask[:, 1:]])

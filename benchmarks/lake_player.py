"""Plays FrozenLake in lockstep, all live episodes turn by turn: TRL's rollouts with one-word answers, and the judge.

`FORMS` is what both sides keep to. `held_out_success` judges the weights that either side made, by the same play.
Invariant: the tokens of an episode are those that `rollart train` makes of it: same rendering, same limits, and sampled
ids are never tokenised again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.tool_lake import MAX_CALLS, ToolLakeTasks
from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.model.network import load_model
from rollart.model.tokenizer import ChatTokenizer
from rollart.tasks.api import Environment, as_observation
from rollart.tasks.chat_games import Lake
from rollart.tasks.frozen_lake import FrozenLakeTasks
from rollart.types import GenerateRequest, Observation, Sampling, Task

DOMAIN = "lake"
"""The task's name in the job files: it is part of what its maps are drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the lake is played and learnt; as in benchmarks/trl_<form>.yaml."""

    tasks: type[FrozenLakeTasks]
    max_turns: int
    max_tokens: int
    lr: float
    grad_clip: float
    entropy_coef: float = 0.01


FORMS = {
    "tools": Form(tasks=ToolLakeTasks, max_turns=MAX_CALLS + 1, max_tokens=32, lr=1e-4, grad_clip=0.1),
    "words": Form(tasks=FrozenLakeTasks, max_turns=12, max_tokens=4, lr=5e-4, grad_clip=1.0),
    "chat": Form(tasks=Lake, max_turns=12, max_tokens=8, lr=4e-5, grad_clip=1.0, entropy_coef=0.0),
}


@dataclass(slots=True, kw_only=True)
class Episode:
    """One walk under way; when it has ended, a sample."""

    number: int
    env: Environment
    max_turns: int
    seen: Observation
    prompt: list[int]
    """The first observation's tokens."""
    rest: list[int] = field(default_factory=list)
    """Answers and later observations, in order."""
    sampled: list[int] = field(default_factory=list)
    """As long as `rest`: 1 where the model said it."""
    said: list[int] = field(default_factory=list)
    """The last answer."""
    turns: int = 0
    reward: float = 0.0

    @property
    def over(self) -> bool:
        return self.seen.done or self.seen.truncated or self.turns >= self.max_turns


Answer = Callable[[Sequence[Episode]], list[list[int]]]
"""Given the live episodes, what the model says in each."""


def play(
    tasks: Sequence[Task], tokenizer: ChatTokenizer, task_set: FrozenLakeTasks, max_turns: int, answer: Answer
) -> list[Episode]:
    """Every task to its end, each turn of all live episodes at once."""
    episodes = [_opened(number, task_set.environment(task), max_turns, tokenizer) for number, task in enumerate(tasks)]
    while live := [episode for episode in episodes if not episode.over]:
        for episode in live:
            if episode.turns:
                messages = episode.seen.messages
                delta = tokenizer.render(messages, fresh=False, after=_tokens(episode.said)).tolist()
                episode.rest += delta
                episode.sampled += [0] * len(delta)
        for episode, said in zip(live, answer(live), strict=True):
            episode.said = said
            episode.rest += said
            episode.sampled += [1] * len(said)
            episode.turns += 1
            episode.seen = as_observation(episode.env.step(tokenizer.decode(_tokens(said))))
            episode.reward += episode.seen.reward
    return episodes


def _opened(number: int, env: Environment, max_turns: int, tokenizer: ChatTokenizer) -> Episode:
    seen = as_observation(env.reset())
    return Episode(
        number=number,
        env=env,
        max_turns=max_turns,
        seen=seen,
        prompt=tokenizer.render(seen.messages, fresh=True).tolist(),
    )


def _tokens(ids: list[int]) -> Any:
    return np.array(ids, dtype=np.int32)


class EngineAnswers:
    """An `Answer` by RollArt's own engine: the weights that either side made are judged by the same play."""

    def __init__(self, path: Path, *, max_tokens: int, end: int, seed: int, device: str) -> None:
        settings = EngineSettings(kv_tokens=1 << 18, max_batch=512, device=device)
        model = load_model(path, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
        self._engine = EmbeddedEngine(model, settings=settings, eos=frozenset({end}))
        self._sampling = Sampling(max_tokens=max_tokens, temperature=1.0, seed=seed)

    def __call__(self, live: Sequence[Episode]) -> list[list[int]]:
        names = [f"{episode.number}/{episode.turns}" for episode in live]
        for name, episode in zip(names, live, strict=True):
            prompt = np.array(episode.prompt + episode.rest, dtype=np.int32)
            self._engine.add(
                GenerateRequest(
                    id=name,
                    session=str(episode.number),
                    domain=DOMAIN,
                    turn=episode.turns,
                    prompt=(prompt,),
                    prompt_tokens=len(prompt),
                    sampling=self._sampling,
                    min_version=0,
                    last=False,
                )
            )
        said: dict[str, list[int]] = {}
        while self._engine.busy:
            said.update((name, completion.tokens.tolist()) for name, completion in self._engine.step())
        return [said[name] for name in names]


def held_out_success(
    form: Form, tokenizer: ChatTokenizer, model: Path, *, episodes: int, seed: int, device: str = "cpu"
) -> float:
    """Share of held-out walks, sampled, that these weights bring to the goal."""
    task_set = form.tasks(seed=seed, domain=DOMAIN)
    tasks = [task_set.held_out(number) for number in range(episodes)]
    answers = EngineAnswers(model, max_tokens=form.max_tokens, end=tokenizer.end_of_turn, seed=seed, device=device)
    played = play(tasks, tokenizer, task_set, form.max_turns, answers)
    return sum(episode.reward for episode in played) / len(played)

"""Plays FrozenLake in lockstep with transformers' `generate`: all live episodes in one padded batch, turn by turn.

Used by TRL's rollouts with one-word answers, and to evaluate the weights that either side made, so that both are judged
by the same play. `FORMS` is what both sides keep to.
Invariant: the tokens of an episode are those that `rollart train` makes of it: same rendering, same limits, and sampled
ids are never tokenised again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.tool_lake import MAX_CALLS, ToolLakeTasks
from rollart.models.tokenizer import ChatTokenizer
from rollart.tasks.api import Environment, as_observation
from rollart.tasks.frozen_lake import FrozenLakeTasks
from rollart.types import Observation, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the lake is played and learnt; as in benchmarks/trl_<form>.yaml."""

    tasks: type[FrozenLakeTasks]
    max_turns: int
    max_tokens: int
    lr: float


FORMS = {
    "tools": Form(tasks=ToolLakeTasks, max_turns=MAX_CALLS + 1, max_tokens=32, lr=3e-4),
    "words": Form(tasks=FrozenLakeTasks, max_turns=12, max_tokens=4, lr=5e-4),
}


@dataclass(slots=True, kw_only=True)
class Episode:
    """One walk under way; when it has ended, a sample."""

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
    episodes = [_opened(task_set.environment(task), max_turns, tokenizer) for task in tasks]
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


def _opened(env: Environment, max_turns: int, tokenizer: ChatTokenizer) -> Episode:
    seen = as_observation(env.reset())
    return Episode(env=env, max_turns=max_turns, seen=seen, prompt=tokenizer.render(seen.messages, fresh=True).tolist())


def _tokens(ids: list[int]) -> Any:
    return torch.tensor(ids, dtype=torch.int32).numpy()


class CachedAnswers:
    """An `Answer` by `model.generate` that keeps the keys and values of all turns so far.

    Rows are padded on the left, and between turns where a row said less than the longest one; the mask has holes there.
    """

    def __init__(self, model: Any, *, max_tokens: int, end: int, pad: int) -> None:
        from transformers import DynamicCache

        self._model = model
        self._max_tokens, self._end, self._pad = max_tokens, end, pad
        self._cache: Any = DynamicCache(config=model.config)
        self._rows: list[int] = []
        """Which episode each row of the cache belongs to, by identity."""
        self._ids_BT = torch.zeros(0, 0, dtype=torch.long)
        self._mask_BT = torch.zeros(0, 0, dtype=torch.long)

    def __call__(self, live: Sequence[Episode]) -> list[list[int]]:
        if not self._rows:
            new = [episode.prompt for episode in live]
            self._ids_BT = self._mask_BT = torch.zeros(len(live), 0, dtype=torch.long)
        else:
            self._keep(live)
            new = [_since_answer(episode) for episode in live]
        self._rows = [id(episode) for episode in live]
        self._append(new)
        with torch.no_grad():
            out_BT = self._model.generate(
                input_ids=self._ids_BT,
                attention_mask=self._mask_BT,
                past_key_values=self._cache,
                max_new_tokens=self._max_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=self._end,
                pad_token_id=self._pad,
            )
        said_BT = out_BT[:, self._ids_BT.shape[1] :]
        after_end_BT = (said_BT == self._end).cumsum(1) - (said_BT == self._end).long() > 0
        self._ids_BT = out_BT
        self._mask_BT = torch.cat([self._mask_BT, (~after_end_BT).long()], dim=1)
        lengths = (~after_end_BT).sum(1).tolist()
        return [row[:length] for row, length in zip(said_BT.tolist(), lengths, strict=True)]

    def _keep(self, live: Sequence[Episode]) -> None:
        """Drop the rows of episodes that have ended."""
        places = {row: place for place, row in enumerate(self._rows)}
        kept_B = torch.tensor([places[id(episode)] for episode in live])
        if len(kept_B) < len(self._rows):
            self._cache.batch_select_indices(kept_B)
            self._ids_BT, self._mask_BT = self._ids_BT[kept_B], self._mask_BT[kept_B]

    def _append(self, new: list[list[int]]) -> None:
        width = max(len(tokens) for tokens in new)
        ids_BT = torch.tensor([[self._pad] * (width - len(tokens)) + tokens for tokens in new])
        mask_BT = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in new])
        self._ids_BT = torch.cat([self._ids_BT, ids_BT], dim=1)
        self._mask_BT = torch.cat([self._mask_BT, mask_BT], dim=1)


def _since_answer(episode: Episode) -> list[int]:
    """The observation at the end of `rest`."""
    count = len(episode.rest)
    while count and not episode.sampled[count - 1]:
        count -= 1
    return episode.rest[count:]

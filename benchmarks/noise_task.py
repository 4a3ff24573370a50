"""A task for models with random weights, whose answers mean nothing: observations of a given length, rewards by chance.

It loads engines and trainer as an agent's task does: some turns, long observations or long answers. The reward is 1 for
about half of all answers, by their hash, so that groups have a gradient; or for a share of them that is given, at
regular distances, so that as much is trained on in one run as in another. How long answers are the job says
(`max_tokens`), as such a model hardly ever ends one.
"""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Observation, Task

WORDS = ("lake", "stone", "river", "cloud", "lamp", "green", "seven", "north", "bread", "wheel", "paper", "glass")


class Ration:
    """This share of those who ask are told yes, the first of them, and then as evenly as can be."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._due = 1.0 - share

    def next(self) -> bool:
        self._due += self._share
        due = self._due >= 1.0
        self._due -= due
        return due


class Noise(Environment):
    def __init__(self, seed: int, words: int, turns: int, first: int, earns: Ration | None) -> None:
        self._rng = random.Random(seed)
        self._words, self._turns, self._first, self._earns = words, turns, first, earns
        self._said: list[str] = []

    def reset(self) -> str:
        return self._shown(self._first)

    def step(self, action: str) -> Observation:
        self._said.append(action)
        if len(self._said) < self._turns:
            return observe(self._shown(self._words))
        if self._earns is not None:
            return observe(reward=float(self._earns.next()), done=True)
        digest = hashlib.sha256("\n".join(self._said).encode()).digest()
        return observe(reward=float(digest[0] % 2), done=True)

    def _shown(self, words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=words))


class NoiseTasks(TaskSet):
    """By default two turns, observations of about 512 tokens."""

    quick = True

    def __init__(
        self,
        *,
        words: int = 500,
        turns: int = 2,
        first: int | None = None,
        success: float | None = None,
        **more: Any,
    ) -> None:
        """`words`: of an observation; `first`: of the first one, if it is not as long as the others; `success`: share
        of trajectories that earn 1, in each process. Where it is small, `rollout.zero_variance: skip` leaves little to
        train on."""
        super().__init__(**more)
        self._words, self._turns, self._first = words, turns, words if first is None else first
        self._earns = None if success is None else Ration(success)

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"seed": rng.getrandbits(31)}

    def environment(self, task: Task) -> Noise:
        return Noise(task.payload["seed"], self._words, self._turns, self._first, self._earns)

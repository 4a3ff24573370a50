"""The task of `python -m benchmarks.late`: some episodes have many times the turns of others, as agents' do."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Observation, Task

TURNS = (1, 1, 2, 2, 3, 4, 6, 12)
"""Each as often as the others; all members of a group have the same."""


class Uneven(Environment):
    def __init__(self, seed: int, turns: int) -> None:
        self._rng = random.Random(seed)
        self._left = turns

    def reset(self) -> str:
        return f"Say digits. {self._rng.randrange(10**8)}\n"

    def step(self, action: str) -> Observation:
        self._left -= 1
        share = sum(character.isdigit() for character in action) / max(1, len(action))
        return observe(f"{self._rng.randrange(10**8)}\n", reward=share, done=not self._left)


class UnevenTasks(TaskSet):
    quick = True

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"seed": rng.getrandbits(31), "turns": rng.choice(TURNS)}

    def environment(self, task: Task) -> Uneven:
        return Uneven(task.payload["seed"], task.payload["turns"])

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return "0123456789"

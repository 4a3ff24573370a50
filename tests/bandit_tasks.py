"""A contextual bandit as a task set: a letter is shown, and its own number is the right answer. One turn, one token."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Observation, Task

LETTERS = "abcdefgh"
ANSWERS = "0123"


class Bandit(Environment):
    def __init__(self, letter: str) -> None:
        self._letter = letter

    def reset(self) -> str:
        return self._letter

    def step(self, action: str) -> Observation:
        return observe(reward=float(action == right_answer(self._letter)), done=True)


class BanditTasks(TaskSet):
    quick = True

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"letter": rng.choice(LETTERS)}

    def environment(self, task: Task) -> Bandit:
        return Bandit(task.payload["letter"])

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return right_answer(task.payload["letter"])


def right_answer(letter: str) -> str:
    return ANSWERS[LETTERS.index(letter) % len(ANSWERS)]

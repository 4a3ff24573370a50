"""Guess a number from hints. The shortest complete task set: copy it to start your own."""

import random
import re
from collections.abc import Sequence

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Observation, Payload, Task

HIGHEST = 127
MAX_GUESSES = 7
"""Enough for one who halves the range each time."""


class Guessing(Environment):
    """One secret number."""

    def __init__(self, secret: int) -> None:
        self._secret = secret
        self._guesses = 0
        self._over = False

    def reset(self) -> str:
        return f"I think of a number from 1 to {HIGHEST}. Guess it; I say higher or lower.\n"

    def step(self, action: str) -> Observation:
        found = re.search(r"\d{1,9}", action)
        guess = int(found.group()) if found else None
        if self._over:
            return observe(done=True)
        self._guesses += 1
        self._over = guess == self._secret or self._guesses >= MAX_GUESSES
        if self._over:
            return observe(reward=float(guess == self._secret), done=True)
        if guess is None:
            return observe("say a number\n")
        return observe("higher\n" if guess < self._secret else "lower\n")


class GuessTasks(TaskSet):
    """All numbers; a hash decides which are held out."""

    quick = True

    def draw(self, rng: random.Random) -> Payload:
        return {"secret": rng.randint(1, HIGHEST)}

    def environment(self, task: Task) -> Guessing:
        return Guessing(task.payload["secret"])

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        low, high = 1, HIGHEST
        for hint in observations[1:]:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hint.startswith("higher") else (low, middle - 1)
        return str((low + high) // 2)

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return str(rng.randint(1, HIGHEST))

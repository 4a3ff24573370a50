"""Three games for a small chat model, in words it knows: two of several turns, one of a single one.

Each observation says all that is needed for the next answer, and ends with the question. A small pretrained model then
earns something from the first step on, and what it has to learn is to play well, not to read a drawing.
"""

import random
import re
from collections.abc import Sequence

from rollart.tasks.api import Environment, TaskSet, observe, text_of
from rollart.tasks.frozen_lake import SIZE, STEPS, FrozenLake, FrozenLakeTasks
from rollart.types import Observation, Payload, Task

TOLD = ("up", "down", "left", "right")
"""In this order."""
CELLS = {".": "ice", "O": "hole", "G": "goal"}
HIGHEST = 99
MAX_GUESSES = 7
"""One who halves the range each time needs no more."""
CHOICES, CHOICES_BELOW = 4, 1000


class LakeInWords(FrozenLake):
    """The frozen lake of `rollart.tasks.frozen_lake`, told instead of drawn."""

    def reset(self) -> Observation:
        return observe(f"You walk on a frozen lake. Reach the goal, and step into no hole. {self._shown()}")

    def _shown(self) -> str:
        around = []
        for name in TOLD:
            down, right = STEPS[name]
            row, column = self._row + down, self._column + right
            inside = 0 <= row < SIZE and 0 <= column < SIZE
            around.append(f"{name}: {CELLS[self._rows[row][column]] if inside else 'wall'}")
        away = f"{SIZE - 1 - self._row} down and {SIZE - 1 - self._column} right"
        return f"The goal is {away}. {', '.join(around)}. Answer with one word, up, down, left or right."


class Lake(FrozenLakeTasks):
    """The same maps, told in words."""

    def environment(self, task: Task) -> LakeInWords:
        return LakeInWords(task.payload["map"])

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """A shortest way, from where the answers so far would have led."""
        drawn = FrozenLake(task.payload["map"])
        shown = [text_of(drawn.reset())]
        for _ in observations[1:]:
            shown.append(text_of(drawn.step(super().scripted(task, shown, rng))))
        return super().scripted(task, shown, rng)


class Guessing(Environment):
    """One secret number; the range that is left is said after each guess."""

    def __init__(self, secret: int) -> None:
        self._secret = secret
        self._low, self._high = 1, HIGHEST
        self._guesses = 0
        self._over = False

    def reset(self) -> str:
        return f"I think of a number. {self._asked()}"

    def step(self, action: str) -> Observation:
        if self._over:
            return observe(done=True)
        self._guesses += 1
        found = re.search(r"\d{1,9}", action)
        guess = int(found.group()) if found else 0
        self._over = guess == self._secret or self._guesses >= MAX_GUESSES
        if self._over:
            return observe(reward=float(guess == self._secret), done=True)
        if self._low <= guess < self._secret:
            self._low = guess + 1
        elif self._secret < guess <= self._high:
            self._high = guess - 1
        return observe(self._asked())

    def _asked(self) -> str:
        return f"It is between {self._low} and {self._high}. Guess it. Answer with one number."


class Guess(TaskSet):
    """Numbers up to HIGHEST; a hash decides which are held out."""

    quick = True

    def draw(self, rng: random.Random) -> Payload:
        return {"secret": rng.randint(1, HIGHEST)}

    def environment(self, task: Task) -> Guessing:
        return Guessing(task.payload["secret"])

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """The middle of what is left."""
        low, high = map(int, re.findall(r"\d+", observations[-1]))
        return str((low + high) // 2)

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        low, high = map(int, re.findall(r"\d+", observations[-1]))
        return str(rng.randint(low, high))


class Choosing(Environment):
    """One question about some numbers; the last number of the answer counts."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._over = False

    def reset(self) -> str:
        listed = ", ".join(map(str, self._numbers))
        return f"Which is the largest of these numbers: {listed}? Answer with one number."

    def step(self, action: str) -> Observation:
        said = re.findall(r"\d+", action)[-1:]
        right = not self._over and said == [str(max(self._numbers))]
        self._over = True
        return observe(reward=float(right), done=True)


class Largest(TaskSet):
    """The largest of a few numbers."""

    quick = True

    def draw(self, rng: random.Random) -> Payload:
        return {"numbers": rng.sample(range(1, CHOICES_BELOW), CHOICES)}

    def environment(self, task: Task) -> Choosing:
        return Choosing(task.payload["numbers"])

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return str(max(task.payload["numbers"]))

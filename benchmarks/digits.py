"""The task of `python -m benchmarks.modes`: say digits. It never ends by itself, so `max_turns` is the number of turns.

The environment is real and answers at once; how long a step takes is `tasks.latency` of the job. Each turn shows a
random number; the reward of a turn is the share of the answer's characters that are digits.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Observation, Task

SHOWN_DIGITS = 16


class Digits(Environment):
    def __init__(self, seed: int, shown: int) -> None:
        self._rng = random.Random(seed)
        self._shown = shown

    def reset(self) -> str:
        return f"Say digits. {self._number()}\n"

    def step(self, action: str) -> Observation:
        share = sum(character.isdigit() for character in action) / max(1, len(action))
        return observe(f"{self._number()}\n", reward=share)

    def _number(self) -> str:
        return "".join(self._rng.choice("0123456789") for _ in range(self._shown))


class DigitsTasks(TaskSet):
    quick = True

    def __init__(self, *, shown: int = SHOWN_DIGITS, **more: Any) -> None:
        super().__init__(**more)
        self._shown = shown

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"seed": rng.getrandbits(31)}

    def environment(self, task: Task) -> Digits:
        return Digits(task.payload["seed"], self._shown)

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return "0123456789"

"""The quickstart's two tasks with environments that go wrong: each kind in 5 % of the attempts, drawn anew each time.

Used by `python -m benchmarks.soak`. The reward functions are the tasks' own.
"""

import os
import random
import time
from typing import Any

from rollart.tasks.api import Environment, Said, observe
from rollart.tasks.calculator_math import CalculatorTasks
from rollart.tasks.calculator_math import score as maths
from rollart.tasks.frozen_lake import FrozenLakeTasks
from rollart.tasks.frozen_lake import score as lake
from rollart.types import Task

SHARE = 0.05
KINDS = ("crash", "hang", "not a number", "page", "role")
PAGE_CHARACTERS = 100_000

__all__ = ["Lake", "Maths", "lake", "maths"]


class Unreliable(Environment):
    """An environment that may go wrong at its first or second step."""

    def __init__(self, inner: Environment) -> None:
        self._inner = inner
        draw = random.SystemRandom()
        number = int(draw.random() / SHARE)
        self._kind = KINDS[number] if number < len(KINDS) else ""
        self._steps_left = draw.randrange(2)

    def reset(self) -> Any:
        return self._inner.reset()

    def step(self, action: str) -> Any:
        if self._kind and not self._steps_left:
            return self._go_wrong()
        self._steps_left -= 1
        return self._inner.step(action)

    def _go_wrong(self) -> Said:
        match self._kind:
            case "crash":
                os._exit(7)
            case "hang":
                time.sleep(3600)
            case "not a number":
                return observe("x", reward=float("nan"))
            case "page":
                return observe("x" * PAGE_CHARACTERS)
        return observe("x", role="narrator")


class Lake(FrozenLakeTasks):
    quick = False

    def environment(self, task: Task) -> Environment:  # type: ignore[override]
        return Unreliable(super().environment(task))


class Maths(CalculatorTasks):
    quick = False

    def environment(self, task: Task) -> Environment:  # type: ignore[override]
        return Unreliable(super().environment(task))

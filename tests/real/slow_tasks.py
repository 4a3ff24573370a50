"""A game that takes a little while, so that whoever is killed is at work. What it pays is easy to vary in."""

import random
import time
from collections.abc import Mapping
from typing import Any

from rollart.tasks.api import Environment, Episode, TaskSet, observe
from rollart.types import Observation, Task

STEP_S = 0.02
SCORE_S = 0.02


class Slow(Environment):
    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.count = 0

    def reset(self) -> str:
        return "go"

    def step(self, action: str) -> Observation:
        time.sleep(STEP_S)
        self.count += 1
        return observe(f"{self.count}", reward=float(sum(map(ord, action)) % 2), done=self.count == self.turns)


class SlowTasks(TaskSet):
    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"turns": rng.randint(1, 3), "number": rng.randrange(10**9)}

    def environment(self, task: Task) -> Environment:
        return Slow(task.payload["turns"])


def score(episode: Episode) -> float:
    time.sleep(SCORE_S)
    return episode.reward

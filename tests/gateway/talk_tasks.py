"""A conversation of two turns: a question, then "Sure?". An agent may have it by itself, and give its last word."""

import random
from collections.abc import Mapping
from typing import Any

from rollart.tasks.api import Environment, Episode, Said, TaskSet, observe
from rollart.types import Task

SURE = "Sure?"
LAST = "last word: "


class Talk(Environment):
    def __init__(self, question: str) -> None:
        self.question = question
        self.said = 0

    def reset(self) -> Said:
        return self.question

    def step(self, action: str) -> Said:
        self.said += 1
        if self.said == 2 or action.startswith(LAST):
            return observe(reward=float(len(action) % 2), done=True)
        return SURE


class TalkTasks(TaskSet):
    quick = True

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"question": f"{rng.randrange(1000)}+{rng.randrange(1000)}?"}

    def environment(self, task: Task) -> Environment:
        return Talk(task.payload["question"])


def score(episode: Episode) -> float:
    return episode.reward

"""Environments for `benchmarks/envs.py`: most count their steps; some hang, some end their process."""

import os
import random
import time
from collections.abc import Mapping
from typing import Any

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Observation, Task

FOR_EVER_S = 3600.0


class Sick(Environment):
    """Well for `steps` steps of `step_s` each; a sick one goes wrong in its first."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self._payload = payload
        self._left = int(payload["steps"])

    def reset(self) -> str:
        return "begin"

    def step(self, action: str) -> Observation:
        match self._payload["kind"]:
            case "hang":
                time.sleep(FOR_EVER_S)
            case "crash":
                time.sleep(self._payload["step_s"])
                os._exit(9)
        time.sleep(self._payload["step_s"])
        self._left -= 1
        return observe("more", done=self._left <= 0)


class SickTasks(TaskSet):
    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"kind": "well", "steps": 4, "step_s": 0.1, "salt": rng.random()}

    def environment(self, task: Task) -> Environment:
        return Sick(task.payload)

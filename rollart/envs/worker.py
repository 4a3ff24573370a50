"""The environment worker: one process, one environment at a time. Started by `process.py`, never by hand."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from rollart.tasks.api import Environment, TaskSet, as_observation, text_of
from rollart.tasks.load import load_task_set
from rollart.tasks.program import answer_of
from rollart.types import Endpoint, Observation, Program, Task


class EnvWorker:
    """Task sets are loaded when their first task arrives."""

    def __init__(self, uses: Mapping[str, str], seed: int) -> None:
        self._uses = uses
        self._seed = seed
        self._task_sets: dict[str, TaskSet] = {}
        self._environment: Environment | None = None
        self._shown = ""
        """What the environment said last."""
        self._runner = asyncio.Runner()

    def open(self, task: Task) -> None:
        if task.domain not in self._task_sets:
            use = self._uses[task.domain]
            self._task_sets[task.domain] = load_task_set(use, seed=self._seed, domain=task.domain)
        self._environment = self._task_sets[task.domain].environment(task)

    def reset(self) -> Observation:
        assert self._environment is not None
        return self._said(self._environment.reset())

    def step(self, action: str) -> Observation:
        assert self._environment is not None
        return self._said(self._environment.step(action))

    def play(self, program: Program, endpoint: Endpoint) -> Observation:
        """Step with the answer of a program to what was said last."""
        return self.step(self._finished(answer_of(program, endpoint, self._shown)))

    def close(self) -> None:
        environment, self._environment = self._environment, None
        assert environment is not None
        self._finished(environment.close())

    def _said(self, value: Any) -> Observation:
        observation = as_observation(self._finished(value))
        self._shown = text_of(observation)
        return observation

    def _finished(self, value: Any) -> Any:
        async def wait() -> Any:
            return await value

        return self._runner.run(wait()) if inspect.isawaitable(value) else value

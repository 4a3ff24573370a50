"""The environment worker: one process, one environment at a time. Started by `process.py`, never by hand."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from rollart.tasks.api import Environment, TaskSet, as_observation
from rollart.tasks.load import load_task_set
from rollart.types import Observation, Task


class EnvWorker:
    """Task sets are loaded when their first task arrives."""

    def __init__(self, uses: Mapping[str, str], seed: int, args: Mapping[str, Mapping[str, Any]]) -> None:
        self._uses = uses
        self._args = args
        self._seed = seed
        self._task_sets: dict[str, TaskSet] = {}
        self._environment: Environment | None = None
        self._runner = asyncio.Runner()

    def open(self, task: Task) -> None:
        if task.domain not in self._task_sets:
            use, args = self._uses[task.domain], self._args.get(task.domain)
            self._task_sets[task.domain] = load_task_set(use, args, seed=self._seed, domain=task.domain)
        self._environment = self._task_sets[task.domain].environment(task)

    def reset(self) -> Observation:
        assert self._environment is not None
        return as_observation(self._finished(self._environment.reset()))

    def step(self, action: str) -> Observation:
        assert self._environment is not None
        return as_observation(self._finished(self._environment.step(action)))

    def close(self) -> None:
        environment, self._environment = self._environment, None
        assert environment is not None
        self._finished(environment.close())

    def _finished(self, value: Any) -> Any:
        async def wait() -> Any:
            return await value

        return self._runner.run(wait()) if inspect.isawaitable(value) else value

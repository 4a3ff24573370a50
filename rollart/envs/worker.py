"""The environment worker: one process, one environment at a time. Started by `process.py`, never by hand."""

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from rollart.tasks.api import Environment, TaskSet, as_observation, text_of
from rollart.tasks.load import load_task_set
from rollart.tasks.program import answer_of
from rollart.types import Endpoint, Observation, Program, Task


def _is_over(observation: Observation) -> bool:
    return observation.done or observation.truncated


class EnvWorker:
    """Task sets are loaded when their first task arrives."""

    def __init__(self, uses: Mapping[str, str], seed: int, args: Mapping[str, Mapping[str, object]]) -> None:
        self._uses = uses
        self._args = args
        self._seed = seed
        self._task_sets: dict[str, TaskSet] = {}
        self._environment: Environment | None = None
        self._shown = ""
        """What the environment said last."""
        self._runner = asyncio.Runner()

    def prepare(self, domains: Sequence[str], keys: Sequence[tuple[str, str]]) -> None:
        """Ahead of the first task: load the task sets, and let them fill caches for these keys."""
        for domain in domains:
            self._task_set(domain)
        for domain, key in keys:
            self._task_set(domain).fill_cache(key)

    def open(self, task: Task) -> str:
        """Returns the key of what a worker that is started ahead could have in a cache for it."""
        task_set = self._task_set(task.domain)
        self._environment = task_set.environment(task)
        return task_set.cache_key(task)

    def _task_set(self, domain: str) -> TaskSet:
        if domain not in self._task_sets:
            self._task_sets[domain] = load_task_set(
                self._uses[domain], self._args.get(domain), seed=self._seed, domain=domain
            )
        return self._task_sets[domain]

    def reset(self) -> Observation:
        assert self._environment is not None
        return self._said(self._environment.reset())

    def step(self, action: str) -> Observation:
        assert self._environment is not None
        return self._said(self._environment.step(action))

    def play(self, program: Program, endpoint: Endpoint) -> Observation:
        """Let a program answer what was said last. It may step itself; its answer, where it has one, is the last step.
        Returns what the environment said at the end, with the rewards of all its steps."""
        steps: list[Observation] = []

        def step(action: str) -> str | None:
            if steps and _is_over(steps[-1]):
                raise ValueError("the episode is over")
            steps.append(self.step(action))
            return None if _is_over(steps[-1]) else self._shown

        answer = self._finished(answer_of(program, endpoint, self._shown, step))
        if answer is not None and not (steps and _is_over(steps[-1])):
            step(answer)
        if not steps:
            raise TypeError(f"{program.function} returned None, and made no step; return its answer, a string")
        last, reward = steps[-1], math.fsum(observation.reward for observation in steps)
        gave_up = answer is None and not _is_over(last)
        return replace(last, reward=reward, truncated=last.truncated or gave_up)

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

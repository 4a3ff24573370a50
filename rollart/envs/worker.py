"""The environment worker: one process, one environment at a time. Started by `process.py`, never by hand."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from rollart.workers import child


def start(setup: Mapping[str, Any]) -> child.Handler:
    """The handler of open, reset, step and close. Task sets are loaded when their first task arrives."""
    from rollart.envs.codec import observation_to_wire
    from rollart.tasks.api import Environment, TaskSet, as_observation, task_from_json
    from rollart.tasks.load import load_task_set

    uses: Mapping[str, str] = setup["uses"]
    task_sets: dict[str, TaskSet] = {}
    current: list[Environment] = []
    runner = asyncio.Runner()

    def finished(value: Any) -> Any:
        async def wait() -> Any:
            return await value

        return runner.run(wait()) if inspect.isawaitable(value) else value

    def handle(request: Mapping[str, Any]) -> Any:
        match request["op"]:
            case "open":
                task = task_from_json(request["task"])
                if task.domain not in task_sets:
                    task_sets[task.domain] = load_task_set(uses[task.domain], seed=setup["seed"], domain=task.domain)
                current[:] = [task_sets[task.domain].environment(task)]
                return None
            case "reset":
                return observation_to_wire(as_observation(finished(current[0].reset())))
            case "step":
                return observation_to_wire(as_observation(finished(current[0].step(request["action"]))))
            case _:
                environment = current.pop()
                return finished(environment.close())

    return handle


if __name__ == "__main__":
    child.serve(start)

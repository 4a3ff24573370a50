"""Held-out play beside training. Exempt from bound, slots, mix and redundancy; never waited for by a swap.

Each result carries the versions that played it.
"""

import asyncio
from collections.abc import Mapping

from rollart.config import Job, TaskSettings
from rollart.control.env_manager import EnvManager, Run
from rollart.control.placing import Placing
from rollart.events import LogHandle
from rollart.ports import TaskSet
from rollart.types import Trajectory, TrajectoryId


class Evaluation:
    def __init__(
        self, job: Job, task_sets: Mapping[str, TaskSet], placing: Placing, manager: EnvManager, log: LogHandle
    ) -> None:
        self._job = job
        self._task_sets = task_sets
        self._placing = placing
        self._manager = manager
        self._log = log
        self._room = asyncio.Semaphore(job.evaluation.concurrency)

    async def run(self, name: str) -> None:
        """Play the held-out tasks once; `name` makes the trajectories' ids."""
        for settings in self._job.tasks:
            numbers = range(self._job.evaluation.episodes)
            played = await asyncio.gather(*(self._episode(name, settings, number) for number in numbers))
            scored = [trajectory for trajectory in played if trajectory.reward is not None]
            spans = [span for trajectory in scored for turn in trajectory.turns for span in turn.completion.spans]
            self._log.emit(
                "eval",
                {
                    "name": name,
                    "task": settings.name,
                    "episodes": len(played),
                    "scored": len(scored),
                    "reward": sum(trajectory.reward or 0.0 for trajectory in scored) / max(1, len(scored)),
                    "versions": [min(span.version for span in spans), max(span.version for span in spans)]
                    if spans
                    else [],
                },
            )

    async def _episode(self, name: str, settings: TaskSettings, number: int) -> Trajectory:
        async with self._room:
            task = self._task_sets[settings.name].held_out(number)
            identity = TrajectoryId(f"{name}-{settings.name}", number, 0)
            return await self._manager.run(
                Run(identity, task, settings, self._placing.place(settings.name), evaluation=True)
            )

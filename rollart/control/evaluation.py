"""Held-out play beside training. Exempt from bound, slots, mix and redundancy; never waited for by a swap.

Each result carries the versions that played it.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence

from rollart.causes import Causes
from rollart.config.settings import TaskSettings
from rollart.control.affinity import AffinityDriver
from rollart.control.attempt import Attempt
from rollart.control.context import JobContext
from rollart.control.draw import draw
from rollart.control.env_manager import EnvManager
from rollart.errors import TaskError
from rollart.events import schema
from rollart.ports import TaskSet
from rollart.types import Status, Trajectory, TrajectoryId


class Evaluation:
    def __init__(
        self, context: JobContext, task_sets: Mapping[str, TaskSet], affinity: AffinityDriver, manager: EnvManager
    ) -> None:
        self._job = context.job
        self._log = context.log
        self._task_sets = task_sets
        self._affinity = affinity
        self._manager = manager
        self._room = asyncio.Semaphore(context.job.evaluation.concurrency)

    async def run(self, name: str) -> None:
        """Play the held-out tasks once (and once more greedily); `name` makes the trajectories' ids."""
        for settings in self._job.tasks:
            await self._play(name, "sampled", settings)
            if self._job.evaluation.greedy:
                await self._play(name, "greedy", settings.model_copy(update={"temperature": 0.0}))

    async def _play(self, name: str, play: str, settings: TaskSettings) -> None:
        numbers = range(self._job.evaluation.episodes)
        group = f"{name}-{play}-{settings.name}"
        played = await asyncio.gather(*(self._episode(group, settings, number) for number in numbers))
        causes = Causes()
        for failed in played:
            if isinstance(failed, TaskError):
                causes.add(str(failed))
            elif failed.status is Status.FAILED:
                causes.add(failed.reason)
        scored = [one for one in played if isinstance(one, Trajectory) and one.reward is not None]
        rewards = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
        mean = math.fsum(rewards) / len(rewards) if rewards else None
        spans = [span for trajectory in scored for turn in trajectory.turns for span in turn.completion.spans]
        self._log.emit(
            schema.Eval(
                name=name,
                task=settings.name,
                play=play,
                episodes=len(played),
                scored=len(scored),
                reward=mean,
                std=None if mean is None else _deviation(rewards, mean),
                rate=bool(rewards) and all(reward in (0.0, 1.0) for reward in rewards),
                failed=causes.total,
                reason=causes.words(),
                versions=[min(span.version for span in spans), max(span.version for span in spans)] if spans else [],
            ),
        )

    async def _episode(self, group: str, settings: TaskSettings, number: int) -> Trajectory | TaskError:
        async with self._room:
            try:
                task = draw(self._task_sets[settings.name], settings.name, number, held_out=True)
            except TaskError as error:
                self._log.emit(schema.DrawFailed(task=settings.name, index=number, reason=str(error), eval=True))
                return error
            order = self._affinity.place(settings.name)
            return await self._manager.run(
                Attempt(TrajectoryId(group, number, 0), task, settings, order, evaluation=True)
            )


def _deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))

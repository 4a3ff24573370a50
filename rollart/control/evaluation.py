"""Held-out play beside training. Exempt from bound, slots, mix and redundancy; never waited for by a swap.

Each result carries the versions that played it.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from rollart.causes import Causes
from rollart.config.settings import TaskSettings
from rollart.control.affinity import AffinityDriver
from rollart.control.context import JobContext
from rollart.control.draw import draw
from rollart.errors import TaskError
from rollart.events import schema
from rollart.ports import TaskSet
from rollart.types import Status, Task, Trajectory, TrajectoryId


class Episodes(Protocol):
    """Who plays an episode. `temperature`: where it is not its task's."""

    async def episode(
        self, id: TrajectoryId, task: Task, order: Sequence[str], temperature: float | None
    ) -> Trajectory: ...


class Evaluation:
    def __init__(
        self, context: JobContext, task_sets: Mapping[str, TaskSet], affinity: AffinityDriver, players: Episodes
    ) -> None:
        self._job = context.job
        self._log = context.log
        self._task_sets = task_sets
        self._affinity = affinity
        self._players = players
        self._room = asyncio.Semaphore(context.job.evaluation.concurrency)

    async def run(self, name: str) -> None:
        """Play the held-out tasks once (and once more greedily); `name` makes the trajectories' ids."""
        for settings in self._job.tasks:
            await self._play(name, "sampled", settings)
            if self._job.evaluation.greedy:
                await self._play(name, "greedy", settings, temperature=0.0)

    async def _play(self, name: str, play: str, settings: TaskSettings, temperature: float | None = None) -> None:
        numbers = range(self._job.evaluation.episodes)
        group = f"{name}-{play}-{settings.name}"
        played = await asyncio.gather(*(self._episode(group, settings.name, number, temperature) for number in numbers))
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

    async def _episode(self, group: str, name: str, number: int, temperature: float | None) -> Trajectory | TaskError:
        async with self._room:
            try:
                task = draw(self._task_sets[name], name, number, held_out=True)
            except TaskError as error:
                self._log.emit(schema.DrawFailed(task=name, index=number, reason=str(error), eval=True))
                return error
            order = self._affinity.place(name)
            return await self._players.episode(TrajectoryId(group, number, 0), task, order, temperature)


def _deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))

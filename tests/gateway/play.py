"""Plays held-out tasks with the real coordinator, engine and gateway, all in this process, and keeps what it played."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator
from rollart.control.world import RolloutWorld
from rollart.events.log import EventLog, LogHandle
from rollart.events.schema import Event
from rollart.launch.checks import check_supported
from rollart.launch.real import real_world
from rollart.ports import Tokenizer
from rollart.store.journal import FileJournal
from rollart.tasks.api import TaskSet, as_observation, text_of
from rollart.types import Batch, Endpoint, Observation, Played, Program, Task, TrajectoryId

TASKS = str(Path(__file__).with_name("talk_tasks.py"))
AGENTS = "tests.gateway.some_agents"
Talk = Callable[[Endpoint, str], Awaitable[str]]
"""An agent: what it does with its endpoint and what the environment has said."""


def job(model: Path, agent: Any = None, *, episodes: int = 4, slots: int = 4, **task: Any) -> dict[str, Any]:
    talk = {"name": "talk", "use": TASKS, "max_turns": 4, "max_tokens": 12, "agent": agent, **task}
    return {
        "name": "talk",
        "model": {"path": str(model), "context_tokens": 512},
        "tasks": [talk],
        "pools": [
            {"name": "cpu", "engines": {"max_batch": 64, "kv_tokens": 65536}},
            {"name": "rooms", "slots": slots},
        ],
        "rewards": {"workers": 1},
        "weights": {"bucket_mb": 1},
        "evaluation": {"episodes": episodes, "concurrency": 512},
        "cluster": {"type": "inline"},
    }


class Kept:
    """A recorder."""

    def __init__(self) -> None:
        self.all: list[Played] = []

    def played(self, played: Played) -> None:
        self.all.append(played)

    def ended(self, group: str, how: str) -> None:
        return None

    def trained(self, batch: Batch) -> None:
        return None


class Here:
    """An environment whose program is a coroutine of this process."""

    def __init__(self, task_set: TaskSet, talk: Talk, task: Task) -> None:
        self._inner = task_set.environment(task)
        self._talk = talk
        self._shown = ""

    async def reset(self) -> Observation:
        observation = as_observation(self._inner.reset())
        self._shown = text_of(observation)
        return observation

    async def step(self, action: str) -> Observation:
        return as_observation(self._inner.step(action))

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        return await self.step(await self._talk(endpoint, self._shown))

    async def close(self) -> None:
        return None


def play(
    raw: dict[str, Any],
    out: Path,
    talk: Talk | None = None,
    tokenizer: Callable[[Tokenizer], Tokenizer] = lambda inner: inner,
) -> tuple[dict[TrajectoryId, Played], list[Event]]:
    """By trajectory. `talk` plays instead of the job's program; `tokenizer` changes the model's."""

    async def main() -> tuple[dict[TrajectoryId, Played], list[Event]]:
        settings = build_job(raw)
        check_supported(settings)
        real = real_world(settings, out, FileJournal(out / "journal"), trains=False)
        kept, events = Kept(), list[Event]()
        log = EventLog(asyncio.get_running_loop().time)
        log.read_by(events.append)
        rollout = real.world.rollout
        assert isinstance(rollout, RolloutWorld)
        rollout = replace(rollout, recorder=kept, tokenizer=tokenizer(rollout.tokenizer))
        if talk is not None:
            rollout = replace(rollout, host=_Host(real.world.task_sets["talk"], talk))  # type: ignore[arg-type]
        world = replace(real.world, rollout=rollout)
        try:
            await Coordinator(settings, world, LogHandle(log)).evaluate()
        finally:
            await real.close()
        return {one.trajectory.id: one for one in kept.all}, events

    out.mkdir(exist_ok=True)
    return asyncio.run(main())


class _Host:
    def __init__(self, task_set: TaskSet, talk: Talk) -> None:
        self._task_set = task_set
        self._talk = talk

    async def open(self, task: Task, trajectory: TrajectoryId) -> Here:
        return Here(self._task_set, self._talk, task)

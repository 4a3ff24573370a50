"""Lockstep: environments and rewards that wait for each other, as synchronous systems have it.

A wrapper around the ports, for the `sync` mode (`rollout.stepping: batched`). Results of reset and step are held
until every open environment has one; rewards start when no environment is open. The circle shrinks when one
closes, so a dead environment does not block the others; a slow one does, which is what is being compared.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollart.config.job import Job
from rollart.config.settings import RewardSettings
from rollart.ports import Env, EnvHost, RewardBackend
from rollart.types import Endpoint, Observation, Program, Score, Task, Trajectory, TrajectoryId


class Lockstep:
    """Who is open, and who has arrived."""

    def __init__(self) -> None:
        self._open = 0
        self._held: list[asyncio.Future[None]] = []
        self._ended: list[asyncio.Future[None]] = []

    def opened(self) -> None:
        self._open += 1

    def closed(self) -> None:
        self._open -= 1
        self._release()

    async def together(self) -> None:
        """Wait until every open environment has arrived here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._held.append(future)
        # Not at once: those that begin at the same time are to open theirs first, or this one would play alone.
        loop.call_soon(self._release)
        await future

    async def over(self) -> None:
        """Wait until no environment is open."""
        if self._open:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ended.append(future)
            await future

    def _release(self) -> None:
        self._held = [future for future in self._held if not future.done()]
        if len(self._held) >= self._open:
            _set(self._held)
        if not self._open:
            _set(self._ended)


def _set(futures: list[asyncio.Future[None]]) -> None:
    waiting = list(futures)
    futures.clear()
    for future in waiting:
        if not future.done():
            future.set_result(None)


Rewards = Callable[[RewardSettings, str], RewardBackend]
"""The backend of these settings: the job's (for no task), or one that a task has of its own."""


@dataclass(frozen=True, slots=True)
class EnvsAndRewards:
    """What plays: environments, the job's rewards, and those that tasks have of their own."""

    host: EnvHost
    rewards: RewardBackend
    task_rewards: dict[str, tuple[RewardBackend, ...]]
    stand_ins: dict[str, RewardBackend]
    """By where a reward stands in the job: those that score while its platform is down."""


def in_lockstep(job: Job, host: EnvHost, rewards: Rewards) -> EnvsAndRewards:
    """These, waiting for each other where the job says so."""
    batched = job.rollout.stepping == "batched"
    lockstep = Lockstep()

    def waiting(settings: RewardSettings, task: str = "") -> RewardBackend:
        backend = rewards(settings, task)
        return BatchedRewards(backend, lockstep, timeout_s=settings.timeout_s) if batched else backend

    own = {task.name: tuple(waiting(reward, task.name) for reward in task.rewards) for task in job.tasks}
    if batched:
        host = BatchedHost(host, lockstep, {task.name: job.wait_s(task)[1:] for task in job.tasks})
    stand_ins = {
        place: waiting(stand_in, job.task_at(place))
        for place, reward in job.asked_rewards.items()
        if (stand_in := reward.stand_in) is not None
    }
    return EnvsAndRewards(host, waiting(job.rewards), own, stand_ins)


class BatchedHost:
    def __init__(self, host: EnvHost, lockstep: Lockstep, limits: Mapping[str, tuple[float, float]]) -> None:
        """`limits`: by domain, seconds for a reset and for a step."""
        self._host = host
        self._lockstep = lockstep
        self._limits = limits

    async def open(self, task: Task, trajectory: TrajectoryId) -> Env:
        env = await self._host.open(task, trajectory)
        self._lockstep.opened()
        return _BatchedEnv(env, self._lockstep, *self._limits[task.domain])


class _BatchedEnv:
    def __init__(self, env: Env, lockstep: Lockstep, reset_s: float, step_s: float) -> None:
        self._env = env
        self._lockstep = lockstep
        self._reset_s = reset_s
        self._step_s = step_s
        self._open = True

    async def reset(self) -> Observation:
        async with asyncio.timeout(self._reset_s):
            observation = await self._env.reset()
        await self._lockstep.together()
        return observation

    async def step(self, action: str) -> Observation:
        async with asyncio.timeout(self._step_s):
            observation = await self._env.step(action)
        await self._lockstep.together()
        return observation

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        return await self._env.play(program, endpoint)  # a program has a pace of its own

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._lockstep.closed()
        await self._env.close()


class BatchedRewards:
    def __init__(self, rewards: RewardBackend, lockstep: Lockstep, *, timeout_s: float) -> None:
        self._rewards = rewards
        self._lockstep = lockstep
        self._timeout_s = timeout_s

    async def score(self, trajectory: Trajectory) -> Score:
        await self._lockstep.over()
        async with asyncio.timeout(self._timeout_s):
            return await self._rewards.score(trajectory)

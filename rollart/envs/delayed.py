"""Environments made slower on purpose: seconds drawn from a distribution, added to each step (`tasks.latency`).

A wrapper around the port, so that any host can be slowed. Each draw depends on nothing but the seed, the trajectory
and the step, so runs of different modes meet the same latencies. Only this trajectory waits; nothing is blocked.
"""

import asyncio
from collections.abc import Mapping
from random import Random

from rollart.config.settings import Spread
from rollart.ports import Env, EnvHost
from rollart.types import Endpoint, Observation, Program, Task, TrajectoryId


def latency_s(spread: Spread, seed: int, trajectory: TrajectoryId, step: int) -> float:
    """How much longer this step takes; steps count from 1."""
    uniform = Random(f"{seed}/{trajectory}/latency/{step}").random()
    return spread.value(min(1.0 - 1e-12, max(1e-12, uniform)))


class DelayedHost:
    def __init__(self, host: EnvHost, latencies: Mapping[str, Spread], *, seed: int) -> None:
        """`latencies`: by domain; environments of other domains stay as they are."""
        self._host = host
        self._latencies = latencies
        self._seed = seed

    async def open(self, task: Task, trajectory: TrajectoryId) -> Env:
        env = await self._host.open(task, trajectory)
        spread = self._latencies.get(task.domain)
        return env if spread is None else _DelayedEnv(env, spread, self._seed, trajectory)


class _DelayedEnv:
    def __init__(self, env: Env, spread: Spread, seed: int, trajectory: TrajectoryId) -> None:
        self._env = env
        self._spread = spread
        self._seed = seed
        self._trajectory = trajectory
        self._steps = 0

    async def reset(self) -> Observation:
        return await self._env.reset()

    async def step(self, action: str) -> Observation:
        await self._wait()
        return await self._env.step(action)

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        await self._wait()
        return await self._env.play(program, endpoint)

    async def _wait(self) -> None:
        self._steps += 1
        await asyncio.sleep(latency_s(self._spread, self._seed, self._trajectory, self._steps))

    async def close(self) -> None:
        await self._env.close()

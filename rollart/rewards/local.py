"""A RewardBackend of functions in a pool of local processes. One that takes too long is killed, with its process; one
that nobody waits for any more is given a moment first, since a new process takes longer than most functions.

Processes are started when a score is asked for and none is free, and end when nobody used them for a while."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rollart.config.settings import RewardSettings
from rollart.errors import ClusterError, RewardError
from rollart.rewards.episodes import Decode, episode_of, score_from_json
from rollart.tasks.api import Episode
from rollart.types import Score, Trajectory
from rollart.workers.launch import Lost, Process
from rollart.workers.link import WorkerFailed, WorkerGone
from rollart.workers.pool import ProcessPool

IDLE_S = 60.0
"""A process that scored nothing for so long ends: after a burst the pool goes back to none."""

GRACE_S = 0.5
"""How long a function may go on for which nobody waits. Its place is taken meanwhile."""


class LocalRewards:
    """`functions` says which function scores each domain, as `module:function`."""

    def __init__(
        self,
        settings: RewardSettings,
        functions: Mapping[str, str],
        decode: Decode,
        log_dir: Path,
        lost: Lost | None = None,
        *,
        name: str = "reward",
        idle_s: float = IDLE_S,
    ) -> None:
        """`name`: of its processes."""
        self._functions = dict(functions)
        self._decode = decode
        self._timeout_s = settings.timeout_s
        self.pool = ProcessPool(
            name,
            "rollart.rewards.worker:RewardWorker",
            self._functions,
            size=settings.workers,
            log_dir=log_dir,
            variables=settings.environment,
            lost=lost,
            idle_s=idle_s,
        )
        self._ending: set[asyncio.Task[None]] = set()
        """Of functions for which nobody waits."""

    async def score(self, trajectory: Trajectory) -> Score:
        """Raises RewardError. The time limit is for the function itself; waiting for a worker does not count."""
        return await self.score_episode(episode_of(trajectory, self._decode))

    async def score_episode(self, episode: Episode) -> Score:
        domain = episode.task.domain
        if domain not in self._functions:
            raise RewardError(f"no reward function is known for the domain {domain}", retryable=False)
        name = self._functions[domain]
        try:
            request = episode.to_json()
        except TypeError as error:
            raise RewardError(f"{name}: the episode cannot be sent: {error}", retryable=False) from error
        try:
            process = await self.pool.acquire()
        except ClusterError as error:
            raise RewardError(f"{name}: no worker: {error}") from error
        cold_start_s, process.start_s = process.start_s, 0.0
        asking = asyncio.get_running_loop().create_task(process.ask("score", request))
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await asyncio.shield(asking)
        except asyncio.CancelledError:
            ending = asyncio.get_running_loop().create_task(self._end(process, asking, GRACE_S))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise
        except TimeoutError:
            await self._end(process, asking, 0.0)
            raise RewardError(f"{name}: took longer than {self._timeout_s:g} s and was killed") from None
        except (WorkerFailed, WorkerGone) as error:
            self.pool.release(process)
            raise RewardError(f"{name}: {error}") from error
        self.pool.release(process)
        if isinstance(answer, dict) and "nonsense" in answer:
            raise RewardError(f"{name}: {answer['nonsense']}", retryable=False)
        return score_from_json(answer, cold_start_s=cold_start_s)

    async def _end(self, process: Process, asking: "asyncio.Task[object]", grace_s: float) -> None:
        """Of a call that nobody waits for: give the process back, which is killed where it still works."""
        try:
            await asyncio.wait([asking], timeout=grace_s)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        finally:
            self.pool.release(process)

    async def close(self) -> None:
        """Kill all workers."""
        await self.pool.close()
        await asyncio.gather(*self._ending)

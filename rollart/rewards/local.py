"""A RewardBackend of functions in a pool of local processes. One that takes too long is killed, with its process."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollart.errors import ClusterError, RewardError
from rollart.rewards.episodes import Decode, episode_of, score_from_json
from rollart.types import Score, Trajectory
from rollart.workers.launch import Lost
from rollart.workers.link import WorkerFailed, WorkerGone
from rollart.workers.pool import ProcessPool


class LocalRewards:
    """`functions` says which function scores each domain, as `module:function`."""

    def __init__(
        self,
        functions: Mapping[str, str],
        *,
        decode: Decode,
        log_dir: str | Path,
        workers: int = 4,
        timeout_s: float = 30.0,
        variables: Sequence[str] = (),
        lost: Lost | None = None,
    ) -> None:
        """`variables`: of our environment, those that workers get beside what every program needs."""
        self._functions = dict(functions)
        self._decode = decode
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            "rollart.rewards.worker:RewardWorker",
            self._functions,
            size=workers,
            log_dir=Path(log_dir),
            name="reward",
            variables=variables,
            lost=lost,
        )

    @property
    def pids(self) -> list[int]:
        """The worker processes now running."""
        return self._pool.pids

    async def score(self, trajectory: Trajectory) -> Score:
        """Raises RewardError. The time limit is for the function itself; waiting for a worker does not count."""
        domain = trajectory.task.domain
        if domain not in self._functions:
            raise RewardError(f"no reward function is known for the domain {domain}", retryable=False)
        name = self._functions[domain]
        request = episode_of(trajectory, self._decode).to_json()
        try:
            process = await self._pool.acquire()
        except ClusterError as error:
            raise RewardError(f"{name}: no worker: {error}") from error
        cold_start_s, process.start_s = process.start_s, 0.0
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await process.ask("score", request)
        except TimeoutError:
            raise RewardError(f"{name}: took longer than {self._timeout_s:g} s and was killed") from None
        except (WorkerFailed, WorkerGone) as error:
            raise RewardError(f"{name}: {error}") from error
        finally:
            self._pool.release(process)
        if isinstance(answer, dict) and "nonsense" in answer:
            raise RewardError(f"{name}: {answer['nonsense']}", retryable=False)
        return score_from_json(answer, cold_start_s=cold_start_s)

    async def close(self) -> None:
        """Kill all workers."""
        await self._pool.close()

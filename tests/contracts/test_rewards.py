"""The reward contract, on simulated workers and functions, and in lockstep with environments."""

from collections.abc import Awaitable, Callable

from rollart.config.settings import RewardSettings, Spread
from rollart.config.sim import SimRewardSettings, SimTaskSettings
from rollart.envs.batched import BatchedRewards, Lockstep
from rollart.events.log import EventLog
from rollart.ports import RewardBackend
from rollart.sim.dice import Dice
from rollart.sim.faults import Faults
from rollart.sim.rewards import SimRewards
from rollart.types import Status, Task, Trajectory, TrajectoryId
from tests.contracts.rewards import RewardBench, RewardContract
from tests.sim.engines import now, run


def trajectory(number: int) -> Trajectory:
    task = Task(id=f"a/{number}", domain="a", index=number)
    return Trajectory(id=TrajectoryId(f"g{number}", 0, 0), task=task, turns=(), status=Status.DONE, born=0, oldest=0)


class TestSimWorkers(RewardContract):
    settings = RewardSettings(type="local", workers=2)

    def wrapped(self, backend: RewardBackend) -> RewardBackend:
        return backend

    def play(self, work: Callable[[RewardBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            log = EventLog(now)
            tasks = {"a": SimTaskSettings(reward_s=Spread(kind="lognormal", mean=2, sigma=1))}
            simulated = SimRewards(self.settings, SimRewardSettings(), tasks, Dice(0), Faults((), log))
            await work(RewardBench(backend=self.wrapped(simulated), trajectory=trajectory, places=2))

        run(awaited)


class TestSimFunctions(TestSimWorkers):
    settings = RewardSettings(type="http", url="http://x", concurrency=2)


class TestBatchedRewards(TestSimWorkers):
    def wrapped(self, backend: RewardBackend) -> RewardBackend:
        return BatchedRewards(backend, Lockstep(), timeout_s=1000.0)

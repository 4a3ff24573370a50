"""Simulated rewards: dedicated workers, or serverless functions with cold starts that scale to zero."""

import asyncio
from collections.abc import Mapping

from rollart.config.settings import RewardSettings
from rollart.config.sim import FaultSettings, SimRewardSettings, SimTaskSettings
from rollart.errors import RewardError
from rollart.sim.dice import Dice
from rollart.sim.faults import Faults, Work, Workplace
from rollart.types import Score, Trajectory


class SimRewards:
    """One class for both: a dedicated worker is an instance that is always warm."""

    def __init__(
        self,
        settings: RewardSettings,
        sim: SimRewardSettings,
        tasks: Mapping[str, SimTaskSettings],
        dice: Dice,
        faults: Faults,
    ) -> None:
        self._serverless = settings.type == "http"
        self._sim = sim
        self._tasks = tasks
        self._dice = dice
        self._loop = asyncio.get_running_loop()
        self._warm: list[float] = []
        """When each idle instance became idle; the latest last."""
        self._work = Workplace(faults, ("reward_error", "reward_timeout"), _strike)

    async def score(self, trajectory: Trajectory) -> Score:
        key = str(trajectory.id)
        settings = self._tasks[trajectory.task.domain]
        busy_s = self._dice.draw(settings.reward_s, f"{key}/reward")
        cold_s = self._cold_start_s()
        await self._work.do(Work(key, cold_s + busy_s))
        if self._serverless:
            self._warm.append(self._loop.time())
        return Score(value=self._value(trajectory, settings, key), cold_start_s=cold_s, busy_s=busy_s)

    def _cold_start_s(self) -> float:
        """Take the instance used last, which is the warmest; start one where none is warm."""
        if not self._serverless:
            return 0.0
        oldest_s = self._loop.time() - self._sim.idle_s
        self._warm = [since_s for since_s in self._warm if since_s >= oldest_s]
        if self._warm:
            self._warm.pop()
            return 0.0
        return self._sim.cold_start_s

    def _value(self, trajectory: Trajectory, settings: SimTaskSettings, key: str) -> float:
        """1 or 0; the chance of 1 rises with the weights that played."""
        version = trajectory.born or 0
        chance = settings.success + settings.success_gain * (1.0 - 2.718281828 ** (-version / settings.success_steps))
        return 1.0 if self._dice.uniform(f"{key}/success") < chance else 0.0


def _strike(work: Work, fault: FaultSettings) -> None:
    if fault.kind == "reward_error":
        work.fail(RewardError("the function failed (simulated)"))
    else:
        work.hang()

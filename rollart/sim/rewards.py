"""Simulated rewards: dedicated workers, serverless functions with cold starts that scale to zero, and judges, which are
simulated engines that batch."""

import asyncio
from collections import deque
from collections.abc import Mapping

import numpy as np

from rollart.config.settings import RewardSettings
from rollart.config.sim import FaultSettings, SimJudgeSettings, SimRewardSettings, SimTaskSettings
from rollart.errors import AnswerError, EngineError, RequestError, RewardError
from rollart.ports import FrozenModel
from rollart.sim.dice import Dice
from rollart.sim.faults import PLATFORM, Faults, Work, Workplace
from rollart.sim.learning import SimLearning
from rollart.types import GenerateRequest, Sampling, Score, Tokens, Trajectory

_TOKENS: Tokens = np.zeros(1 << 20, dtype=np.int32)


class SimRewards:
    """One class for both: a dedicated worker is an instance that is always warm."""

    def __init__(
        self,
        settings: RewardSettings,
        sim: SimRewardSettings,
        tasks: Mapping[str, SimTaskSettings],
        dice: Dice,
        faults: Faults,
        learning: SimLearning | None = None,
    ) -> None:
        self._learning = learning or SimLearning()
        self._serverless = settings.type == "http"
        self._sim = sim
        self._tasks = tasks
        self._dice = dice
        self._loop = asyncio.get_running_loop()
        self._warm: deque[float] = deque()
        """When each idle instance became idle; the latest last."""
        self._places = None if sim.quota is None or not self._serverless else asyncio.Semaphore(sim.quota)
        self._faults = faults
        self._work = Workplace(faults, ("reward_error", "reward_timeout"), _strike)
        if self._serverless:
            faults.on("reward_outage", faults.stop_platform)

    async def score(self, trajectory: Trajectory) -> Score:
        if self._places is None:
            return await self._score(trajectory)
        async with self._places:
            return await self._score(trajectory)

    async def _score(self, trajectory: Trajectory) -> Score:
        key = str(trajectory.id)
        settings = self._tasks[trajectory.task.domain]
        self._must_answer(calls=0)
        busy_s = self._dice.draw(settings.reward_s, f"{key}/reward")
        cold_s = self._cold_start_s()
        await self._work.do(Work(key, cold_s + busy_s))
        self._must_answer(calls=1)
        if self._serverless:
            self._warm.append(self._loop.time())
        value = _value(trajectory, settings, self._dice, self._learning)
        return Score(value=value, cold_start_s=cold_s, busy_s=busy_s)

    def _must_answer(self, *, calls: int) -> None:
        """A platform that is down takes its instances with it."""
        if self._serverless and self._faults.broken(*PLATFORM):
            self._warm.clear()
            raise RewardError("nobody answers (simulated)", answered=False, calls=calls)

    def _cold_start_s(self) -> float:
        """Take the instance used last, which is the warmest; start one where none is warm."""
        if not self._serverless:
            return 0.0
        oldest_s = self._loop.time() - self._sim.idle_s
        while self._warm and self._warm[0] < oldest_s:
            self._warm.popleft()
        if self._warm:
            self._warm.pop()
            return 0.0
        return self._sim.cold_start_s


def judge_domain(pool: str) -> str:
    """Under which the engines of a judge know how long its answers are."""
    return f"judge of {pool}"


class SimJudge:
    """Reads the whole episode behind its rubric, and answers, once for each vote."""

    def __init__(
        self,
        settings: RewardSettings,
        sim: SimJudgeSettings,
        model: FrozenModel,
        tasks: Mapping[str, SimTaskSettings],
        dice: Dice,
        learning: SimLearning | None = None,
    ) -> None:
        assert settings.pool is not None
        self._settings = settings
        self._sim = sim
        self._model = model
        self._tasks = tasks
        self._dice = dice
        self._learning = learning or SimLearning()
        self._domain = judge_domain(settings.pool)
        self._asked = 0

    async def score(self, trajectory: Trajectory) -> Score:
        key, votes = str(trajectory.id), self._settings.votes
        episode = sum(len(turn.context) + len(turn.completion.tokens) for turn in trajectory.turns)
        rubric = self._dice.count(self._sim.prompt_tokens, f"{self._domain}/rubric")
        busy_s = 0.0
        for vote in range(votes):
            self._asked += 1
            request = GenerateRequest(
                id=f"{key}/judge-{self._asked}",
                session=key,
                domain=self._domain,
                turn=vote,
                prompt=(_TOKENS[:rubric], _TOKENS[:episode]),
                prompt_tokens=rubric + episode,
                sampling=Sampling(max_tokens=self._settings.max_tokens),
                last=vote + 1 == votes,
            )
            try:
                completion = await self._model.generate(request)
            except (EngineError, RequestError, AnswerError) as error:
                raise RewardError(str(error), calls=vote + 1) from error
            busy_s += completion.busy_s + completion.prefill_busy_s
        value = _value(trajectory, self._tasks[trajectory.task.domain], self._dice, self._learning)
        return Score(value=value, busy_s=busy_s, calls=votes)


def _value(trajectory: Trajectory, settings: SimTaskSettings, dice: Dice, learning: SimLearning) -> float:
    """1 or 0; the chance of 1 rises with the weights that played."""
    chance = settings.chance(learning.steps(trajectory.born or 0))
    return 1.0 if dice.uniform(f"{trajectory.id}/success") < chance else 0.0


def _strike(work: Work, fault: FaultSettings) -> None:
    if fault.kind == "reward_error":
        work.fail(RewardError("the function failed (simulated)"))
    else:
        work.hang()

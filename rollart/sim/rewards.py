"""Simulated rewards: dedicated workers, serverless functions with cold starts that scale to zero, and judges, which are
simulated engines that batch."""

import asyncio
from collections.abc import Mapping

from rollart.config.settings import RewardSettings
from rollart.config.sim import FaultSettings, SimJudgeSettings, SimRewardSettings, SimTaskSettings
from rollart.errors import AnswerError, EngineError, RequestError, RewardError
from rollart.ports import FrozenModel
from rollart.sim.dice import Dice
from rollart.sim.faults import PLATFORM, Faults, Work, Workplace
from rollart.sim.learning import SimLearning
from rollart.sim.platform import Platform
from rollart.sim.tokens import blank_tokens
from rollart.sim.traffic import SharedLink
from rollart.types import GenerateRequest, Sampling, Score, Trajectory


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
        calls: SharedLink | None = None,
        name: str = "rewards",
    ) -> None:
        """`calls`: the link that they go over, where that costs anything."""
        self._learning = learning or SimLearning()
        self._calls = calls
        self._serverless = settings.type == "http"
        self._tasks = tasks
        self._dice = dice
        self._loop = asyncio.get_running_loop()
        self._platform = Platform(sim, dice, name, self._loop.time()) if self._serverless else None
        self._faults = faults
        self._work = Workplace(faults, ("reward_error", "reward_timeout"), _strike)
        if self._serverless:
            faults.on("reward_outage", faults.stop_platform)

    async def score(self, trajectory: Trajectory) -> Score:
        key = str(trajectory.id)
        settings = self._tasks[trajectory.task.domain]
        self._must_answer(calls=0)
        busy_s = self._dice.draw(settings.reward_s, f"{key}/reward")
        if self._calls is not None:
            await self._calls.transfer(1e6 * self._dice.draw(settings.reward_mb, f"{key}/reward_mb"))
        now_s, cold_s = self._loop.time(), 0.0
        if self._platform is not None:
            start_s, cold_s = self._platform.take(now_s, busy_s)
            if start_s > now_s:
                await asyncio.sleep(start_s - now_s)
        await self._work.do(Work(key, cold_s + busy_s))
        self._must_answer(calls=1)
        value = _value(trajectory, settings, self._dice, self._learning)
        return Score(value=value, cold_start_s=cold_s, busy_s=busy_s)

    def _must_answer(self, *, calls: int) -> None:
        """A platform that is down takes its instances with it."""
        if self._platform is not None and self._faults.broken(*PLATFORM):
            self._platform.stop()
            raise RewardError("nobody answers (simulated)", answered=False, calls=calls)


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
                prompt=(blank_tokens(rubric), blank_tokens(episode)),
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

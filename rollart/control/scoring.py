"""Asks for the reward of a finished trajectory, the moment it ends: of each reward of its task, and sums them.

Every reward has its own place in a queue, limit, retries and back-off, so one that fails is asked again and the others
are not. Invariant: an attempt that ended well has exactly one `reward` event, with the sum.
"""

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rollart.config.settings import RewardSettings
from rollart.control.attempt import Attempt
from rollart.control.context import JobContext
from rollart.control.movement import Movement
from rollart.control.waits import WaitList
from rollart.errors import RewardError, boundary
from rollart.events import schema
from rollart.policy.redundancy import backoff_s
from rollart.ports import RewardBackend
from rollart.types import Score, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """One reward, and how many may ask for it at a time. Waiting for one's turn does not count towards its limit."""

    backend: RewardBackend
    label: str
    retries: int
    backoff_s: float
    waits: WaitList
    places: asyncio.Semaphore


class Scorer:
    def __init__(
        self,
        context: JobContext,
        movement: Movement,
        rewards: RewardBackend,
        task_rewards: Mapping[str, Sequence[RewardBackend]],
    ) -> None:
        """`rewards`: of tasks that have none of their own."""
        job, waits = context.job, context.waits
        self._log = context.log
        self._movement = movement
        self._loop = asyncio.get_running_loop()
        self._queueing = waits.on("a reward slot")
        alone = job.rollout.stepping == "asynchronous"
        """In lockstep a wait includes the others' time; the wrapper around the ports keeps the limits there."""

        def source(what: str, settings: RewardSettings, backend: RewardBackend) -> _Source:
            limit_s = settings.timeout_s if alone else None
            places = asyncio.Semaphore(settings.at_once)
            return _Source(
                backend, settings.label, settings.retries, settings.backoff_s, waits.on(what, limit_s), places
            )

        shared = source("reward", job.rewards, rewards)
        self._sources: dict[str, tuple[_Source, ...]] = {
            task.name: tuple(
                source(f"reward {settings.label} of {task.name}", settings, backend)
                for settings, backend in zip(task.rewards, task_rewards[task.name], strict=True)
            )
            if task.rewards
            else (shared,)
            for task in job.tasks
        }

    async def score(self, attempt: Attempt, trajectory: Trajectory) -> Score:
        """Raises RewardError when one of its rewards cannot be had."""
        attempt.stage = "reward"
        sources = self._sources[attempt.task.domain]
        if attempt.settings.rewards:
            calls = await _together([self._ask(attempt, trajectory, source) for source in sources])
            score = _sum(attempt.settings.rewards, [score for score, _ in calls])
        else:
            calls = [await self._ask(attempt, trajectory, sources[0])]
            score = calls[0][0]
        attempt.cause = self._log.emit(
            schema.Reward(
                id=attempt.key,
                value=score.value,
                s=round(max(call.s for _, call in calls), 6),
                busy_s=round(score.busy_s, 6),
                cold_s=round(score.cold_start_s, 6),
                tries=max(call.tries for _, call in calls),
                made=sum(call.made for _, call in calls),
                parts=dict(score.parts),
                calls=[call for _, call in calls] if attempt.settings.rewards else [],
                cause=attempt.cause,
            ),
        )
        return score

    async def _ask(self, attempt: Attempt, trajectory: Trajectory, source: _Source) -> tuple[Score, schema.RewardCall]:
        """One reward; again after a back-off where that may help."""
        tries, asked_s, spent_s = 1, self._loop.time(), 0.0
        while True:
            await self._queueing.guard(attempt.key, source.places.acquire())
            self._movement.moved(attempt.mover)
            began_s = attempt.mover.moved_s
            try:
                with boundary(RewardError, "reward"):
                    score = _checked(await source.waits.guard(attempt.key, source.backend.score(trajectory)))
                return score, schema.RewardCall(
                    s=round(self._loop.time() - began_s, 6),
                    busy_s=round(score.busy_s, 6),
                    cold_s=round(score.cold_start_s, 6),
                    tries=tries,
                    made=score.calls,
                )
            except RewardError as error:
                attempt.cause = self._log.emit(
                    schema.RewardFailed(
                        id=attempt.key,
                        reason=str(error),
                        reward=source.label if attempt.settings.rewards else "",
                        s=round(self._loop.time() - began_s, 6),
                        made=error.calls,
                        busy_s=round(error.busy_s, 6),
                        cause=attempt.cause,
                    )
                )
                if tries > source.retries or not error.retryable:
                    raise
            finally:
                source.places.release()
                spent_s += self._loop.time() - began_s
                if attempt.notes is not None:
                    attempt.notes.scoring(asked_s, spent_s, self._loop.time())
            await asyncio.sleep(backoff_s(source.backoff_s, tries))
            tries += 1


async def _together(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All answers. The first that fails ends the others, in their order."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()  # or its error, though one before it is still being asked
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sum(rewards: Sequence[RewardSettings], scores: Sequence[Score]) -> Score:
    """Each times its weight; what each gave is a part, and so are its own parts under its name."""
    parts: dict[str, float] = {}
    for reward, score in zip(rewards, scores, strict=True):
        parts[reward.label] = reward.weight * score.value
        parts |= {f"{reward.label}/{name}": value for name, value in score.parts.items()}
    return Score(
        value=math.fsum(parts[reward.label] for reward in rewards),
        parts=parts,
        cold_start_s=max(score.cold_start_s for score in scores),
        busy_s=math.fsum(score.busy_s for score in scores),
        calls=sum(score.calls for score in scores),
    )


def _checked(score: object) -> Score:
    """User code may return anything."""
    if not isinstance(score, Score):
        raise RewardError(f"returned {type(score).__name__}, not a Score", retryable=False)
    if not math.isfinite(score.value):
        raise RewardError(f"returned {score.value}, which is not a finite number", retryable=False)
    return score

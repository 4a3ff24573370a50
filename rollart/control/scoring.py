"""Asks for the reward of a finished trajectory, the moment it ends: of each reward of its task, and sums them.

Every reward has its own place in a queue, limit, retries and back-off, so one that fails is asked again and the others
are not. While nobody answers, `on_outage` says what becomes of trajectories. Invariant: an attempt that ended well has
exactly one `reward` event, with the sum; one that failed here has one `reward.given_up` for each reward that it lacks.
"""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rollart.config.settings import RewardSettings
from rollart.control.attempt import Attempt
from rollart.control.context import JobContext
from rollart.control.movement import Movement
from rollart.control.waits import WaitList
from rollart.errors import RewardError, boundary
from rollart.events import schema
from rollart.policy.outage import Budget, Outage
from rollart.policy.redundancy import backoff_s
from rollart.ports import RewardBackend
from rollart.types import Score, Trajectory

if TYPE_CHECKING:
    from rollart.control.world import RolloutWorld

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Source:
    """One reward, and how many may ask for it at a time. Waiting for one's turn does not count towards its limit."""

    place: str
    """Where it stands in the job."""
    settings: RewardSettings
    retries: int
    backoff_s: float
    backend: RewardBackend
    waits: WaitList
    places: asyncio.Semaphore
    down: WaitList
    outage: Outage = field(default_factory=Outage)
    line: asyncio.Lock = field(default_factory=asyncio.Lock)
    """While they are down: held by the one that looks. The others stand in line, each at its end after a look."""
    stand_in: "_Source | None" = None

    @property
    def sends_away(self) -> bool:
        """It is down, and trajectories wait or are scored elsewhere."""
        return self.outage.is_down and self.settings.on_outage != "fail"


@dataclass(slots=True)
class _Asked:
    """How far one trajectory has come with one reward."""

    since_s: float
    budget: Budget
    tries: int = 0
    """Made."""
    spent_s: float = 0.0
    """In calls."""
    sent_away_s: float | None = None


Answer = tuple[Score, schema.RewardCall]


class Scorer:
    def __init__(self, context: JobContext, movement: Movement, world: "RolloutWorld") -> None:
        job, waits = context.job, context.waits
        self._context = context
        self._log = context.log
        self._movement = movement
        self._letters = world.dead_letters
        self._told_full = False
        self._loop = asyncio.get_running_loop()
        self._queueing = waits.on("a reward slot")
        alone = job.rollout.stepping == "asynchronous"
        """In lockstep a wait includes the others' time; the wrapper around the ports keeps the limits there."""

        def source(place: str, what: str, settings: RewardSettings, backend: RewardBackend) -> _Source:
            stand_in = settings.stand_in
            return _Source(
                place=place,
                settings=settings,
                retries=settings.retries,
                backoff_s=settings.backoff_s,
                backend=backend,
                waits=waits.on(what, settings.timeout_s if alone else None),
                places=asyncio.Semaphore(settings.at_once),
                down=waits.on(f"{what}, whose platform is down"),
                stand_in=None
                if stand_in is None
                else source(place, f"{what}, in local workers", stand_in, world.stand_ins[place]),
            )

        self._sources: dict[str, tuple[_Source, ...]] = {}
        shared: tuple[_Source, ...] = ()
        for position, task in enumerate(job.tasks):
            if not task.rewards:
                shared = shared or (source("rewards", "reward", job.rewards, world.rewards),)
            self._sources[task.name] = (
                shared
                if not task.rewards
                else tuple(
                    source(
                        f"tasks.{position}.rewards.{number}",
                        f"reward {settings.label} of {task.name}",
                        settings,
                        world.task_rewards[task.name][number],
                    )
                    for number, settings in enumerate(task.rewards)
                )
            )

    async def score(self, attempt: Attempt, trajectory: Trajectory) -> Score:
        """Raises RewardError when one of its rewards cannot be had."""
        attempt.stage = "reward"
        sources = self._sources[attempt.task.domain]
        if attempt.settings.rewards:
            calls = await _together([self._ask(attempt, trajectory, source) for source in sources])
            score = summed(attempt.settings.rewards, [score for score, _ in calls])
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
                local=any(call.local for _, call in calls),
                calls=[call for _, call in calls] if attempt.settings.rewards else [],
                cause=attempt.cause,
            ),
        )
        return score

    async def _ask(self, attempt: Attempt, trajectory: Trajectory, source: _Source) -> Answer:
        """One reward; again after a back-off where that may help, and later or elsewhere while its platform is down."""
        asked = _Asked(self._loop.time(), Budget(source.retries))
        try:
            while True:
                if source.sends_away:
                    found = await self._sent_away(attempt, trajectory, source, asked)
                    if found is not None:
                        return found
                    continue
                try:
                    return await self._call(attempt, trajectory, source, asked)
                except RewardError as error:
                    if not error.retryable or asked.budget.is_spent:
                        raise
                    if asked.budget.is_silent:
                        self._note_outage(attempt, source, asked, error)
                        if not source.sends_away:
                            raise
                    elif asked.budget.tries > source.retries and source.settings.on_outage == "fail":
                        raise
                if not source.sends_away:
                    await asyncio.sleep(backoff_s(source.backoff_s, asked.budget.tries))
        except RewardError as error:
            self._give_up(attempt, trajectory, source, asked, error)
            raise

    async def _call(
        self, attempt: Attempt, trajectory: Trajectory, source: _Source, asked: _Asked, *, local: bool = False
    ) -> Answer:
        """One try. Raises RewardError."""
        await self._queueing.guard(attempt.key, source.places.acquire())
        self._movement.moved(attempt.mover)
        began_s = attempt.mover.moved_s
        asked.tries += 1
        try:
            with boundary(RewardError, "reward"), source.waits.during(attempt.key):
                score = _checked(await source.backend.score(trajectory))
            self._was_answered(attempt, source)
            return score, schema.RewardCall(
                s=round(self._loop.time() - began_s, 6),
                busy_s=round(score.busy_s, 6),
                cold_s=round(score.cold_start_s, 6),
                tries=asked.tries,
                made=0 if local else score.calls,
                local=local,
            )
        except RewardError as error:
            attempt.cause = self._log.emit(
                schema.RewardFailed(
                    id=attempt.key,
                    reason=str(error),
                    reward=source.settings.label if attempt.settings.rewards else "",
                    s=round(self._loop.time() - began_s, 6),
                    made=0 if local else error.calls,
                    busy_s=round(error.busy_s, 6),
                    cause=attempt.cause,
                )
            )
            if _answered(error):
                asked.budget.answered_badly()
                self._was_answered(attempt, source)
            else:
                asked.budget.unanswered(began_s, self._loop.time(), source.outage)
            raise
        finally:
            source.places.release()
            asked.spent_s += self._loop.time() - began_s
            if attempt.notes is not None:
                attempt.notes.scoring(asked.since_s, asked.spent_s, self._loop.time())

    # --- while a platform is down -----------------------------------------------------------------------------

    def _note_outage(self, attempt: Attempt, source: _Source, asked: _Asked, error: RewardError) -> None:
        """This one was not answered in all its tries: nobody is there, unless others were answered."""
        if source.outage.gave_up(asked.budget.silent_s, self._loop.time()):
            policy = source.settings.on_outage
            cause = self._log.emit(
                schema.RewardOutage(reward=source.place, policy=policy, reason=str(error), cause=attempt.cause)
            )
            then = {
                "fail": "trajectories that get no answer fail (on_outage)",
                "wait": f"trajectories wait for up to {source.settings.outage_s:g} s (on_outage)",
                "local": "local workers score meanwhile (on_outage)",
            }
            self._context.warn(f"{source.place}: nobody answers any more: {error}; {then[policy]}", cause)

    def _was_answered(self, attempt: Attempt, source: _Source) -> None:
        down_s = source.outage.answered(self._loop.time())
        if down_s is not None:
            self._log.emit(schema.RewardBack(reward=source.place, s=round(down_s, 6), cause=attempt.cause))

    async def _sent_away(
        self, attempt: Attempt, trajectory: Trajectory, source: _Source, asked: _Asked
    ) -> Answer | None:
        """Score it elsewhere, or wait; one looks from time to time whether they are back. None: they may be."""
        asked.budget.silent = 0
        if source.stand_in is None:
            return await self._wait(attempt, trajectory, source, asked)
        if not source.line.locked() and self._loop.time() >= source.outage.due_s:
            async with source.line:
                return await self._look(attempt, trajectory, source, asked)
        tries = 1
        while True:
            try:
                return await self._call(attempt, trajectory, source.stand_in, asked, local=True)
            except RewardError as error:
                if tries > source.retries or not error.retryable:
                    raise
            await asyncio.sleep(backoff_s(source.backoff_s, tries))
            tries += 1

    async def _wait(self, attempt: Attempt, trajectory: Trajectory, source: _Source, asked: _Asked) -> Answer | None:
        """Stand in line; look, when it is this one's turn and time. After `outage_s` it looks once more by itself, as
        they may be back since the last look; raises RewardError where they are not."""
        if asked.sent_away_s is None:
            asked.sent_away_s = self._loop.time()
        until_s = asked.sent_away_s + source.settings.outage_s
        try:
            async with asyncio.timeout_at(until_s):
                await source.down.guard(attempt.key, source.line.acquire())
        except TimeoutError:
            return await self._last_look(attempt, trajectory, source, asked)
        try:
            if not source.outage.is_down:
                return None
            try:
                async with asyncio.timeout_at(until_s):
                    due_s = source.outage.due_s
                    await source.down.guard(attempt.key, asyncio.sleep(max(0.0, due_s - self._loop.time())))
            except TimeoutError:
                return await self._last_look(attempt, trajectory, source, asked)
            return await self._look(attempt, trajectory, source, asked)
        finally:
            source.line.release()

    async def _last_look(
        self, attempt: Attempt, trajectory: Trajectory, source: _Source, asked: _Asked
    ) -> Answer | None:
        found = await self._look(attempt, trajectory, source, asked) if source.outage.is_down else None
        if found is None and source.outage.is_down:
            raise _too_long(source)
        return found

    async def _look(self, attempt: Attempt, trajectory: Trajectory, source: _Source, asked: _Asked) -> Answer | None:
        """One try, whose failure counts for nothing where nobody answers it."""
        try:
            return await self._call(attempt, trajectory, source, asked)
        except RewardError as error:
            if not error.retryable or asked.budget.is_spent:
                raise
            asked.budget.silent = 0
            if not _answered(error):
                source.outage.looked_in_vain(self._loop.time())
        return None

    def _give_up(
        self, attempt: Attempt, trajectory: Trajectory, source: _Source, asked: _Asked, error: RewardError
    ) -> None:
        """Note that this reward cannot be had, and keep its request."""
        label, kept = source.settings.label if attempt.settings.rewards else "", False
        if self._letters is not None:
            kept = self._letters.keep(trajectory, reward=label, reason=str(error), tries=asked.tries)
            if not kept and not self._told_full:
                self._told_full = True
                self._context.warn("the file of dead letters has no room: further reward calls that fail are not kept")
        attempt.cause = self._log.emit(
            schema.RewardGivenUp(
                id=attempt.key, reason=str(error), tries=asked.tries, kept=kept, reward=label, cause=attempt.cause
            )
        )


def _answered(error: RewardError) -> bool:
    return error.answered and not isinstance(error.__cause__, TimeoutError)


def _too_long(source: _Source) -> RewardError:
    return RewardError(
        f"{source.place}: nobody answered for {source.settings.outage_s:g} s (outage_s)", answered=False, calls=0
    )


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


def summed(rewards: Sequence[RewardSettings], scores: Sequence[Score]) -> Score:
    """Each times its weight; what each gave is a part, and so are its own parts under its name."""
    parts: dict[str, float] = {}
    for reward, score in zip(rewards, scores, strict=True):
        parts[reward.label] = reward.weight * score.value
        parts |= {f"{reward.label}/{name}": value for name, value in score.parts.items()}
    return Score(
        value=math.fsum(parts[reward.label] for reward in rewards),
        parts=parts,
        cold_start_s=max((score.cold_start_s for score in scores), default=0.0),
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

"""One coroutine per trajectory: environment, model and reward, each at its own pace.

EnvManager opens a single-use environment and lets an Agent play in it through a Session. Any error that crosses a
port ends this attempt with a status and a reason; siblings go on. A bad rollout is data, not a crash.
"""

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rollart.config.job import Job
from rollart.config.settings import TaskSettings
from rollart.control.attempt import Attempt
from rollart.control.context import JobContext
from rollart.control.movement import Movement
from rollart.control.notes import Notes
from rollart.control.render import delta
from rollart.control.scoring import Scorer
from rollart.control.waits import WaitList, Waits
from rollart.control.world import RolloutWorld
from rollart.errors import AgentError, BoundaryError, EnvCrashed, EnvError, EnvOverLimit, as_utf8, boundary
from rollart.events import schema
from rollart.policy.admission import is_stale
from rollart.ports import Env, Tokenizer
from rollart.types import (
    SCORED,
    Completion,
    GenerateRequest,
    Observation,
    Sampling,
    Score,
    Status,
    Tokens,
    Trajectory,
)

if TYPE_CHECKING:
    from rollart.control.fleet import Fleet
    from rollart.control.proxy import Proxy

_STEP = boundary(EnvError, "env.step")
_RENDER = boundary(EnvError, "what the environment said")
_AGENT = boundary(AgentError, "agent")


@dataclass(slots=True, eq=False)
class Session:
    """An agent's hands: the environment, the model, and the record of what happened."""

    manager: "EnvManager"
    attempt: Attempt
    env: Env

    @property
    def tokenizer(self) -> Tokenizer:
        return self.manager.tokenizer

    async def reset(self) -> Observation:
        manager, attempt = self.manager, self.attempt
        began_s = manager.loop.time()
        attempt.stage = "env.reset"
        with boundary(EnvError, "env.reset"), manager.env_calls(attempt).reset.during(attempt.key):
            observation = checked(await self.env.reset())
        attempt.stage = "agent"
        manager.movement.moved(attempt.mover)
        if attempt.notes is not None:
            attempt.notes.reset_s = manager.loop.time() - began_s
            attempt.notes.shown = observation.messages
        return observation

    async def step(self, action: str) -> Observation:
        """Act, and book the reward on the last turn."""
        manager, attempt = self.manager, self.attempt
        began_s = manager.loop.time()
        if attempt.notes is not None:
            attempt.notes.text = action
        attempt.stage = "env.step"
        with _STEP, manager.env_calls(attempt).step.during(attempt.key):
            observation = checked(await self.env.step(action))
        attempt.stage = "agent"
        self.stepped(observation, began_s)
        return observation

    def stepped(self, observation: Observation, began_s: float) -> None:
        """The environment has answered an answer that it was given at `began_s`."""
        attempt = self.attempt
        self.manager.movement.moved(attempt.mover)
        attempt.settle(observation.reward, attempt.mover.moved_s - began_s)
        if attempt.notes is not None:
            attempt.notes.shown = observation.messages

    async def generate(
        self, context: Tokens, *, fresh: bool, max_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> Completion | None:
        """One answer to the prompt grown by `context`; None when turns or context have run out. `max_tokens` and
        `stop` may end it sooner than the job would."""
        manager, attempt, settings = self.manager, self.attempt, self.attempt.settings
        if attempt.said is not None:  # an environment that was not asked in between
            attempt.settle()
        turn, max_turns = len(attempt.turns), settings.max_turns
        prefix = attempt.prefix.extended(context, fresh=fresh)
        room = manager.context_tokens - prefix.length
        if room < 1 and not turn:
            raise EnvError(
                f"the first prompt has {prefix.length} tokens or more, which leaves none of model.context_tokens "
                f"{manager.context_tokens} for an answer: raise it, or let the environment say less"
            )
        if turn >= max_turns or room < 1:
            return None
        serving = manager.fleet.serving
        if manager.live and not attempt.evaluation and is_stale(attempt.born, serving, manager.bound):
            attempt.stop(Status.STALE, "too old before its next turn")
            await asyncio.sleep(0)  # the cancellation arrives here
        request = GenerateRequest(
            id=f"{attempt.key}/{turn}",
            session=attempt.key,
            domain=attempt.task.domain,
            turn=turn,
            prompt=prefix.pieces,
            prompt_tokens=prefix.length,
            sampling=manager.sampling(settings, room, max_tokens, stop),
            min_version=attempt.min_version,
            last=turn + 1 >= max_turns,
        )
        if attempt.born is None:
            attempt.born = serving
        began_s = manager.loop.time()
        attempt.stage = "generate"
        completion, attempt.last_engine, attempt.cause, sent_s = await manager.proxy.generate(
            request, attempt.order, attempt.last_engine, attempt.cause
        )
        attempt.stage = "agent"
        if turn == 0:
            attempt.born = completion.spans[0].version
        attempt.min_version = completion.spans[-1].version
        attempt.prefix = prefix.answered(completion)
        manager.movement.moved(attempt.mover)
        attempt.said = (context, fresh, completion, attempt.mover.moved_s - began_s, sent_s - began_s)
        return completion


class Agent(Protocol):
    """Plays one environment to its end. Returns DONE or TRUNCATED."""

    async def play(self, session: Session) -> Status: ...


class TurnAgent:
    """The default: render, generate, step."""

    async def play(self, session: Session) -> Status:
        observation = await session.reset()
        tokenizer = session.tokenizer
        completion: Completion | None = None
        while not observation.done:
            if observation.truncated:
                return Status.TRUNCATED
            with _RENDER:
                context, fresh = delta(tokenizer, observation, completion)
            completion = await session.generate(context, fresh=fresh)
            if completion is None:
                return Status.TRUNCATED
            observation = await session.step(tokenizer.decode(completion.tokens))
        return Status.DONE


class EnvCalls(NamedTuple):
    """The waits for environments of one task. Tasks of the same limits share them."""

    open: WaitList
    reset: WaitList
    step: WaitList


def _env_calls(waits: Waits, job: Job, task: TaskSettings, *, alone: bool) -> EnvCalls:
    open_s, reset_s, step_s = job.wait_s(task)

    def on(call: str, given_s: float | None, limit_s: float | None) -> WaitList:
        return waits.on(f"env.{call}" if given_s is None else f"env.{call} of {task.name}", limit_s)

    own = task.limits
    return EnvCalls(
        on("open", own.open_s, open_s),
        on("reset", own.reset_s, reset_s if alone else None),
        on("step", own.step_s, step_s if alone else None),
    )


class EnvManager:
    """Runs attempts. Keeps nothing of an attempt that has ended."""

    def __init__(self, context: JobContext, world: RolloutWorld, fleet: "Fleet", proxy: "Proxy") -> None:
        job, limits, waits = context.job, context.job.limits, context.waits
        self._context = context
        self.job = job
        self._log = context.log
        self.loop = asyncio.get_running_loop()
        self._host = world.host
        self._recorder = world.recorder
        self._agents = world.agents
        self._agent = TurnAgent()
        self.tokenizer = world.tokenizer
        self.fleet = fleet
        self.proxy = proxy
        self._warned: set[str] = set()
        self._samplings: dict[tuple[str, float], Sampling] = {}
        self.live = job.rollout.recheck == "live"
        """A run's age is looked at before each turn."""
        self.bound = job.rollout.staleness
        self.context_tokens = job.model.context_tokens
        alone = job.rollout.stepping == "asynchronous"
        """In lockstep a wait includes the others' time; the wrapper around the ports keeps the limits there."""
        self._calls = {task.name: _env_calls(waits, job, task, alone=alone) for task in job.tasks}
        self._closing = waits.on("env.close", limits.step_s)
        self.movement = Movement()
        self._scorer = Scorer(context, self.movement, world)

    async def run(self, attempt: Attempt) -> Trajectory:
        """Play and score one attempt. Always returns a trajectory, unless the job itself is cancelled."""
        attempt.started_s = self.loop.time()
        if self._recorder is not None:
            attempt.notes = Notes()
        attempt.cause = self._log.emit(
            schema.Start(
                id=attempt.key,
                task=attempt.task.id,
                pool=attempt.order[0],
                eval=attempt.evaluation,
                cause=attempt.cause,
            ),
        )
        score: Score | None = None
        kind = ""
        attempt.mover = self.movement.begin(attempt.key, attempt.task.domain)
        try:
            attempt.enter()
            status = await self._play(attempt)
            reason = ""
            score = await self._scorer.score(attempt, self._trajectory(attempt, status, "", None))
        except BoundaryError as error:
            status, kind = Status.FAILED, kind_of_failure(error)
            reason = as_utf8(f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            if not attempt.was_stopped():
                raise
            assert attempt.stopped is not None
            status, reason = attempt.stopped
        finally:
            attempt.leave()
            self.movement.end(attempt.mover)
        return self._finished(attempt, status, reason, score, kind)

    async def _play(self, attempt: Attempt) -> Status:
        attempt.stage = "env.open"
        with boundary(EnvError, "env.open"), self.env_calls(attempt).open.during(attempt.key):
            env = await self._host.open(attempt.task, attempt.id)
        attempt.stage = "agent"
        self.movement.moved(attempt.mover)
        if attempt.notes is not None:
            attempt.notes.open_s = self.loop.time() - attempt.started_s
        try:
            with _AGENT:
                agent = self._agents.get(attempt.task.domain, self._agent)
                status = _checked_status(await agent.play(Session(self, attempt, env)))
        finally:
            self._context.supervisor.spawn(self._close(attempt, env))
        if not attempt.turns and attempt.said is None:
            raise EnvError("the environment ended before the model said anything")
        return status

    def warn_once(self, text: str) -> None:
        """Where each trajectory would say the same."""
        if text not in self._warned:
            self._warned.add(text)
            self._context.warn(text)

    def env_calls(self, attempt: Attempt) -> EnvCalls:
        return self._calls[attempt.settings.name]

    def sampling(
        self, settings: TaskSettings, room: int, max_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> Sampling:
        as_usual = max_tokens is None and not stop and room >= settings.max_tokens
        key = (settings.name, settings.temperature)
        if as_usual:
            known = self._samplings.get(key)
            if known is not None:
                return known
        sampling = Sampling(
            max_tokens=min(settings.max_tokens, room, max_tokens or room),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=(*settings.stop, *stop),
            seed=self.job.seed,
        )
        if as_usual:
            self._samplings[key] = sampling
        return sampling

    async def _close(self, attempt: Attempt, env: Env) -> None:
        try:
            with boundary(EnvError, "env.close"):
                await self._closing.guard(attempt.key, env.close())
        except EnvError as error:
            self._context.warn(f"{attempt.key}: {error}", attempt.cause)

    def _finished(self, attempt: Attempt, status: Status, reason: str, score: Score | None, kind: str) -> Trajectory:
        trajectory = self._trajectory(attempt, status, reason, score)
        attempt.cause = self._log.emit(
            schema.End(
                id=attempt.key,
                task=attempt.task.id,
                status=status.value,
                reason=reason,
                born=trajectory.born,
                turns=len(trajectory.turns),
                tokens=trajectory.sampled_tokens,
                reward=trajectory.reward,
                env_s=round(sum(turn.env_s for turn in trajectory.turns), 6),
                generate_s=round(sum(turn.generate_s for turn in trajectory.turns), 6),
                stage=attempt.stage if kind else "",
                kind=kind,
                cause=attempt.cause,
            ),
        )
        if self._recorder is not None and attempt.notes is not None:
            self._recorder.played(attempt.notes.played(trajectory, evaluation=attempt.evaluation))
        return trajectory

    def _trajectory(self, attempt: Attempt, status: Status, reason: str, score: Score | None) -> Trajectory:
        attempt.settle()
        born = attempt.turns[0].completion.spans[0].version if attempt.turns else None
        return Trajectory(
            id=attempt.id,
            task=attempt.task,
            turns=tuple(attempt.turns),
            status=status,
            born=born,
            oldest=born,  # what was sampled under an older version than what came before it is refused (policy/answers)
            reward=None if score is None or status not in SCORED else score.value,
            reward_parts={} if score is None else score.parts,
            reason=reason,
            started_s=attempt.started_s,
            ended_s=self.loop.time(),
        )


def kind_of_failure(error: BoundaryError) -> str:
    """As the `end` event has it."""
    if isinstance(error, EnvCrashed):
        return "crash"
    if isinstance(error, EnvOverLimit):
        return "limit"
    return "timeout" if isinstance(error.__cause__, TimeoutError) else "error"


def checked(observation: object) -> Observation:
    """User code may return anything."""
    if not isinstance(observation, Observation):
        raise EnvError(f"returned {type(observation).__name__}, not an Observation")
    if not math.isfinite(observation.reward):
        raise EnvError("returned a reward that is not a finite number")
    return observation


def _checked_status(status: object) -> Status:
    """So may an agent of a user's own."""
    if not isinstance(status, Status) or status not in SCORED:
        raise AgentError(f"play returned {status!r}; return Status.DONE or Status.TRUNCATED")
    return status

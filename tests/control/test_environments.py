"""A slow, hung, crashed or lying environment changes nothing but its own trajectory."""

import asyncio
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from rollart.control.env_manager import Session
from rollart.events import schema
from rollart.ports import Env
from rollart.types import Message, Observation, Status, Task, TrajectoryId
from tests.control.scene import Played, Scene, ScriptedEnv, for_ever, scene_job


class Hangs(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        await for_ever()
        raise AssertionError


class HangsInReset(ScriptedEnv):
    async def reset(self) -> Observation:
        await for_ever()
        raise AssertionError


class Raises(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        raise ZeroDivisionError("lost my keys")


class RaisesInReset(ScriptedEnv):
    async def reset(self) -> Observation:
        raise OSError("no such file")


class SaysNothing(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        return None  # type: ignore[return-value]


class EarnsNaN(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        return self.says("?", reward=math.nan)


class EarnsAnArray(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        return self.says("?", reward=np.zeros(2))


class OverBeforeItBegan(ScriptedEnv):
    async def reset(self) -> Observation:
        return Observation(done=True)


class SaysNoMessages(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        return Observation(messages=("hello",))  # type: ignore[arg-type]


class ClosesBadly(ScriptedEnv):
    async def close(self) -> None:
        raise RuntimeError("stuck door")


class NeverCloses(ScriptedEnv):
    async def close(self) -> None:
        await for_ever()


class SwallowsCancellation(ScriptedEnv):
    """Catches what it should not, as user code does, and answers after all; and hangs for good the second time."""

    async def step(self, action: str) -> Observation:
        self.done_turns += 1
        try:
            await for_ever()
        except asyncio.CancelledError:
            if self.done_turns == 1:
                return self.says("never mind")
            raise
        raise AssertionError


class TurnsCancellationIntoAnError(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        try:
            await for_ever()
        except asyncio.CancelledError:
            raise RuntimeError("interrupted") from None
        raise AssertionError


Kind = Callable[[Scene, Task, TrajectoryId], Env]
BAD = TrajectoryId("g1", 1, 0)


def play_with_one(kind: Kind, **settings: object) -> tuple[Scene, Played]:
    """One trajectory gets a bad environment, in its first attempt; all others get good ones."""
    scene = Scene(scene_job(**settings))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        return kind(scene, task, trajectory) if trajectory == BAD else None

    scene.on_open = opened
    return scene, scene.play()


def check_only_it_failed(played: Played, reason: str) -> None:
    assert played.finished, played.error
    assert not played.violations
    failed = played.ends("failed")
    assert [event.id for event in failed] == [str(BAD)]
    assert reason in failed[0].reason
    assert "g1.1.1" in [event.id for event in played.ends("done")], "it was tried again"
    assert "g1" in {group for event in played.of(schema.Batch) for group in event.groups}, (
        "and its group was trained on"
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Hangs, "EnvError: env.step: no answer in 300 s"),
        (HangsInReset, "EnvError: env.reset: no answer in 600 s"),
        (Raises, "EnvError: env.step: ZeroDivisionError: lost my keys"),
        (RaisesInReset, "EnvError: env.reset: OSError: no such file"),
        (SaysNothing, "returned NoneType, not an Observation"),
        (EarnsNaN, "a reward that is not a finite number"),
        (EarnsAnArray, "EnvError: env.step: "),
        (OverBeforeItBegan, "ended before the model said anything"),
        (TurnsCancellationIntoAnError, "interrupted"),
    ],
)
def test_a_bad_environment_ends_its_own_attempt_only(kind: Kind, reason: str) -> None:
    scene, played = play_with_one(kind)
    check_only_it_failed(played, reason)
    assert str(BAD) in scene.closed, "it was closed whatever happened"


def test_one_that_cannot_be_opened_is_tried_again() -> None:
    scene = Scene()

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory == BAD:
            raise RuntimeError("no room")
        return None

    scene.on_open = opened
    check_only_it_failed(scene.play(), "EnvError: env.open: RuntimeError: no room")


def test_one_that_never_opens_is_given_up_at_the_limit() -> None:
    scene = Scene(scene_job(limits__open_s=50.0))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory == BAD:
            await for_ever()
        return None

    scene.on_open = opened
    check_only_it_failed(scene.play(), "EnvError: env.open: no answer in 50 s")


@pytest.mark.parametrize(("kind", "text"), [(ClosesBadly, "stuck door"), (NeverCloses, "no answer in 20 s")])
def test_one_that_closes_badly_is_a_warning_and_no_more(kind: Kind, text: str) -> None:
    _, played = play_with_one(kind, limits__step_s=20.0, train__steps=8)
    assert played.finished
    assert not played.ends("failed")
    assert [event for event in played.of(schema.Warning) if str(BAD) in event.text and text in event.text]


def test_one_that_says_nonsense_inside_an_observation_ends_its_own_attempt_only() -> None:
    _, played = play_with_one(SaysNoMessages)
    check_only_it_failed(played, "EnvError")


def test_one_that_swallows_the_limit_and_hangs_again_does_not_take_its_group_with_it() -> None:
    _, played = play_with_one(SwallowsCancellation)
    assert played.finished, played.error
    assert "g1" in {group for event in played.of(schema.Batch) for group in event.groups}


class RaisingAgent:
    """User code, too."""

    async def play(self, session: Session) -> Status:
        await session.reset()
        if session.attempt.id == BAD:
            raise KeyError("tool")
        completion = await session.generate(np.array([1, 5], dtype=np.int32), fresh=True)
        assert completion is not None
        await session.step("")
        return Status.DONE


def test_an_agent_that_raises_ends_its_own_attempt_only() -> None:
    check_only_it_failed(Scene(agent=RaisingAgent()).play(), "tool")


class AgentOfOneTurn:
    async def play(self, session: Session) -> Status:
        observation = await session.reset()
        tokens = session.tokenizer.render(observation.messages, fresh=True)
        await session.generate(tokens, fresh=True)
        return Status.DONE


def test_another_agent_plays_through_the_same_session_and_its_last_answer_is_a_turn() -> None:
    scene = Scene(agent=AgentOfOneTurn())
    played = scene.play()
    assert played.finished
    assert {event.turns for event in played.ends("done")} == {1}


def test_a_slow_environment_does_not_hold_up_the_others() -> None:
    scene = Scene(scene_job(limits__reset_s=10_000.0, rollout__spare_groups=2, train__steps=2))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory == BAD:
            await asyncio.sleep(1_000.0)
        return None

    scene.on_open = opened
    played = scene.play()
    assert played.finished
    assert played.one(schema.Finished).t < 100.0


def test_a_member_that_keeps_failing_is_given_up_and_its_group_closes_with_those_left() -> None:
    tasks = [{"name": "a", "group_size": 4, "min_group_size": 2, "max_tokens": 8}]
    scene = Scene(scene_job(tasks=tasks, limits__attempts=2))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        return Raises(scene, task, trajectory) if trajectory[:2] == ("g1", 1) else None

    scene.on_open = opened
    played = scene.play()
    assert played.finished
    assert [event.id for event in played.ends("failed")] == ["g1.1.0", "g1.1.1"]
    assert played.one(schema.Ready, group="g1").members == ["g1.0.0", "g1.2.0", "g1.3.0"]
    assert not played.violations


def test_a_group_with_too_few_members_left_dies_and_does_not_enter_a_batch() -> None:
    tasks = [{"name": "a", "group_size": 3, "min_group_size": 3, "max_tokens": 8}]
    scene = Scene(scene_job(tasks=tasks, limits__attempts=1))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        return Raises(scene, task, trajectory) if trajectory[:2] == ("g1", 1) else None

    scene.on_open = opened
    played = scene.play()
    assert played.finished
    assert played.one(schema.Group, group="g1").how == "failed"
    assert "g1" not in {group for event in played.of(schema.Batch) for group in event.groups}


def test_retries_of_a_member_back_off() -> None:
    scene = Scene(scene_job(limits__attempts=4, limits__backoff_s=10.0))
    opens: list[float] = []

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory[:2] == ("g1", 1):
            opens.append(asyncio.get_running_loop().time())
            if trajectory.attempt < 3:
                raise RuntimeError("no")
        return None

    scene.on_open = opened
    assert scene.play().finished
    assert [round(later - sooner) for sooner, later in itertools.pairwise(opens)] == [10, 20, 40]


class Endless(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        return self.says("go on " * 3)


class TruncatesItself(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        return Observation(truncated=True)


@pytest.mark.parametrize(
    ("kind", "settings", "turns"),
    [
        (Endless, {}, 8),  # max_turns
        (Endless, {"model__context_tokens": 60}, 3),  # 5 + 3, then 19 + 3 each turn: no room for the fourth
        (TruncatesItself, {}, 1),
    ],
)
def test_running_out_of_turns_context_or_patience_truncates_and_is_scored(
    kind: Kind, settings: dict[str, object], turns: int
) -> None:
    scene = Scene(scene_job(**settings))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env:
        return kind(scene, task, trajectory)

    scene.on_open = opened
    played = scene.play()
    assert played.finished
    assert not played.ends("done")
    assert {event.turns for event in played.ends("truncated")} == {turns}
    assert all(event.reward is not None for event in played.ends("truncated"))
    last = [said.request for said in scene.said if said.request.turn == 7]
    assert all(request.last for request in last)


def test_an_answer_gets_no_more_tokens_than_the_context_has_room_for() -> None:
    scene = Scene(scene_job(model__context_tokens=10), answer_tokens=lambda request: 100)
    assert scene.play().finished
    assert {said.request.sampling.max_tokens for said in scene.said} == {5}


def test_messages_have_roles_that_the_template_knows() -> None:
    assert ScriptedEnv.says("x").messages == (Message(role="user", content="x"),)

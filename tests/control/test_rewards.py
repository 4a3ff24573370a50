"""Rewards: asked for at once, retried with a back-off, and never a crash."""

import asyncio
import itertools
import math
from collections.abc import Mapping

import pytest

from rollart.config.job import Job
from rollart.errors import RewardError
from rollart.events import schema
from rollart.launch.books import metric_rows
from rollart.report.fold import SummaryFold
from rollart.types import Score, Trajectory
from tests.control.scene import Played, Scene, for_ever, scene_job

BAD = "g1.1.0"


def gaps(times: list[float]) -> list[float]:
    return [round(later - sooner, 3) for sooner, later in itertools.pairwise(times)]


def test_a_reward_is_asked_for_the_moment_its_trajectory_ends() -> None:
    scene = Scene(reward_s=0.0)
    played = scene.play()
    for event in played.of(schema.Reward):
        trajectory_ended = max(said.t for said in played.of(schema.Said) if said.id.startswith(event.id + "/")) + 1
        assert event.t == pytest.approx(trajectory_ended)


def test_a_failing_reward_is_tried_again_with_in_progress_pauses() -> None:
    scene = Scene(scene_job(rewards__backoff_s=4.0), reward_s=0.0)
    asked: list[float] = []

    async def score(trajectory: Trajectory) -> None:
        if str(trajectory.id) == BAD:
            asked.append(asyncio.get_running_loop().time())
            if len(asked) <= 3:
                raise RewardError("busy")

    scene.on_score = score
    played = scene.play()
    assert played.finished
    assert gaps(asked) == [4.0, 8.0, 16.0]
    assert played.one(schema.Reward, id=BAD).tries == 4
    assert len(played.of(schema.RewardFailed, id=BAD)) == 3
    assert not played.ends("failed")


def check_only_it_failed(scene: Scene, played: Played, reason: str) -> None:
    assert played.finished, played.error
    failed = played.ends("failed")
    assert [event.id for event in failed] == [BAD]
    assert reason in failed[0].reason
    assert failed[0].reward is None
    assert "g1.1.1" in {event.id for event in played.ends("done")}, "the member was tried again"


def test_a_reward_that_keeps_failing_fails_its_attempt_after_the_retries() -> None:
    scene = Scene(scene_job(rewards__retries=2))

    async def score(trajectory: Trajectory) -> None:
        if str(trajectory.id) == BAD:
            raise RuntimeError("always")

    scene.on_score = score
    played = scene.play()
    check_only_it_failed(scene, played, "RewardError: reward: RuntimeError: always")
    assert scene.scored.count(BAD) == 3


def test_an_error_that_another_try_would_repeat_is_not_retried() -> None:
    scene = Scene()

    async def score(trajectory: Trajectory) -> None:
        if str(trajectory.id) == BAD:
            raise RewardError("the function is wrong", retryable=False)

    scene.on_score = score
    played = scene.play()
    check_only_it_failed(scene, played, "the function is wrong")
    assert scene.scored.count(BAD) == 1


def test_a_reward_that_hangs_is_given_up_at_its_timeout() -> None:
    scene = Scene(scene_job(rewards__timeout_s=7.0, rewards__retries=0))

    async def score(trajectory: Trajectory) -> None:
        if str(trajectory.id) == BAD:
            await for_ever()

    scene.on_score = score
    check_only_it_failed(scene, scene.play(), "RewardError: reward: no answer in 7 s")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_a_finite_number_never_enters_a_baseline(value: float) -> None:
    scene = Scene()

    async def score(trajectory: Trajectory) -> float | None:
        return value if str(trajectory.id) == BAD else None

    scene.on_score = score
    check_only_it_failed(scene, scene.play(), "RewardError")
    for batch in scene.journal.all.values():
        assert all(math.isfinite(advantage) for group in batch.groups for advantage in group.advantages)


def test_a_backend_that_returns_nonsense_fails_its_attempt_only() -> None:
    class Nonsense(Scene):
        async def score(self, trajectory: Trajectory) -> Score:
            score = await super().score(trajectory)
            return None if str(trajectory.id) == BAD else score  # type: ignore[return-value]

    scene = Nonsense()
    check_only_it_failed(scene, scene.play(), "RewardError")


def test_a_result_that_comes_after_its_group_is_over_is_dropped_and_counted() -> None:
    """A backend that cannot be interrupted."""
    scene = Scene(scene_job(rollout__spare_members=1))

    async def score(trajectory: Trajectory) -> None:
        if trajectory.id.member == 2:
            try:
                await asyncio.sleep(5.0)
            except asyncio.CancelledError:
                return
        else:
            await asyncio.sleep(1.0)

    scene.on_score = score
    played = scene.play()
    assert played.finished
    assert {event.id.split(".")[1] for event in played.of(schema.Late)} == {"2"}
    for event in played.of(schema.Ready):
        assert len(event.members) == 2
    assert not played.violations


def test_waiting_for_a_worker_does_not_count_towards_the_limit_of_a_reward() -> None:
    """Eight trajectories end at once, one worker takes 5 s for each: the last one waits for 35 s."""
    scene = Scene(scene_job(rewards={"workers": 1, "timeout_s": 6.0}), reward_s=5.0)
    played = scene.play()
    assert played.finished
    assert not played.of(schema.RewardFailed)
    assert {event.s for event in played.of(schema.Reward)} == {5.0}
    ends = sorted(event.t for event in played.of(schema.Reward))
    assert all(later - sooner >= 5.0 - 1e-6 for sooner, later in itertools.pairwise(ends)), "one at a time"


def test_a_reward_given_up_frees_its_worker() -> None:
    scene = Scene(scene_job(rewards={"workers": 1, "timeout_s": 6.0, "retries": 0}, train__steps=2))

    async def score(trajectory: Trajectory) -> None:
        if str(trajectory.id) == BAD:
            await for_ever()

    scene.on_score = score
    check_only_it_failed(scene, scene.play(), "no answer in 6 s")


def test_named_parts_of_a_reward_are_metrics_of_their_task() -> None:
    scene = Scene(scene_job(train__steps=1), reward_s=0.0)
    usual = scene.score

    async def score(trajectory: Trajectory) -> Score:
        whole = await usual(trajectory)
        return Score(value=whole.value, parts={"won": whole.value, "brief": 0.25})

    scene.score = score  # type: ignore[method-assign]
    played = scene.play()
    assert {event.parts["brief"] for event in played.of(schema.Reward)} == {0.25}
    summary = SummaryFold()
    rows: list[Mapping[str, float]] = []
    keep = metric_rows(summary, [rows.append])
    for event in played.events:
        summary.read(event)
        keep(event)
    [row] = rows
    assert row["a/reward/brief/mean"] == 0.25
    assert row["a/reward/won/mean"] == row["a/reward/mean"] > 0.0


def test_rewards_without_parts_say_nothing_of_them() -> None:
    assert all(not event.parts for event in Scene().play().of(schema.Reward))


class Own:
    """A reward of a task's own, which takes its time, and can be told to fail."""

    def __init__(self, value: float, seconds: float = 1.0) -> None:
        self.value = value
        self.seconds = seconds
        self.asked: list[tuple[str, float]] = []
        self.errors: list[RewardError] = []
        self.ended = 0

    async def score(self, trajectory: Trajectory) -> Score:
        self.asked.append((str(trajectory.id), asyncio.get_running_loop().time()))
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.ended += 1
        if str(trajectory.id) == BAD and self.errors:
            raise self.errors.pop()
        varied = trajectory.id.member * self.value
        return Score(value=varied, parts={"style": 0.125}, busy_s=self.seconds)

    def times(self, key: str) -> list[float]:
        return [at_s for who, at_s in self.asked if who == key]


def two_rewards(**second: object) -> Job:
    """A task with two rewards, beside one that has the job's."""
    own = [{"name": "rules", "workers": 64}, {"name": "style", "weight": 0.5, "workers": 64, **second}]
    tasks = [{"name": "b", "group_size": 2}, {"name": "a", "group_size": 2, "rewards": own}]
    return scene_job(tasks=tasks, rollout__groups_per_step=4)


def test_the_rewards_of_a_task_are_asked_at_once_and_summed_by_weight() -> None:
    rules, style = Own(1.0), Own(4.0, seconds=3.0)
    played = Scene(two_rewards(), reward_s=0.0, task_rewards={"a": (rules, style)}).play()
    assert played.finished, played.error
    of_a = {event.id for event in played.of(schema.End) if event.task.startswith("a/")}
    seen = [event for event in played.of(schema.Reward) if event.id in of_a]
    assert {event.value for event in seen} == {0.0, 1.0 + 0.5 * 4.0}
    assert {(event.s, event.busy_s, len(event.calls)) for event in seen} == {(3.0, 4.0, 2)}
    best = next(event for event in seen if event.value)
    assert best.parts == {"rules": 1.0, "rules/style": 0.125, "style": 2.0, "style/style": 0.125}
    assert rules.asked == style.asked, "both at once"
    assert not of_a & {event.id for event in played.of(schema.Reward) if not event.calls}, "and not the job's as well"


def test_only_the_reward_that_failed_is_asked_again() -> None:
    rules, style = Own(1.0), Own(1.0)
    style.errors = [RewardError("busy"), RewardError("busy")]
    played = Scene(two_rewards(backoff_s=4.0), task_rewards={"a": (rules, style)}).play()
    assert played.finished, played.error
    assert len(rules.times(BAD)) == 1
    assert gaps(style.times(BAD)) == [5.0, 9.0]
    assert played.one(schema.Reward, id=BAD).calls[1].tries == 3
    assert {event.reward for event in played.of(schema.RewardFailed)} == {"style"}


def test_one_reward_that_cannot_be_had_fails_the_attempt_and_ends_the_others() -> None:
    rules, style = Own(1.0, seconds=20.0), Own(1.0)
    style.errors = [RewardError("no such rubric", retryable=False)]
    scene = Scene(two_rewards(), task_rewards={"a": (rules, style)})
    played = scene.play()
    check_only_it_failed(scene, played, "no such rubric")
    (asked_s,) = rules.times(BAD)
    assert played.ends("failed")[0].t == pytest.approx(asked_s + 1.0), "not after what the other one takes"
    assert rules.ended == len(rules.asked), "what was under way was ended"


def test_each_reward_has_its_own_limit_and_its_own_places() -> None:
    rules, style = Own(1.0), Own(1.0, seconds=5.0)
    played = Scene(two_rewards(timeout_s=6.0, workers=1), task_rewards={"a": (rules, style)}).play()
    assert played.finished, played.error
    starts = sorted(at_s for _, at_s in style.asked)
    assert all(gap >= 5.0 for gap in gaps(starts)), "one at a time; waiting for that is not the call's time"
    assert len({at_s for _, at_s in rules.asked}) < len(rules.asked)

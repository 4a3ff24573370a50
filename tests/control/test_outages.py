"""While nobody computes rewards: trajectories fail, wait or go to local workers, as `on_outage` says."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollart.config.job import Job
from rollart.errors import RewardError
from rollart.events import schema
from rollart.report.fold import SummaryFold
from rollart.types import Score, Trajectory
from tests.control.scene import Played, Scene, for_ever, scene_job

URL = "http://127.0.0.1:8080"


@dataclass
class Letters:
    """Keeps the first so many."""

    room: int = 100
    kept: list[tuple[str, str, int]] = field(default_factory=list)

    def keep(self, trajectory: Trajectory, *, reward: str, reason: str, tries: int) -> bool:
        if len(self.kept) >= self.room:
            return False
        self.kept.append((str(trajectory.id), reason, tries))
        return True


def job(policy: str, **more: Any) -> Job:
    rewards = {"type": "http", "url": URL, "backoff_s": 1.0, "retries": 1, "on_outage": policy, **more}
    return scene_job(rewards=rewards, train__steps=8)


class Platform(Scene):
    """Down from 12 s on, for so long."""

    down_s: float = 40.0
    looks: list[float]

    def is_down(self) -> bool:
        return 12.0 <= asyncio.get_running_loop().time() < 12.0 + self.down_s

    async def score(self, trajectory: Trajectory) -> Score:
        if self.is_down():
            self.looks.append(asyncio.get_running_loop().time())
            raise RewardError("connection refused", answered=False, calls=0)
        return await super().score(trajectory)


class Local:
    def __init__(self) -> None:
        self.scored: list[str] = []

    async def score(self, trajectory: Trajectory) -> Score:
        self.scored.append(str(trajectory.id))
        await asyncio.sleep(0.5)
        return Score(value=float(trajectory.id.member % 2))


def scene(policy: str, *, down_s: float = 40.0, **more: Any) -> Platform:
    made = Platform(job(policy, **more))
    made.down_s = down_s
    made.looks = []
    made.dead_letters = Letters()
    return made


def summary(played: Played) -> Any:
    fold = SummaryFold()
    for event in played.events:
        fold.read(event)
    return fold.result().reward


def test_trajectories_wait_until_the_platform_is_back_and_none_fails() -> None:
    platform = scene("wait")
    played = platform.play()
    assert played.finished, played.error
    assert not played.violations
    assert not played.ends("failed")
    outage, back = played.one(schema.RewardOutage), played.one(schema.RewardBack)
    assert (outage.reward, outage.policy) == ("rewards", "wait")
    assert back.t - outage.t > 30.0
    row = summary(played)
    assert (row.outages, row.given_up, row.outage_s) == (1, 0, pytest.approx(back.s, abs=1e-3))
    during = [at_s for at_s in platform.looks if at_s > outage.t]
    assert len(during) < 10, "one looks, and ever more seldom"
    scored = [event.id for event in played.of(schema.Reward)]
    assert len(scored) == len(set(scored)), "nobody's score counts twice"


def test_who_waits_is_named() -> None:
    platform = scene("wait", down_s=300.0)
    seen: list[str] = []
    platform.at(100.0, lambda: seen.append(platform.coordinator.waits.report(100.0)))  # type: ignore[union-attr]
    platform.play()
    assert "waits on reward, whose platform is down" in seen[0]


def test_waiting_has_an_end() -> None:
    platform = scene("wait", down_s=1e9, outage_s=50.0, retries=0)
    played = platform.play()
    failed = played.ends("failed")
    assert failed
    assert all("nobody answered for 50 s (outage_s)" in event.reason for event in failed)
    assert played.error is not None, "and the job stops with the reason"
    kept = platform.dead_letters.kept  # type: ignore[union-attr]
    assert [who for who, *_ in kept] == [event.id for event in played.of(schema.RewardGivenUp)]


class Hoarse(Platform):
    """Back, it answers each trajectory with an error first."""

    async def score(self, trajectory: Trajectory) -> Score:
        if not self.is_down() and asyncio.get_running_loop().time() > 12.0 and str(trajectory.id) not in self.greeted:
            self.greeted.append(str(trajectory.id))
            raise RewardError("starting")
        return await super().score(trajectory)

    greeted: list[str]


def test_an_error_as_the_last_look_s_answer_is_not_silence() -> None:
    platform = Hoarse(job("wait", outage_s=24.0))
    platform.down_s, platform.looks, platform.greeted = 22.0, [], []
    platform.dead_letters = Letters()
    assert not platform.play().ends("failed")


@pytest.mark.parametrize("down_s", [18.0, 20.0, 22.0, 24.0])
def test_nobody_is_given_up_without_a_look_of_its_own(down_s: float) -> None:
    """They are back between two looks, and the next one comes after `outage_s`."""
    played = scene("wait", down_s=down_s, outage_s=down_s + 2.0).play()
    assert played.finished, played.error
    assert not played.ends("failed")


def test_local_workers_stand_in_and_the_platform_takes_over_again() -> None:
    platform, local = scene("local", down_s=12.0), Local()
    platform.stand_ins = {"rewards": local}
    played = platform.play()
    assert played.finished, played.error
    assert not played.ends("failed")
    stood_in = [event for event in played.of(schema.Reward) if event.local]
    assert sorted(event.id for event in stood_in) == sorted(local.scored)
    assert len(local.scored) > 4
    assert {event.made for event in stood_in} == {0}, "no call of the platform is paid for them"
    back = played.one(schema.RewardBack)
    assert all(event.t < back.t + 5.0 for event in stood_in)
    assert any(event.t > back.t and not event.local for event in played.of(schema.Reward))
    assert summary(played).local == len(stood_in)


def test_by_default_they_fail_and_are_kept() -> None:
    platform = scene("fail", down_s=6.0)
    played = platform.play()
    assert played.finished, played.error
    failed = [event.id for event in played.ends("failed")]
    assert failed
    kept = platform.dead_letters.kept  # type: ignore[union-attr]
    assert [who for who, *_ in kept] == failed
    assert {(reason, tries) for _, reason, tries in kept} == {("connection refused", 2)}
    row = summary(played)
    assert (row.given_up, row.dead_letters, row.outages) == (len(failed), len(failed), 1)


def test_one_that_gets_no_answer_while_others_do_is_no_outage() -> None:
    """A function that never returns for one episode."""
    made = Scene(job("wait", timeout_s=3.0))

    async def score(trajectory: Trajectory) -> None:
        if str(trajectory.id) == "g1.1.0":
            await for_ever()

    made.on_score = score
    played = made.play()
    assert played.finished, played.error
    if not played.of(schema.RewardOutage):
        assert [event.id for event in played.ends("failed")] == ["g1.1.0"]
    else:  # it was the only one under way: the next that comes finds that they answer
        assert played.of(schema.RewardBack)


def test_an_answer_that_is_an_error_is_no_outage() -> None:
    made = Scene(job("wait"))

    async def score(trajectory: Trajectory) -> None:
        if trajectory.id.group == "g1":
            raise RewardError("answered 500: KeyError")

    made.on_score = score
    played = made.play()
    assert not played.of(schema.RewardOutage)
    assert {event.id.split(".")[0] for event in played.ends("failed")} == {"g1"}


def test_a_file_that_is_full_is_said_once() -> None:
    platform = scene("fail", down_s=6.0)
    platform.dead_letters = Letters(room=1)
    played = platform.play()
    given_up = played.of(schema.RewardGivenUp)
    assert [event.kept for event in given_up] == [True, *([False] * (len(given_up) - 1))]
    assert len(given_up) > 2
    assert len([event for event in played.of(schema.Warning) if "dead letters" in event.text]) == 1


def test_a_trajectory_that_waits_too_long_for_its_weights_is_given_up_as_stale() -> None:
    """Waiting is bounded by the buffer: a swap drops what is too old, wherever it waits."""
    far = {"type": "http", "url": URL, "on_outage": "wait", "retries": 0}
    tasks = [{"name": "b", "group_size": 2}, {"name": "a", "group_size": 2, "rewards": [far]}]

    class Never:
        async def score(self, trajectory: Trajectory) -> Score:
            raise RewardError("connection refused", answered=False)

    made = Scene(
        scene_job(tasks=tasks, rollout__staleness=1, train__steps=6, rewards={"backoff_s": 1.0, "workers": 64}),
        task_rewards={"a": (Never(),)},
    )
    played = made.play()
    stale = [event for event in played.ends("stale") if event.task.startswith("a/")]
    assert {event.reason for event in stale} == {"too old after a swap"}
    assert {event.turns for event in stale} == {2}, "they were played to their end, and waited for a score"
    assert not played.violations

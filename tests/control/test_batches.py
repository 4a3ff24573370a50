"""Groups become batches: filtering and refilling, hopeless models, shares, slots."""

import asyncio
import re

import pytest

from rollart.errors import EnvError, JobStopped
from rollart.events import schema
from rollart.ports import Env
from rollart.types import Observation, Task, Trajectory, TrajectoryId
from tests.control.scene import Scene, ScriptedEnv, scene_job


def task_number(trajectory: Trajectory) -> int:
    return trajectory.task.index


def test_groups_whose_members_earn_the_same_are_filtered_and_replaced() -> None:
    scene = Scene()
    scene.reward = lambda trajectory: 0.0 if task_number(trajectory) % 2 else float(trajectory.id.member)
    played = scene.play()
    assert played.finished
    assert not played.violations
    filtered = played.of(schema.Group, how="filtered")
    assert filtered
    assert all(int(event.task.split("/")[1]) % 2 == 1 for event in filtered)
    for batch in scene.journal.all.values():
        assert len(batch.groups) == 2
        assert all(group.task.index % 2 == 0 for group in batch.groups)


def test_without_the_filter_such_groups_are_trained_on_with_advantage_zero() -> None:
    scene = Scene(scene_job(rollout__zero_variance="keep"), reward=lambda trajectory: 1.0)
    played = scene.play()
    assert played.finished
    assert not played.of(schema.Group, how="filtered")
    assert [abs(sample.advantages).max() for sample in scene.journal.all[0].samples] == [0.0] * 4


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_hopeless_or_perfect_model_stops_the_job_with_the_reason(reward: float) -> None:
    played = Scene(reward=lambda trajectory: reward).play()
    assert isinstance(played.error, JobStopped)
    assert "all members earned the same" in str(played.error)
    assert not played.of(schema.Batch)
    filtered = len(played.of(schema.Group, how="filtered"))
    assert 8 <= filtered < 8 + 4, "refill_factor 4 times groups_per_step 2, and what was alive then"


def test_a_nearly_hopeless_model_trains_on_short_batches_with_a_warning_and_then_stops() -> None:
    scene = Scene(scene_job(train__steps=20, rollout__max_short_batches=2))
    scene.reward = lambda trajectory: float(trajectory.id.member) if task_number(trajectory) in (0, 11) else 0.0
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert [len(event.groups) for event in played.of(schema.Batch)] == [1, 1]
    texts = [event.text for event in played.of(schema.Warning)]
    assert sum("a batch of 1 groups instead of 2" in text for text in texts) == 2
    assert any("groups were filtered for one batch" in text for text in texts)
    assert not played.violations


def test_a_stop_tells_what_was_filtered_since_the_last_batch_only() -> None:
    scene = Scene(scene_job(train__steps=20))
    scene.reward = lambda trajectory: float(trajectory.id.member) if task_number(trajectory) in (5, 6) else 0.0
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    (formed,) = played.of(schema.Batch)
    filtered = played.of(schema.Group, how="filtered")
    since = [event for event in filtered if event.n > formed.n]
    assert len(since) < len(filtered)
    assert f"task 'a': {len(since)} groups were filtered" in str(played.error)


def test_one_full_batch_forgives_the_short_ones_before_it() -> None:
    scene = Scene(scene_job(train__steps=4, rollout__max_short_batches=1))
    bad = {*range(1, 11), *range(15, 27)}
    scene.reward = lambda trajectory: 0.0 if task_number(trajectory) in bad else float(trajectory.id.member)
    played = scene.play()
    assert played.finished, played.error
    sizes = [len(event.groups) for event in played.of(schema.Batch)]
    assert sizes.count(1) == 2, sizes


def test_a_job_whose_environments_all_fail_stops_with_the_reason() -> None:
    async def broken(task: Task, trajectory: TrajectoryId) -> Env:
        raise EnvError("no such machine")

    scene = Scene(on_open=broken)
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert "no task is left" in str(played.error)
    assert re.search(r"task 'a': .*most often \d+ x EnvError: no such machine", str(played.error))
    assert {event.how for event in played.of(schema.Group)} == {"failed"}
    assert not scene.steps


def test_never_more_groups_alive_than_slots() -> None:
    scene = Scene(scene_job(train__steps=6, rollout__staleness=2, rollout__spare_groups=1))
    played = scene.play()
    assert played.finished
    assert not played.violations
    alive: set[str] = set()
    taken: set[str] = set()
    most = 0
    for event in played.events:
        match event:
            case schema.Admit():
                alive.add(event.group)
            case schema.Group():
                alive.remove(event.group)
            case schema.Batch():
                taken.update(event.groups)
            case schema.SwapEnd():
                alive -= taken
        most = max(most, len(alive))
    assert most == 3 * 2 + 1


def test_with_bound_0_spare_groups_are_cancelled_when_the_batch_is_formed() -> None:
    scene = Scene(scene_job(mode="sync+", rollout={"groups_per_step": 2, "spare_groups": 2}))

    async def slow_odd_ones(task: Task, trajectory: TrajectoryId) -> Env:
        if int(task.index) % 2:
            await asyncio.sleep(30.0)
        return ScriptedEnv(scene, task, trajectory)

    scene.on_open = slow_odd_ones
    played = scene.play()
    assert played.finished
    assert not played.violations
    surplus = played.of(schema.Group, how="surplus")
    assert surplus
    batch = played.of(schema.Batch)[0]
    assert {event.cause for event in surplus if event.t == batch.t} == {batch.n}
    admitted = [event.task for event in played.of(schema.Admit)]
    assert len(admitted) > len(set(admitted)), "a surplus task is given out again"


def test_ready_spare_groups_of_a_formed_batch_are_surplus_too_with_bound_0() -> None:
    played = Scene(scene_job(mode="sync+", rollout={"groups_per_step": 2, "spare_groups": 3}, train__steps=2)).play()
    assert played.finished
    ready = {event.group for event in played.of(schema.Ready)}
    assert ready & {event.group for event in played.of(schema.Group, how="surplus")}


def test_the_shares_give_way_when_nothing_better_can_come() -> None:
    """Every group of one task is filtered, its slots are refilled, and the other task fills all that is left."""
    tasks = [{"name": "a", "group_size": 2, "max_tokens": 8}, {"name": "b", "group_size": 2, "max_tokens": 8}]
    scene = Scene(scene_job(tasks=tasks, rollout={"groups_per_step": 4, "share_tolerance": 0.0}, train__steps=2))
    scene.reward = lambda trajectory: float(trajectory.id.member) if trajectory.task.domain == "a" else 0.0
    played = scene.play()
    assert played.of(schema.Batch)
    assert {task.split("/")[0] for event in played.of(schema.Batch) for task in event.tasks} == {"a"}


def test_slots_freed_by_eviction_at_consumption_are_filled_again_at_once() -> None:
    """With recheck `batch`, what is too old is found only when the batch is formed."""
    scene = Scene(scene_job(rollout={"groups_per_step": 2, "recheck": "batch"}, train__steps=8), step_s=5.0)

    async def some_are_slow(task: Task, trajectory: TrajectoryId) -> Env:
        if task.index == 4:
            return SlowToEnd(scene, task, trajectory)
        return ScriptedEnv(scene, task, trajectory)

    class SlowToEnd(ScriptedEnv):
        async def step(self, action: str) -> Observation:
            await asyncio.sleep(25.0)
            return await super().step(action)

    scene.on_open = some_are_slow
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    evicted = played.of(schema.Group, how="stale", cause=-1)
    assert evicted
    for event in evicted:
        assert any(admit.t == event.t for admit in played.of(schema.Admit)), "a free slot, and nobody fills it"


def test_a_member_that_fails_in_a_group_too_old_is_not_tried_again() -> None:
    """With recheck `batch` such a group is not stopped at the swap, but nothing new is started for it."""
    tasks = [{"name": "a", "group_size": 3, "min_group_size": 2, "max_tokens": 8}]
    scene = Scene(scene_job(tasks=tasks, rollout={"groups_per_step": 2, "recheck": "batch"}, train__steps=8))

    async def fails_late(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.group == "g4" and trajectory.member == 2:
            await asyncio.sleep(30.0)
            raise EnvError("no")
        return None

    scene.on_open = fails_late
    played = scene.play()
    assert played.finished
    failed = played.one(schema.End, id="g4.2.0")
    serving = [event.version for event in played.of(schema.SwapEnd) if event.n < failed.n][-1]
    assert serving > 1 + 1, "born under 1, bound 1"
    assert not played.of(schema.Start, id="g4.2.1")
    assert played.one(schema.Group, group="g4").how == "stale"

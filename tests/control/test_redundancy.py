"""Spare members: the slowest are cancelled, and cancelling is explicit."""

import asyncio

from rollart.control.buffer import GroupInProgress, Member
from rollart.events import schema
from rollart.ports import Env
from rollart.types import Task, TrajectoryId
from tests.control.invariant import check_first_invariant
from tests.control.scene import Scene, scene_job


def with_late_third(delay_s: float, **settings: object) -> Scene:
    scene = Scene(scene_job(rollout__spare_members=1, **settings))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.member == 2:
            await asyncio.sleep(delay_s)
        return None

    scene.on_open = opened
    return scene


def test_spare_members_are_cancelled_when_enough_are_scored() -> None:
    scene = with_late_third(2.0)
    played = scene.play()
    assert played.finished
    assert not played.violations
    assert all(len(event.members) == 2 for event in played.of(schema.Ready))
    cancelled = played.ends("aborted")
    assert {event.id.split(".")[1] for event in cancelled} == {"2"}
    assert {event.reason for event in cancelled} == {"surplus: the group has enough members"}
    assert {event.id for event in cancelled} <= set(scene.closed), "their environments are closed"
    check_first_invariant(scene)


def test_a_cancelled_member_in_an_engine_is_aborted_there() -> None:
    scene = with_late_third(1.65)  # in the engine, with its second turn, when its siblings are scored
    played = scene.play()
    assert played.finished
    sent = {event.id: event.engine for event in played.of(schema.Send)}
    said = {event.id for event in played.of(schema.Said)}
    aborted = {(name, engine.spec.id) for engine in scene.all_engines() for name in engine.aborted}
    unanswered = {(name, engine) for name, engine in sent.items() if name not in said and name.split(".")[1] == "2"}
    assert unanswered
    in_time = {
        pair for pair in unanswered if pair[0].split(".")[0] in {event.group for event in played.of(schema.Ready)}
    }
    assert in_time <= aborted


def test_a_cancelled_member_that_waits_for_a_slot_or_a_reward_ends_at_once() -> None:
    for delay_s in (50.0, 0.2):
        played = with_late_third(delay_s).play()
        for event in played.of(schema.Ready):
            ends = [end for end in played.of(schema.End) if end.id.startswith(f"{event.group}.2.")]
            assert [end.t for end in ends] == [event.t]


def test_a_failed_member_costs_nothing_while_a_spare_is_under_way() -> None:
    scene = Scene(scene_job(rollout__spare_members=1))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.member == 0:
            raise RuntimeError("no")
        return None

    scene.on_open = opened
    scene.reward = lambda trajectory: float(trajectory.id.member)
    played = scene.play()
    assert played.finished
    assert not [event for event in played.of(schema.Start) if not event.id.endswith(".0")], "no second attempt"
    assert all([name.split(".")[1] for name in event.members] == ["1", "2"] for event in played.of(schema.Ready))


def test_a_group_is_as_old_as_its_oldest_member() -> None:
    group = GroupInProgress("g", Task(id="a/0", domain="a", index=0), scene_job().tasks[0], [Member(), Member()], 0.0)
    assert group.born is None
    assert group.runs() == []

"""What follows from a train step that set data aside."""

from rollart.policy.training import in_vain, set_aside_whole, trained_on
from rollart.types import Batch, Group, SetAside, Status, StepResult, Task, Trajectory, TrajectoryId


def member(group: str, number: int) -> Trajectory:
    task = Task(id="game/0", domain="game", index=0)
    identity = TrajectoryId(group, number, 0)
    return Trajectory(id=identity, task=task, turns=(), status=Status.DONE, born=0, oldest=0, reward=1.0)


def group(name: str) -> Group:
    members = tuple(member(name, number) for number in range(3))
    return Group(id=name, task=members[0].task, members=members, born=0, advantages=(0.5, -0.25, -0.25))


BATCH = Batch(step=4, serving=3, groups=(group("a"), group("b")))


def aside(*names: tuple[str, int]) -> tuple[SetAside, ...]:
    return tuple(SetAside(TrajectoryId(name, number, 0), "too long") for name, number in names)


def test_what_was_set_aside_is_left_out_with_its_advantages() -> None:
    left = trained_on(BATCH, aside(("a", 0), ("a", 1), ("a", 2), ("b", 1)))
    (kept,) = left.groups
    assert kept.id == "b"
    assert [one.id.member for one in kept.members] == [0, 2]
    assert kept.advantages == (0.5, -0.25)
    assert trained_on(BATCH, ()) is BATCH


def test_a_group_has_failed_where_no_member_is_left() -> None:
    assert set_aside_whole(BATCH, aside(("a", 0), ("a", 1), ("a", 2), ("b", 1))) == ["a"]
    assert set_aside_whole(BATCH, aside(("a", 0), ("b", 1))) == []


def test_a_step_is_in_vain_where_all_was_set_aside_or_every_update_was_skipped() -> None:
    everything = aside(*((name, number) for name in "ab" for number in range(3)))
    assert "too long" in in_vain(BATCH, StepResult(version=5, set_aside=everything))
    assert in_vain(BATCH, StepResult(version=5, set_aside=everything[:5])) == ""
    skipped = StepResult(version=5, metrics={"actor/skipped_updates": 1.0})
    assert "not finite" in in_vain(BATCH, skipped)
    some = StepResult(version=5, metrics={"actor/skipped_updates": 1.0, "actor/updates": 1.0})
    assert in_vain(BATCH, some) == ""

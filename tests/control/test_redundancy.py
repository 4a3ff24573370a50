"""Spares: the slowest members are cancelled, groups cancelled or carried; cancelling is explicit, and its bias told."""

import asyncio
from typing import Any

import pytest

from rollart.control.groups import GroupInProgress, Member
from rollart.errors import EnvCrashed, EnvOverLimit
from rollart.events import schema
from rollart.ports import Env
from rollart.report.fold import SummaryFold
from rollart.report.summary import Summary
from rollart.types import GenerateRequest, Observation, Task, Trajectory, TrajectoryId
from tests.control.invariant import check_first_invariant
from tests.control.scene import Played, Scene, ScriptedEngine, ScriptedEnv, scene_job


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


def with_slow_group(where: str, open_s: float = 30.0, **settings: object) -> Scene:
    """The first group's members stay in an engine, an environment or a reward for long."""
    scene = Scene(scene_job(**settings))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if where == "open" and trajectory.group == "g0":
            await asyncio.sleep(open_s)
        return None

    async def generates(engine: ScriptedEngine, request: GenerateRequest) -> None:
        if where == "engine" and request.session.startswith("g0."):
            await asyncio.sleep(30.0)

    async def scores(trajectory: Trajectory) -> float | None:
        if where == "reward" and trajectory.id.group == "g0":
            await asyncio.sleep(20.0)
        return None

    scene.on_open, scene.on_generate, scene.on_score = opened, generates, scores
    return scene


@pytest.mark.parametrize("where", ["open", "engine", "reward"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_spare_group_is_cancelled_and_all_that_it_held_is_free_at_once(where: str, bound: int) -> None:
    swap = "between_batches" if bound == 0 else "after_batch"
    settings: dict[str, Any] = {"rollout__spare_groups": 1, "rollout__staleness": bound, "rollout__swap": swap}
    scene = with_slow_group(where, rollout__surplus="cancel", **settings)
    played = scene.play()
    assert played.finished
    assert not played.violations
    first = played.of(schema.Batch)[bound]  # before, all that is under way can still be used
    over = [event for event in played.of(schema.Group, group="g0") if event.how == "surplus"]
    assert over
    assert any(event.t == batch.t for event in over for batch in played.of(schema.Batch))
    assert over[0].t <= first.t
    ends = [event for event in played.of(schema.End) if event.id.startswith("g0.") and event.status == "aborted"]
    assert {event.t for event in ends} == {over[0].t}
    assert {event.reason for event in ends} == {"surplus: the batch is full"}
    if where == "engine":
        assert {event.id.rpartition("/")[0] or event.id for event in ends} <= {
            name.rpartition("/")[0] for engine in scene.all_engines() for name in engine.aborted
        }
    if where != "open":  # there, none was open yet
        assert {event.id for event in ends} <= set(scene.closed)
    if bound:
        assert [event for event in played.of(schema.Admit) if event.t == over[0].t], "its slot is used again at once"
    lengths = folded(played).tasks["a"].lengths
    assert lengths.stopped >= len(ends)
    assert lengths.admitted_tokens <= lengths.trained_tokens


@pytest.mark.parametrize("bound", [0, 1])
def test_a_spare_group_is_carried_into_a_later_batch(bound: int) -> None:
    """With bound 0 one that has sampled nothing yet is still on policy after the swap."""
    swap = "between_batches" if bound == 0 else "after_batch"
    settings: dict[str, Any] = {
        "rollout__spare_groups": 1,
        "rollout__staleness": bound,
        "rollout__swap": swap,
        "train__steps": 8,
    }
    scene = with_slow_group("open", 10.3, rollout__surplus="carry", **settings)  # it has begun after the next swap
    played = scene.play()
    assert played.finished
    assert not played.violations
    batches = [event.step for event in played.of(schema.Batch) if "g0" in event.groups]
    assert batches
    assert batches[0] > 0


def folded(played: Played) -> Summary:
    fold = SummaryFold()
    for event in played.events:
        fold.read(event)
    return fold.result()


def test_what_is_left_out_of_training_shows_in_the_lengths() -> None:
    """Members of even number say more, and are slower: with a spare member they are left out."""
    scene = Scene(scene_job(rollout__spare_members=2, rollout__zero_variance="keep"))
    scene.answer_tokens = lambda request: 6 if int(request.session.split(".")[1]) % 2 else 2
    scene.reward = lambda trajectory: float(trajectory.id.member)
    lengths = folded(scene.play()).tasks["a"].lengths
    assert lengths.trained_tokens == 4.0
    assert lengths.trained_tokens < lengths.admitted_tokens <= 12.0
    assert lengths.trained_turns == 2.0
    assert lengths.stopped > 0


def test_failures_are_counted_by_stage_and_kind() -> None:
    scene = Scene(scene_job(limits__step_s=5.0, limits__reset_s=7.0, limits__backoff_s=0.1, rewards__retries=0))

    class Odd(ScriptedEnv):
        async def reset(self) -> Observation:
            if self.task.index == 0:
                await asyncio.sleep(100.0)
            return await super().reset()

        async def step(self, action: str) -> Observation:
            match self.task.index:
                case 1:
                    await asyncio.sleep(100.0)
                case 2:
                    raise EnvCrashed("its process exited with status 7")
                case 3:
                    raise EnvOverLimit("it went over sandbox.memory_mb 192")
            return await super().step(action)

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if task.index == 4:
            raise RuntimeError("no such machine")
        return Odd(scene, task, trajectory)

    async def scored(trajectory: Trajectory) -> float | None:
        if trajectory.task.index == 5:
            raise RuntimeError("no judge")
        return None

    scene.on_open, scene.on_score = opened, scored
    played = scene.play()
    assert played.finished
    row = folded(played).tasks["a"]
    assert set(row.failed_at) == {
        *("env.reset timeout", "env.step timeout", "env.step crash", "env.step limit", "env.open error"),
        "reward error",
    }
    assert sum(row.failed_at.values()) == row.failures


def test_a_task_has_limits_of_its_own() -> None:
    tasks = [
        {"name": "a", "group_size": 2, "max_tokens": 8, "limits": {"step_s": 3.0}},
        {"name": "b", "group_size": 2, "max_tokens": 8},
    ]
    scene = Scene(scene_job(tasks=tasks, limits__step_s=20.0, limits__attempts=1, limits__task_failures=2))
    scene.step_s = 10.0
    played = scene.play()
    reasons = {event.task[0]: event.reason for event in played.of(schema.End) if event.status != "aborted"}
    assert reasons["a"] == "EnvError: env.step: no answer in 3 s"
    assert reasons["b"] == ""


def test_a_group_is_as_old_as_its_oldest_member() -> None:
    group = GroupInProgress("g", Task(id="a/0", domain="a", index=0), scene_job().tasks[0], [Member(), Member()], 0.0)
    assert group.born is None

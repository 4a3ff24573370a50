"""The coordinator is killed and started again over the same journal: no group is lost, none is trained on twice."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from rollart.control.rollout import ATTEMPTS_PER_LIFE
from rollart.errors import JobStopped
from rollart.events import schema
from rollart.events.schema import Event
from rollart.ports import Env
from rollart.types import Observation, Task, TrajectoryId
from tests.control.scene import Played, Scene, ScriptedEnv, scene_job

Stepped = schema.Batch | schema.Written | schema.StepStart | schema.StepEnd | schema.Checkpoint | schema.Replay


def at_step(kind: type[Stepped], step: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, kind) and event.step == step


def at_s(seconds: float) -> Callable[[Event], bool]:
    return lambda event: event.t >= seconds


def check_whole(scene: Scene, played: Played, steps: int) -> None:
    assert played.finished, played.error
    assert not played.violations
    assert sorted(scene.journal.all) == list(range(steps))
    trained = Counter(group.task.id for batch in scene.journal.all.values() for group in batch.groups)
    assert set(trained.values()) == {1}, "none trained on twice"
    attempts = [event.id for event in played.of(schema.Start)]
    assert len(attempts) == len(set(attempts)), "no attempt's id is used twice"
    last = max(life for life, _, _ in scene.steps)
    surviving = [(step, groups) for life, step, groups in scene.steps if life == last]
    for step, groups in surviving:
        assert groups == tuple(group.id for group in scene.journal.all[step].groups)
    assert [step for step, _ in surviving] == list(range(surviving[0][0], steps)), "in order, none left out"


KILLS = [
    pytest.param(at_s(2.1), id="first-admission"),
    pytest.param(at_step(schema.Batch, 0), id="batch-formed"),
    pytest.param(at_step(schema.Written, 1), id="batch-written"),
    pytest.param(at_step(schema.StepStart, 2), id="in-a-step"),
    pytest.param(at_step(schema.StepEnd, 2), id="after-a-step"),
    pytest.param(lambda event: isinstance(event, schema.SwapStart) and event.version == 3, id="in-a-swap"),
    pytest.param(at_step(schema.Checkpoint, 2), id="after-a-checkpoint"),
    pytest.param(at_step(schema.StepEnd, 5), id="after-the-last-step"),
]


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_job_goes_on_to_its_end(kill: Callable[[Event], bool]) -> None:
    scene = Scene(scene_job(train__steps=6, checkpoint__every=2))
    check_whole(scene, scene.play(kills=[kill]), 6)


@pytest.mark.parametrize("kill", [kill for kill in KILLS if kill.id != "after-a-checkpoint"])
def test_a_killed_job_goes_on_to_its_end_though_its_only_checkpoint_is_the_first(kill: Callable[[Event], bool]) -> None:
    scene = Scene(scene_job(train__steps=6, checkpoint__every=100))
    check_whole(scene, scene.play(kills=[kill]), 6)


def test_it_may_be_killed_again_and_again() -> None:
    scene = Scene(scene_job(train__steps=6, checkpoint__every=2))
    kills = [
        at_step(schema.StepStart, 1),
        at_step(schema.StepStart, 2),
        at_step(schema.Replay, 2),
        at_step(schema.Batch, 5),
    ]
    played = scene.play(kills=kills)
    check_whole(scene, played, 6)
    assert len(played.of(schema.Resumed)) == 3, "once it was killed while it came back"


def test_it_may_be_killed_before_its_first_word() -> None:
    scene = Scene()
    played = scene.play(kills=[lambda event: isinstance(event, schema.Starting)])
    assert not played.of(schema.Resumed)
    check_whole(scene, played, 3)


def test_open_groups_start_again_as_new_attempts_and_ready_ones_are_kept() -> None:
    scene = Scene(scene_job(train__steps=4, checkpoint__every=1, rollout__spare_groups=1))

    async def slow_for_some(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.member == 1 and task.index % 3 == 2:
            await asyncio.sleep(8.0)
        return None

    scene.on_open = slow_for_some
    played = scene.play(kills=[at_step(schema.Batch, 2)])
    check_whole(scene, played, 4)
    resumed = played.one(schema.Resumed)
    assert resumed.ready
    assert resumed.open
    later = [event for event in played.of(schema.Start) if event.n > resumed.n]
    again = [event.id for event in later if event.id.split(".")[0] in resumed.open]
    assert again
    assert all(int(name.split(".")[2]) >= ATTEMPTS_PER_LIFE for name in again)
    assert not [event for event in later if event.id.split(".")[0] in resumed.ready], "ready ones are not replayed"
    new = [event.group for event in played.of(schema.Admit) if event.n > resumed.n]
    assert all(group in resumed.open or group.endswith("r1") for group in new)
    replayed = {group for event in played.of(schema.Replay) for group in event.groups}
    left = [group for group in resumed.open if group not in replayed]
    assert left
    assert new[: len(left)] == left, "before anything new"


def test_batches_written_since_the_checkpoint_are_trained_again_before_anything_else() -> None:
    scene = Scene(scene_job(train__steps=6))
    played = scene.play(kills=[at_step(schema.StepStart, 3)])
    check_whole(scene, played, 6)
    resumed = played.one(schema.Resumed)
    assert (resumed.checkpoint, resumed.step) == (0, 4)
    assert [event.step for event in played.of(schema.Replay)] == [0, 1, 2, 3]
    first_send = next(event for event in played.of(schema.Send) if event.n > resumed.n)
    assert first_send.version == 4, "engines are brought to the trainer's weights first"


class SlowInItsFirstGroup(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        if self.trajectory.group == "g4":
            await asyncio.sleep(100.0)
        return await super().step(action)


def test_a_group_of_the_checkpoint_whose_task_was_trained_on_since_in_another_group_is_ended() -> None:
    """It went stale after the checkpoint, its task came back in a new group, and that one was trained on."""
    scene = Scene(scene_job(train__steps=8, checkpoint__every=3))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env:
        return SlowInItsFirstGroup(scene, task, trajectory)

    scene.on_open = opened
    played = scene.play(kills=[lambda event: isinstance(event, schema.Batch) and "a/4" in event.tasks])
    check_whole(scene, played, 8)
    resumed = played.one(schema.Resumed)
    assert resumed.checkpoint == 3
    assert "g4" in resumed.open
    assert [event.how for event in played.of(schema.Group, group="g4")] == ["stale", "surplus"]
    assert not [event for event in played.of(schema.Start) if event.id.startswith("g4.") and event.n > resumed.n]


def test_a_job_that_had_finished_finishes_again_at_once() -> None:
    scene = Scene()
    assert scene.play().finished
    trained = list(scene.steps)
    again = scene.play()
    assert again.finished
    assert scene.steps == trained
    assert not again.of(schema.Admit)


def test_the_task_cursor_goes_on_where_it_was() -> None:
    scene = Scene(scene_job(train__steps=6, checkpoint__every=2))
    played = scene.play(kills=[at_step(schema.StepEnd, 4)])
    check_whole(scene, played, 6)
    numbers = sorted({int(event.task.split("/")[1]) for event in played.of(schema.Admit)})
    assert numbers == list(range(len(numbers))), "no task is left out"


def stopping(scene: Scene) -> Callable[[], None]:
    def stop() -> None:
        assert scene.coordinator is not None
        scene.coordinator.stop()

    return stop


def test_a_job_asked_to_stop_ends_after_its_step_with_a_checkpoint_and_goes_on_from_it() -> None:
    scene = Scene(scene_job(train__steps=6))

    scene.when(at_step(schema.StepStart, 2), stopping(scene))
    played = scene.play()
    assert played.error is None
    assert not played.finished
    assert played.one(schema.Interrupted).step == 3
    assert played.of(schema.Checkpoint)[-1].step == 3
    again = scene.play()
    assert again.finished
    assert not again.of(schema.Replay), "the checkpoint covers every step"
    assert sorted(scene.journal.all) == list(range(6))


def test_a_job_asked_to_stop_before_it_has_begun_says_so() -> None:
    scene = Scene()

    scene.when(lambda event: isinstance(event, schema.Starting), stopping(scene))
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert str(played.error) == "stopped by the user, before training began", "a resumed job has trained"


def test_a_job_asked_to_stop_does_not_play_its_first_evaluation_to_the_end() -> None:
    scene = Scene(scene_job(train__steps=3, evaluation={"every": 3, "episodes": 4, "first": True}), step_s=100.0)
    scene.when(lambda event: isinstance(event, schema.Checkpoint), stopping(scene))
    played = scene.play()
    assert played.error is None
    assert played.one(schema.Interrupted).step == 0
    assert not played.of(schema.Eval)
    scene.step_s = 1.0
    again = scene.play()
    assert again.finished
    assert [event.name for event in again.of(schema.Eval)] == ["eval0", "eval3"]


def test_a_job_stopped_or_killed_in_its_last_evaluation_plays_it_when_resumed() -> None:
    scene = Scene(scene_job(train__steps=3, evaluation={"every": 3, "episodes": 4}))
    scene.when(at_step(schema.Checkpoint, 3), stopping(scene))
    played = scene.play()
    assert played.error is None
    assert played.one(schema.Interrupted).step == 3
    assert not played.of(schema.Eval)
    again = scene.play()
    assert again.finished
    assert again.one(schema.Eval).versions == [3, 3]

"""The trainer is lost before, in and after a step: it learns again what it had learnt, under the same versions."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollart.errors import JobStopped, StartAgain, TrainerError, VersionGone, WeightError
from rollart.events import schema
from rollart.events.schema import Event
from rollart.types import Batch, EngineSpec, WeightManifest, WeightVersion
from tests.control.scene import TRAIN_S, Played, Scene, ScriptedEngine, ScriptedTrainer, for_ever, scene_job


def surviving(scene: Scene) -> list[tuple[int, tuple[str, ...]]]:
    """The steps of the trainer that is left, in order."""
    last = scene.trainers[-1].life
    return [(step, groups) for life, step, groups in scene.steps if life == last]


def written(scene: Scene, first: int = 0) -> list[tuple[int, tuple[str, ...]]]:
    return [
        (step, tuple(group.id for group in batch.groups))
        for step, batch in sorted(scene.journal.all.items())
        if step >= first
    ]


def crash_at(step: int, where: str) -> dict[str, Callable[[ScriptedTrainer, Batch], Awaitable[None]]]:
    crashed: list[int] = []

    async def crash(trainer: ScriptedTrainer, batch: Batch) -> None:
        if batch.step == step and not crashed:
            crashed.append(step)
            if where == "during":
                await asyncio.sleep(2.0)
            trainer.dead = where
            trainer.well()

    return {"after_step" if where == "after" else "on_step": crash}


@pytest.mark.parametrize("where", ["before", "during", "after"])
@pytest.mark.parametrize("step", [0, 3])
def test_a_crash_replays_the_batches_in_order_under_the_same_versions(where: str, step: int) -> None:
    scene = Scene(scene_job(train__steps=5))
    for name, hook in crash_at(step, where).items():
        setattr(scene, name, hook)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert surviving(scene) == written(scene)
    assert [event.step for event in played.of(schema.Replay)] == list(range(step))
    assert [event.version for event in played.of(schema.StepEnd)] == [1, 2, 3, 4, 5]
    assert f"died {where}" in played.one(schema.TrainerDown).reason


def test_a_replay_begins_at_the_last_checkpoint() -> None:
    scene = Scene(scene_job(train__steps=6, checkpoint__every=2), **crash_at(5, "during"))  # type: ignore[arg-type]
    played = scene.play()
    assert played.finished
    assert [event.step for event in played.of(schema.Replay)] == [4]
    assert surviving(scene) == written(scene, first=4)
    assert scene.trainers[-1].version == 6


def test_a_crash_while_weights_are_pushed_pushes_them_again() -> None:
    scene = Scene(scene_job(train__steps=4))
    crashed: list[int] = []

    async def crash(trainer: ScriptedTrainer, version: WeightVersion) -> None:
        if version == 2 and not crashed:
            crashed.append(version)
            trainer.dead = "in a push"

    scene.on_publish = crash
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert [event.version for event in played.of(schema.SwapEnd)] == [1, 2, 3]


def test_two_calls_that_notice_the_same_crash_restart_the_trainer_once() -> None:
    """The step and the push of the version before are under way together."""
    scene = Scene(scene_job(train__steps=4, rollout={"groups_per_step": 2, "swap": "when_published"}))

    async def slow_push(trainer: ScriptedTrainer, version: WeightVersion) -> None:
        await asyncio.sleep(3.0)

    scene.on_publish = slow_push
    scene.when(
        lambda event: isinstance(event, schema.StepStart) and event.step == 1,
        lambda: asyncio.get_running_loop().call_later(1.0, setattr, scene.trainers[-1], "dead", "for both"),
    )
    played = scene.play()
    assert played.finished
    assert len(played.of(schema.TrainerDown)) == 1
    assert len(scene.trainers) == 2


def test_a_trainer_that_hangs_is_found_by_the_limit() -> None:
    scene = Scene(scene_job(limits__train_s=60.0))

    async def hang(trainer: ScriptedTrainer, batch: Batch) -> None:
        if trainer.life == 0:
            await for_ever()

    scene.on_step = hang
    played = scene.play()
    assert played.finished
    assert "no answer in 60 s" in played.one(schema.TrainerDown).reason


def test_a_trainer_that_is_lost_too_often_in_a_row_stops_the_job_with_the_reason() -> None:
    scene = Scene(scene_job(limits__trainer_restarts=2))

    async def always(trainer: ScriptedTrainer, batch: Batch) -> None:
        raise ValueError("bad kernel")

    scene.on_step = always
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert "lost 3 times in a row" in str(played.error)
    assert "bad kernel" in str(played.error)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_trainer_that_asks_to_be_started_again_is_not_a_loss(replayed: bool) -> None:
    """Seven times in a step, or in its replay: as often as it has something to note."""
    scene = Scene(scene_job(limits__trainer_restarts=1, limits__backoff_s=30.0), **crash_at(2, "during"))  # type: ignore[arg-type]
    crash = scene.on_step
    noted: list[int] = []

    async def note(trainer: ScriptedTrainer, batch: Batch) -> None:
        assert crash is not None
        await crash(trainer, batch)
        if batch.step == 1 and len(noted) < 7 and (not replayed or trainer.life):
            noted.append(trainer.life)
            trainer.dead = "with a note"
            raise StartAgain("a micro-batch could not be computed")

    scene.on_step = note
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert len(noted) == 7
    assert surviving(scene) == written(scene)


def test_a_trainer_that_cannot_start_again_counts_as_lost_again() -> None:
    scene = Scene(scene_job(limits__trainer_restarts=3), **crash_at(1, "before"))  # type: ignore[arg-type]

    async def refuses(before: int) -> None:
        if before:
            raise RuntimeError("no GPU")

    scene.on_trainer_start = refuses
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert "no GPU" in str(played.error)


def test_a_finished_step_forgives_the_losses_before_it() -> None:
    scene = Scene(scene_job(limits__trainer_restarts=1, train__steps=4))

    async def each_step_once(trainer: ScriptedTrainer, batch: Batch) -> None:
        if trainer.life <= batch.step and trainer.version == batch.step and len(scene.trainers) == batch.step + 1:
            trainer.dead = "again"
            trainer.well()

    scene.on_step = each_step_once
    played = scene.play()
    assert played.finished, played.error
    assert len(played.of(schema.TrainerDown)) == 4


def test_a_push_that_fails_alone_does_not_tear_the_step_under_way_from_the_new_trainer() -> None:
    """Only the push breaks; the step goes on in a trainer that has meanwhile been given up."""
    scene = Scene(
        scene_job(train__steps=5, checkpoint__every=1, rollout={"groups_per_step": 2, "swap": "when_published"})
    )
    failed: list[int] = []

    async def fails_once(trainer: ScriptedTrainer, version: WeightVersion) -> None:
        if version == 2 and not failed:
            await asyncio.sleep(2.5)
            failed.append(version)
            raise TrainerError("the store is full")

    scene.on_publish = fails_once
    played = scene.play()
    assert played.finished, played.error
    down, up = played.of(schema.TrainerDown)[0], played.of(schema.TrainerUp)[0]
    step = played.one(schema.StepStart, step=2)
    assert step.t < down.t < up.t < step.t + TRAIN_S, "the step was under way, and outlives the restart"
    assert len(played.of(schema.TrainerDown)) == 1, [event.reason for event in played.of(schema.TrainerDown)]


def test_every_batch_is_written_before_its_step() -> None:
    scene = Scene()
    order: list[Any] = []

    async def note(trainer: ScriptedTrainer, batch: Batch) -> None:
        order.append(batch.step in scene.journal.all)

    scene.on_step = note
    played: Played = scene.play()
    assert order == [True, True, True]
    for event in played.of(schema.StepStart):
        assert played.one(schema.Written, step=event.step).n < event.n


def test_only_the_current_and_the_previous_version_are_ever_asked_of_the_trainer() -> None:
    """The scripted trainer refuses any other, and would be restarted for it."""
    for swap in ("after_batch", "when_published"):
        played = Scene(scene_job(train__steps=6, rollout={"groups_per_step": 2, "swap": swap})).play()
        assert played.finished
        assert not played.of(schema.TrainerDown)


def test_a_version_too_old_to_be_pushed_again_does_not_stop_the_job() -> None:
    """The push is slow, the trainer two versions ahead; an engine comes back and finds a damaged bucket."""
    scene = Scene(
        scene_job(train__steps=6, checkpoint__every=1, rollout={"groups_per_step": 2, "swap": "when_published"})
    )
    damaged: list[WeightVersion] = []

    async def slow(trainer: ScriptedTrainer, version: WeightVersion) -> None:
        await asyncio.sleep(15.0)

    async def damaged_once(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if len(scene.engines["fast-0"]) == 2 and engine is scene.engine("fast-0") and not damaged:
            damaged.append(manifest.version)
            assert scene.trainers[-1].version == manifest.version + 2
            raise WeightError("bucket 0 is damaged")

    async def slow_start(spec: EngineSpec, before: int) -> None:
        if before:
            await asyncio.sleep(8.0)

    def kill_soon() -> None:
        asyncio.get_running_loop().call_later(2.0, setattr, scene.engine("fast-0"), "dead", "killed")

    scene.on_publish = slow
    scene.on_swap = damaged_once
    scene.on_start = slow_start
    scene.when(lambda event: isinstance(event, schema.SwapEnd) and event.version == 1, kill_soon)
    played = scene.play()
    assert damaged == [1]
    assert played.finished, played.error
    assert not played.of(schema.TrainerDown), [event.reason for event in played.of(schema.TrainerDown)]


def test_a_checkpoint_waits_for_the_push_that_its_trainer_could_not_repeat() -> None:
    """The push of version 1 is slow; the trainer is lost as soon as the checkpoint of version 2 is there."""
    scene = Scene(
        scene_job(train__steps=4, checkpoint__every=2, rollout={"groups_per_step": 2, "swap": "when_published"})
    )

    async def slow(trainer: ScriptedTrainer, version: WeightVersion) -> None:
        await asyncio.sleep(12.0)

    scene.on_publish = slow
    scene.when(
        lambda event: isinstance(event, schema.Checkpoint) and event.step == 2,
        lambda: setattr(scene.trainers[-1], "dead", "after the checkpoint"),
    )
    played = scene.play()
    assert played.finished, played.error
    assert len(played.of(schema.TrainerDown)) == 1
    pushed = next(event for event in played.of(schema.Pushed) if event.version == 1)
    assert pushed.n < next(event for event in played.of(schema.Checkpoint) if event.step == 2).n


def test_a_version_the_new_trainer_did_not_make_does_not_stop_the_job() -> None:
    """The trainer is restored at version 2, not pushed yet; an engine comes back and finds a bucket of 1 damaged."""
    scene = Scene(
        scene_job(train__steps=6, checkpoint__every=2, rollout={"groups_per_step": 2, "swap": "when_published"})
    )
    damaged: list[WeightVersion] = []

    async def damaged_once(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if len(scene.engines["fast-0"]) == 2 and engine is scene.engine("fast-0") and not damaged:
            damaged.append(manifest.version)
            assert (len(scene.trainers), scene.trainers[-1].version) == (2, 2)
            raise WeightError("bucket 0 is damaged")

    async def slow(trainer: ScriptedTrainer, version: WeightVersion) -> None:
        await asyncio.sleep(30.0 if version == 2 else 0.0)

    async def slow_start(spec: EngineSpec, before: int) -> None:
        await asyncio.sleep(8.0 if before else 0.0)

    def kill_trainer() -> None:
        scene.trainers[-1].dead = "after the checkpoint"

    def kill_engine() -> None:
        scene.engine("fast-0").dead = "killed"

    scene.on_publish = slow
    scene.on_swap = damaged_once
    scene.on_start = slow_start
    scene.when(lambda event: isinstance(event, schema.Checkpoint) and event.step == 2, kill_trainer)
    scene.when(lambda event: isinstance(event, schema.SwapEnd) and event.version == 1, kill_engine)
    played = scene.play()
    assert damaged == [1]
    assert played.finished, played.error
    assert len(played.of(schema.TrainerDown)) == 1, [event.reason for event in played.of(schema.TrainerDown)]


def test_a_trainer_lost_in_a_repair_is_not_asked_for_what_its_successor_does_not_hold() -> None:
    """An engine finds a bucket of version 1 damaged when the checkpoint of 2 is there; the trainer dies as it pushes
    1 again, and its successor begins at 2."""
    scene = Scene(
        scene_job(train__steps=6, checkpoint__every=2, rollout={"groups_per_step": 2, "swap": "when_published"})
    )
    asked: list[WeightVersion] = []

    async def damaged_late(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if engine is scene.engine("fast-0") and manifest.version == 1 and len(asked) == 1:
            await asyncio.sleep(40.0)
            assert scene.trainers[-1].version == 2
            raise WeightError("bucket 0 is damaged")

    async def die_at_the_second(trainer: ScriptedTrainer, version: WeightVersion) -> None:
        if version == 1:
            asked.append(version)
            if len(asked) == 2:
                trainer.dead = "in the repair"
                trainer.well()

    scene.on_publish = die_at_the_second
    scene.on_swap = damaged_late
    played = scene.play()
    assert asked == [1, 1]
    assert played.finished, played.error
    assert len(played.of(schema.TrainerDown)) == 1, [event.reason for event in played.of(schema.TrainerDown)]


def test_steps_that_train_on_nothing_are_told_of_once() -> None:
    scene = Scene(scene_job(train__steps=12), metrics={"perf/tokens": 0.0})
    (told,) = scene.play().of(schema.Warning)
    assert told.text.startswith("steps 0 to 4 trained on nothing")

    async def now_and_then(trainer: ScriptedTrainer, batch: Batch) -> None:
        trainer.scene.metrics["perf/tokens"] = 100.0 if batch.step % 5 == 4 else 0.0

    scene = Scene(scene_job(train__steps=12), on_step=now_and_then)
    assert not scene.play().of(schema.Warning)


def pushes_at(scene: Scene, kind: type[Event], **fields: Any) -> dict[int, str]:
    """Whether each version can be pushed once more, asked at the first such event."""
    found: dict[int, str] = {}

    async def ask() -> None:
        assert scene.coordinator is not None
        assert scene.coordinator.learner is not None
        trainer = scene.coordinator.learner.trainer
        for version in range(trainer.version + 1):
            try:
                found[version] = f"version {(await trainer.publish(version)).version}"
            except VersionGone:
                found[version] = "gone"

    scene.when(
        lambda event: isinstance(event, kind) and all(getattr(event, key) == value for key, value in fields.items()),
        lambda: scene.coordinator is not None and scene.coordinator.supervisor.spawn(ask()),
    )
    return found


def test_the_newest_version_and_the_one_before_can_be_pushed_again_and_older_ones_are_gone() -> None:
    scene = Scene(scene_job(train__steps=5))
    found = pushes_at(scene, schema.StepEnd, version=3)
    played = scene.play()
    assert found == {0: "gone", 1: "gone", 2: "version 2", 3: "version 3"}
    assert played.finished
    assert not played.of(schema.TrainerDown), "to be asked for what it does not hold is no trainer's death"


def test_a_rebuilt_trainer_holds_what_it_has_learnt_again_and_nothing_older() -> None:
    scene = Scene(scene_job(train__steps=5), **crash_at(3, "during"))  # type: ignore[arg-type]
    found = pushes_at(scene, schema.TrainerUp)
    played = scene.play()
    assert found == {0: "gone", 1: "gone", 2: "version 2", 3: "version 3"}
    assert played.finished
    assert len(played.of(schema.TrainerDown)) == 1


def test_a_resumed_trainer_holds_no_version_before_its_checkpoint() -> None:
    scene = Scene(scene_job(train__steps=3))
    found = pushes_at(scene, schema.Resumed)
    played = scene.play(kills=[lambda event: isinstance(event, schema.Checkpoint) and event.step == 3])
    assert found == {0: "gone", 1: "gone", 2: "gone", 3: "version 3"}
    assert played.finished
    assert not played.of(schema.TrainerDown)

"""What a trainer sets aside: said once, counted, the same after a crash; and training that comes to nothing stops."""

from collections.abc import Callable, Sequence

import pytest

from rollart.errors import JobStopped, TrainerError
from rollart.events import schema
from rollart.events.schema import Event
from rollart.policy.training import STOP_AFTER, WARN_AFTER
from rollart.report.fold import SummaryFold
from rollart.report.summary import Summary
from rollart.types import Batch, SetAside, Trajectory
from tests.control.scene import Played, Scene, ScriptedTrainer, scene_job
from tests.control.test_records import Kept


def aside(members: Sequence[Trajectory]) -> tuple[SetAside, ...]:
    return tuple(SetAside(member.id, "its loss is not a finite number") for member in members)


def first_group(batch: Batch) -> tuple[SetAside, ...]:
    """All of a group of step 1, and one member of the other."""
    if batch.step != 1:
        return ()
    whole, other = batch.groups
    return aside([*whole.members, other.members[0]])


def summary_of(played: Played) -> Summary:
    summary = SummaryFold()
    for event in played.events:
        summary.read(event)
    return summary.result()


def test_a_group_set_aside_whole_has_failed_and_one_set_aside_in_part_is_trained() -> None:
    scene = Scene(scene_job(train__steps=3), set_aside=first_group)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    event = played.one(schema.StepAside)
    whole, other = scene.journal.all[1].groups
    assert event.step == 1
    assert event.groups == [whole.id]
    assert [name for name, _ in event.trajectories] == [str(m.id) for m in (*whole.members, other.members[0])]
    assert event.cause == played.one(schema.StepStart, step=1).n
    summary = summary_of(played)
    assert summary.groups.trained == 5
    assert summary.groups.failed == summary.tasks["a"].failed == 1
    assert summary.groups.lost == summary.groups.trained_twice == 0
    assert summary.failures["sample"].count == 3
    assert "not a finite number" in summary.failures["sample"].reasons[0]
    assert summary.waste["failed"].trajectories == 3
    tokens = sum(
        member.sampled_tokens for batch in scene.journal.all.values() for g in batch.groups for member in g.members
    )
    lost = sum(member.sampled_tokens for member in (*whole.members, other.members[0]))
    assert summary.throughput_tokens_per_s == pytest.approx((tokens - lost) / summary.time_s, abs=1e-3)


def test_what_was_set_aside_is_not_kept_as_trained_on() -> None:
    kept = Kept()
    scene = Scene(scene_job(train__steps=3), set_aside=first_group, recorder=kept)
    assert scene.play().finished
    whole, other = scene.journal.all[1].groups
    fates = {name: fate for name, (fate, _, _) in kept.fates().items()}
    assert {fates[str(member.id)] for member in whole.members} == {"failed"}
    first, *rest = other.members
    assert fates[str(first.id)] == "unused"
    assert {fates[str(member.id)] for member in rest} == {"trained"}


def test_no_task_of_a_group_that_was_set_aside_is_given_out_again() -> None:
    scene = Scene(scene_job(train__steps=6), set_aside=first_group)
    played = scene.play()
    tasks = [task for event in played.of(schema.Batch) for task in event.tasks]
    assert len(set(tasks)) == len(tasks)


@pytest.mark.parametrize(
    "kill",
    [
        lambda event: isinstance(event, schema.Written) and event.step == 1,
        lambda event: isinstance(event, schema.StepAside),
        lambda event: isinstance(event, schema.StepEnd) and event.step == 1,
    ],
)
def test_a_resumed_job_sets_the_same_aside_and_counts_it_once(kill: Callable[[Event], bool]) -> None:
    scene = Scene(scene_job(train__steps=4), set_aside=first_group)
    played = scene.play(kills=[kill])
    assert played.finished, played.error
    assert not played.violations
    told = played.of(schema.StepAside)
    assert {tuple(name for name, _ in event.trajectories) for event in told} == {
        tuple(name for name, _ in told[0].trajectories)
    }
    summary = summary_of(played)
    assert summary.failures["sample"].count == 3
    assert summary.groups.failed == 1
    assert summary.groups.trained == 7
    assert summary.groups.lost == summary.groups.trained_twice == 0


def test_a_replay_that_sets_other_data_aside_breaks_a_promise() -> None:
    """The audit must notice: weights would differ from those that were served."""
    scene = Scene(scene_job(train__steps=4))
    tries: list[int] = []

    def other_each_time(batch: Batch) -> tuple[SetAside, ...]:
        if batch.step != 1:
            return ()
        tries.append(batch.step)
        return aside([batch.groups[0].members[len(tries) % 2]])

    scene.set_aside = other_each_time
    played = scene.play(kills=[lambda event: isinstance(event, schema.StepEnd) and event.step == 1])
    assert any("set other trajectories aside" in text for text in played.violations)


def test_a_replay_that_sets_nothing_aside_any_more_breaks_a_promise() -> None:
    scene = Scene(scene_job(train__steps=4))
    tries: list[int] = []

    def once(batch: Batch) -> tuple[SetAside, ...]:
        if batch.step != 1:
            return ()
        tries.append(batch.step)
        return aside([batch.groups[0].members[0]]) if len(tries) == 1 else ()

    scene.set_aside = once
    played = scene.play(kills=[lambda event: isinstance(event, schema.StepEnd) and event.step == 1])
    assert any("set nothing aside" in text for text in played.violations)


def test_a_trainer_that_is_lost_with_its_data_sets_it_aside_when_it_is_back() -> None:
    """Ranks that run out of memory cannot go on; the next trainer knows what the first one noted."""
    scene = Scene(scene_job(train__steps=3), set_aside=first_group)

    async def lost_once(trainer: ScriptedTrainer, batch: Batch) -> None:
        if batch.step == 1 and trainer.life == 0:
            trainer.dead = "out of memory"
            raise TrainerError("out of memory")

    scene.on_step = lost_once
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert len(played.of(schema.TrainerDown)) == len(played.of(schema.StepAside)) == 1


SKIPPED = {"actor/skipped_updates": 1.0, "actor/updates": 0.0}


def test_gradients_that_stay_not_finite_are_a_warning_and_then_stop_the_job_with_a_checkpoint() -> None:
    scene = Scene(scene_job(train__steps=40), metrics=SKIPPED)
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert f"the last {STOP_AFTER} steps changed nothing: their gradients were not finite" in str(played.error)
    warnings = [event.text for event in played.of(schema.Warning)]
    assert sum(f"the last {WARN_AFTER} steps changed nothing" in text for text in warnings) == 1
    assert len(scene.steps) == STOP_AFTER
    assert played.of(schema.Checkpoint)[-1].step == STOP_AFTER


def test_a_job_that_stopped_so_can_be_resumed() -> None:
    scene = Scene(scene_job(train__steps=STOP_AFTER + 2), metrics=SKIPPED)
    assert isinstance(scene.play().error, JobStopped)
    scene.metrics = {}
    again = scene.play()
    assert again.finished, again.error
    assert scene.steps[-1][1] == STOP_AFTER + 1


def test_batches_replayed_after_a_crash_do_not_count_towards_the_stop() -> None:
    scene = Scene(scene_job(train__steps=STOP_AFTER + 5), metrics=SKIPPED)

    def kill(event: Event) -> bool:
        return bool(isinstance(event, schema.StepEnd) and event.step == STOP_AFTER - 2)

    scene.when(lambda event: isinstance(event, schema.Resumed), lambda: setattr(scene, "metrics", {}))
    played = scene.play(kills=[kill])
    assert played.finished, played.error


@pytest.mark.parametrize("metrics", [{"actor/skipped_updates": 1.0, "actor/updates": 3.0}, {"actor/updates": 0.0}])
def test_a_step_that_made_an_update_or_had_none_to_make_is_not_in_vain(metrics: dict[str, float]) -> None:
    played = Scene(scene_job(train__steps=STOP_AFTER + 2), metrics=metrics).play()
    assert played.finished, played.error


def test_one_good_step_ends_the_count() -> None:
    scene = Scene(scene_job(train__steps=2 * STOP_AFTER))
    scene.set_aside = lambda batch: (
        () if batch.step % STOP_AFTER == STOP_AFTER - 1 else aside([m for group in batch.groups for m in group.members])
    )
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations


def test_batches_that_are_set_aside_whole_stop_the_job_in_the_end() -> None:
    scene = Scene(scene_job(train__steps=40))
    scene.set_aside = lambda batch: aside([member for group in batch.groups for member in group.members])
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert "all of their data was set aside, the last for: its loss is not a finite number" in str(played.error)
    assert not played.violations


def test_steps_whose_data_was_all_set_aside_are_not_said_to_have_earned_the_same() -> None:
    scene = Scene(scene_job(train__steps=STOP_AFTER + 2), metrics={"perf/tokens": 0.0})
    scene.set_aside = lambda batch: aside([member for group in batch.groups for member in group.members])
    played = scene.play()
    warnings = [event.text for event in played.of(schema.Warning)]
    assert any("all of their data was set aside" in text for text in warnings)
    assert not any("earned the same" in text for text in warnings)

"""What control hands to the recorder: every finished attempt once, with what was shown, said and waited for."""

import asyncio
from dataclasses import dataclass, field

from rollart.control.env_manager import Session
from rollart.errors import EnvError
from rollart.events import schema
from rollart.types import Batch, Observation, Played, Status, Task, TrajectoryId
from tests.contracts.recorder import RecorderBench, RecorderContract
from tests.control.scene import TOKEN_S, Scene, ScriptedEnv, scene_job


@dataclass
class Kept:
    """A recorder in memory."""

    all: list[Played] = field(default_factory=list)
    over: list[tuple[str, str]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def played(self, played: Played) -> None:
        self.all.append(played)

    def ended(self, group: str, how: str) -> None:
        self.over.append((group, how))

    def trained(self, batch: Batch) -> None:
        self.batches.append(batch)

    def fates(self) -> dict[str, tuple[str, int | None, float | None]]:
        trained = {
            str(member.id): ("trained", batch.step, advantage)
            for batch in self.batches
            for group in batch.groups
            for member, advantage in zip(group.members, group.advantages, strict=True)
        }
        groups = {group.id: "unused" for batch in self.batches for group in batch.groups} | dict(self.over)
        return {
            str(one.trajectory.id): trained.get(
                str(one.trajectory.id), (groups.get(one.trajectory.id.group, "open"), None, None)
            )
            for one in self.all
        }


class TestKept(RecorderContract):
    def bench(self) -> RecorderBench:
        kept = Kept()
        return RecorderBench(recorder=kept, kept=kept.fates)


def test_every_attempt_that_ends_is_handed_over_once() -> None:
    kept = Kept()
    scene = Scene(job=scene_job(rollout__spare_members=1, evaluation={"every": 2, "episodes": 2}), recorder=kept)
    ended = scene.play().of(schema.End)
    ids = [str(played.trajectory.id) for played in kept.all]
    assert ids == [event.id for event in ended]
    assert len(ids) == len(set(ids)) > 12
    by_status = {played.trajectory.status for played in kept.all}
    assert Status.DONE in by_status
    assert Status.ABORTED in by_status
    assert {str(one.trajectory.id) for one in kept.all if one.evaluation} == {
        name for name in ids if name.startswith("eval")
    }


def test_a_turn_says_what_was_shown_and_answered_and_where() -> None:
    kept = Kept()
    scene = Scene(recorder=kept)
    scene.play()
    whole = next(played for played in kept.all if played.trajectory.status is Status.DONE)
    task = whole.trajectory.task.id
    assert [[(m.role, m.content) for m in note.shown] for note in whole.notes] == [
        [("user", f"{task}?")],
        [("user", "more 1")],
    ]
    assert whole.left == ()
    for note, turn in zip(whole.notes, whole.trajectory.turns, strict=True):
        assert note.text == " ".join(str(token) for token in turn.completion.tokens.tolist())
        assert note.pool == "fast"
        assert note.waited_s == 0.0
    assert (whole.open_s, whole.reset_s, whole.queue_s, whole.reward_s) == (0.0, 1.0, 0.0, 0.5)


def test_what_the_environment_said_last_is_kept() -> None:
    class Ends(ScriptedEnv):
        async def step(self, action: str) -> Observation:
            return self.says("You fell.", reward=0.0, done=True)

    kept = Kept()
    scene = Scene(recorder=kept)

    async def opened(task: object, trajectory: object) -> Ends:
        return Ends(scene, task, trajectory)  # type: ignore[arg-type]

    scene.on_open = opened
    scene.play()
    assert {tuple(m.content for m in one.left) for one in kept.all if one.trajectory.status is Status.DONE} == {
        ("You fell.",)
    }


def test_waiting_for_an_engine_is_told_from_generating() -> None:
    """Two engines lose a call each before the third try is answered."""
    kept = Kept()
    scene = Scene(job=scene_job(train__steps=8, rollout__staleness=5), recorder=kept)
    lost: list[str] = []

    async def dies(engine: object, request: object) -> None:
        if len(lost) < 2 and request.id == "g0.0.0/0":  # type: ignore[attr-defined]
            await asyncio.sleep(10.0)
            lost.append(engine.spec.id)  # type: ignore[attr-defined]
            engine.dead = "for the test"  # type: ignore[attr-defined]

    scene.on_generate = dies
    scene.play()
    whole = next(one for one in kept.all if str(one.trajectory.id) == "g0.0.0")
    assert len(lost) == 2
    turn, note = whole.trajectory.turns[0], whole.notes[0]
    assert note.waited_s >= 20.0
    assert abs(turn.generate_s - note.waited_s - 3 * TOKEN_S) < 1e-6


def test_reward_tries_and_waits_between_them_are_told_apart() -> None:
    kept = Kept()
    scene = Scene(job=scene_job(train__steps=1), recorder=kept)
    failed: dict[str, None] = {}

    async def fails_once(trajectory: object) -> None:
        name = str(trajectory.id)  # type: ignore[attr-defined]
        if name not in failed:
            failed[name] = None
            raise ConnectionError("not now")

    scene.on_score = fails_once
    scene.play()
    done = [one for one in kept.all if one.trajectory.reward is not None]
    assert done
    assert {(round(one.reward_s, 6), round(one.queue_s, 6)) for one in done} == {(1.0, 1.0)}


def test_an_attempt_that_fails_is_handed_over_with_what_it_had() -> None:
    class Breaks(ScriptedEnv):
        async def step(self, action: str) -> Observation:
            raise ValueError("the map is torn")

    kept = Kept()
    scene = Scene(job=scene_job(limits__attempts=1), recorder=kept)

    async def opened(task: object, trajectory: object) -> Breaks:
        return Breaks(scene, task, trajectory)  # type: ignore[arg-type]

    scene.on_open = opened
    scene.play()
    failed = [one for one in kept.all if one.trajectory.status is Status.FAILED]
    assert failed
    for one in failed:
        assert "the map is torn" in one.trajectory.reason
        assert len(one.notes) == len(one.trajectory.turns) == 1
        assert one.notes[0].text != ""
    assert {how for _, how in kept.over} == {"failed"}


class Twice:
    """Asks the model twice before it acts once."""

    async def play(self, session: Session) -> Status:
        observation = await session.reset()
        context = session.tokenizer.render(observation.messages, fresh=True)
        await session.generate(context, fresh=True)
        said = await session.generate(context, fresh=True)
        assert said is not None
        await session.step("an answer of its own")
        return Status.DONE


def test_there_is_a_note_for_every_turn_of_any_agent() -> None:
    kept = Kept()
    Scene(agent=Twice(), recorder=kept).play()
    done = [one for one in kept.all if one.trajectory.status is Status.DONE]
    assert done
    for one in done:
        assert [note.text for note in one.notes] == ["", "an answer of its own"]
        assert [len(note.shown) for note in one.notes] == [1, 0]


def test_steps_are_told_once_made_and_again_after_a_restart() -> None:
    kept = Kept()
    scene = Scene(job=scene_job(train__steps=4), recorder=kept)
    played = scene.play()
    assert [batch.step for batch in kept.batches] == [0, 1, 2, 3]
    batches = {event.step: event.groups for event in played.of(schema.Batch)}
    assert {batch.step: [group.id for group in batch.groups] for batch in kept.batches} == batches
    kept = Kept()
    scene = Scene(job=scene_job(train__steps=4), recorder=kept)
    scene.play(kills=[lambda event: isinstance(event, schema.StepStart) and event.step == 2])
    assert [batch.step for batch in kept.batches] == [0, 1, 0, 1, 2, 3], "no checkpoint came between"


def test_groups_that_end_untrained_are_told() -> None:
    kept = Kept()
    scene = Scene(job=scene_job(), reward=lambda trajectory: 1.0, recorder=kept)
    played = scene.play()
    assert kept.over == [(event.group, event.how) for event in played.of(schema.Group)]
    assert {how for _, how in kept.over} == {"filtered"}


def test_why_an_attempt_failed_can_be_written_whatever_its_environment_said() -> None:
    kept = Kept()

    async def fails(task: Task, id: TrajectoryId) -> None:
        if id.attempt == 0:
            raise EnvError("no file caf\udce9.txt")

    scene = Scene(job=scene_job(train__steps=1), recorder=kept)
    scene.on_open = fails
    scene.play()
    reasons = {one.trajectory.reason for one in kept.all if one.trajectory.status is Status.FAILED}
    assert reasons == {"EnvError: no file caf?.txt"}

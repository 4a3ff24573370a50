"""Engines wait for machines, join with them and leave with them; the job goes on."""

from rollart.errors import ClusterError, JobStopped, NoRoom
from rollart.events import schema
from rollart.types import EngineSpec
from tests.control.scene import Scene, scene_job

LONG = 40
"""Waits for a machine in a row: far more than `limits.engine_restarts`."""


def test_an_engine_waits_for_its_machine_as_long_as_others_serve() -> None:
    scene = Scene(scene_job(train__steps=30, limits__backoff_s=0.1))
    waits = 0

    async def start(spec: EngineSpec, lives: int) -> None:
        nonlocal waits
        if spec.id == "fast-0" and lives and waits < LONG:
            waits += 1
            raise NoRoom("no machine")

    scene.on_start = start
    scene.at(3.25, lambda: setattr(scene.engine("fast-0"), "dead", "its machine is gone"))
    played = scene.play()

    assert played.finished
    assert not played.violations
    assert [event.reason for event in played.of(schema.EngineRetry)] == ["no machine"] * LONG
    assert played.one(schema.EngineUp).engine == "fast-0"
    assert not played.of(schema.EngineGone)


def test_a_job_whose_last_engine_finds_no_machine_stops_with_the_reason() -> None:
    scene = Scene(scene_job(pools=[{"name": "fast", "engines": {"count": 1}}, {"name": "rooms", "slots": 64}]))

    async def start(spec: EngineSpec, lives: int) -> None:
        if lives:
            raise NoRoom("no machine")

    scene.on_start = start
    scene.at(3.25, lambda: setattr(scene.engine("fast-0"), "dead", "its machine is gone"))
    played = scene.play()

    assert isinstance(played.error, JobStopped)
    assert len(played.of(schema.EngineRetry)) == 3


def grown(most: int) -> Scene:
    return Scene(
        scene_job(
            train__steps=12,
            limits__backoff_s=0.1,
            pools=[
                {"name": "fast", "hardware": "h20", "engines": {"count": 1, "most": most}},
                {"name": "rooms", "slots": 64},
            ],
        )
    )


def test_a_further_engine_joins_when_there_is_room_and_leaves_with_its_machine() -> None:
    scene = grown(2)
    waits = 0

    async def start(spec: EngineSpec, lives: int) -> None:
        nonlocal waits
        if spec.id == "fast-1":
            waits += 1
            if lives or waits <= LONG:
                raise NoRoom("no machine")

    scene.on_start = start
    scene.when(
        lambda event: isinstance(event, schema.Said) and event.engine == "fast-1",
        lambda: setattr(scene.engine("fast-1"), "dead", "its machine is gone"),
    )
    played = scene.play()

    assert played.finished
    assert not played.violations
    assert played.one(schema.Started).engines == ["fast-0"], "the job does not wait for it"
    assert played.one(schema.EngineExpected).engine == "fast-1"
    up, down = played.one(schema.EngineUp), played.one(schema.EngineDown)
    assert up.engine == down.engine == "fast-1"
    served = [event.n for event in played.of(schema.Send, engine="fast-1")]
    assert served
    assert all(up.n < number < down.n for number in served)
    assert all(version > 0 for _, version in scene.engine("fast-1").asked), "with the weights of the day"


def test_a_further_engine_that_cannot_start_is_given_up_and_the_job_goes_on() -> None:
    scene = grown(2)

    async def start(spec: EngineSpec, lives: int) -> None:
        if spec.id == "fast-1":
            raise ClusterError("broken image")

    scene.on_start = start
    played = scene.play()
    assert played.finished
    assert played.one(schema.EngineGone).engine == "fast-1"


def test_the_job_stops_when_only_engines_that_may_come_are_left() -> None:
    scene = grown(3)

    async def start(spec: EngineSpec, lives: int) -> None:
        if spec.id != "fast-0":
            raise NoRoom("no machine")
        if lives:
            raise ClusterError("broken image")

    scene.on_start = start
    scene.at(3.25, lambda: setattr(scene.engine("fast-0"), "dead", "killed"))
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert "no engine is left" in str(played.error)

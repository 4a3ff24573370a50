"""A full disk or store is nobody's death: what must be written waits for room, and stops the job only if that lasts."""

from collections.abc import Callable

import pytest

from rollart.errors import StayedFull, StoreFull
from rollart.events import schema
from rollart.types import Batch, Checkpoint, WeightVersion
from tests.control.scene import RecordingJournal, Scene, ScriptedEngine, ScriptedTrainer, scene_job


class FullDisk:
    """Full from `first_s` on for so many seconds of virtual time, for one kind of thing."""

    def __init__(self, scene: Scene, *, first_s: float, lasts_s: float) -> None:
        self.full = False
        self.refused = 0
        scene.at(first_s, lambda: setattr(self, "full", True))
        scene.at(first_s + lasts_s, lambda: setattr(self, "full", False))

    def write(self) -> None:
        if self.full:
            self.refused += 1
            raise StoreFull("no space left on device")


class FullJournal(RecordingJournal):
    disk: FullDisk
    kind: str

    def write_batch(self, batch: Batch) -> None:
        if self.kind == "batch":
            self.disk.write()
        super().write_batch(batch)

    def commit(self, checkpoint: Checkpoint) -> None:
        if self.kind == "checkpoint":
            self.disk.write()
        super().commit(checkpoint)


def filled(kind: str, *, lasts_s: float, store_full_s: float) -> tuple[Scene, FullDisk]:
    scene = Scene(scene_job(train__steps=6, checkpoint__every=1, limits__store_full_s=store_full_s))
    disk = FullDisk(scene, first_s=10.0, lasts_s=lasts_s)
    if kind == "publish":

        async def push(trainer: ScriptedTrainer, version: WeightVersion) -> None:
            disk.write()

        scene.on_publish = push
    elif kind == "save":
        scene.on_save = disk.write
    else:
        journal = FullJournal()
        journal.disk, journal.kind = disk, kind
        scene.journal = journal
    return scene, disk


@pytest.mark.parametrize("kind", ["publish", "save", "batch", "checkpoint"])
def test_a_full_store_is_waited_for_and_nothing_is_started_again_or_replayed(kind: str) -> None:
    scene, disk = filled(kind, lasts_s=100.0, store_full_s=300.0)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert disk.refused > 1, "it was tried again and again"
    assert len(scene.trainers) == 1
    assert not played.of(schema.TrainerDown)
    assert not played.of(schema.Replay)
    full, room = played.one(schema.StoreFull), played.one(schema.StoreRoom)
    assert "no space left on device" in full.reason
    assert full.what == room.what
    assert room.cause == full.n
    warning = played.one(schema.Warning)
    assert "no room to write" in warning.text
    assert "300 s" in warning.text


@pytest.mark.parametrize("kind", ["publish", "save", "batch", "checkpoint"])
def test_a_store_that_stays_full_stops_the_job_with_the_reason_and_a_whole_checkpoint(kind: str) -> None:
    scene, _ = filled(kind, lasts_s=10_000.0, store_full_s=60.0)
    played = scene.play()
    assert isinstance(played.error, StayedFull)
    assert "no room to write for 60 s (limits.store_full_s)" in str(played.error)
    assert "no space left on device" in str(played.error)
    assert "free some room and resume" in str(played.error)
    assert len(scene.trainers) == 1
    full = played.of(schema.StoreFull)[0]
    assert played.events[-1].t - full.t == pytest.approx(60.0, abs=1.0)
    assert scene.journal.latest() is not None


@pytest.mark.parametrize("call", ["stage", "swap"])
def test_an_engines_host_without_room_for_the_weights_is_waited_for(call: str) -> None:
    """One of two hosts: nobody is restarted, and the version goes in when there is room."""
    scene = Scene(scene_job(train__steps=6, limits__store_full_s=300.0))
    disk = FullDisk(scene, first_s=10.0, lasts_s=100.0)

    async def fetch(engine: ScriptedEngine, what: object) -> None:
        if engine.spec.id == "fast-0":
            disk.write()

    setattr(scene, f"on_{call}", fetch)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert disk.refused > 1, "it was tried again and again"
    assert not played.of(schema.EngineDown)
    assert not played.of(schema.WeightsDamaged)
    full, room = played.one(schema.StoreFull), played.one(schema.StoreRoom)
    assert full.what == room.what == "weights on the host of fast-0"
    assert "no space left on device" in full.reason
    assert room.t - full.t == pytest.approx(100.0, abs=10.0)


def test_an_engines_host_that_stays_full_stops_the_job_with_the_reason() -> None:
    scene = Scene(scene_job(train__steps=6, limits__store_full_s=60.0))
    disk = FullDisk(scene, first_s=10.0, lasts_s=10_000.0)

    async def stage(engine: ScriptedEngine, version: WeightVersion) -> None:
        disk.write()

    scene.on_stage = stage
    played = scene.play()
    assert isinstance(played.error, StayedFull)
    assert "weights on the host of fast-" in str(played.error)
    assert "no room to write for 60 s (limits.store_full_s)" in str(played.error)


def test_a_checkpoint_that_waited_is_of_what_there_is_then() -> None:
    scene, _ = filled("checkpoint", lasts_s=100.0, store_full_s=300.0)
    played = scene.play()
    room = played.one(schema.StoreRoom)
    late = next(event for event in played.of(schema.Checkpoint) if event.t >= room.t)
    admitted = [event.group for event in played.of(schema.Admit) if event.n < late.n]
    ended = [event.group for event in played.of(schema.Group) if event.n < late.n]
    trained = [group for event in played.of(schema.Batch) if event.n < late.n for group in event.groups]
    alive = set(admitted) - set(ended) - set(trained)
    assert alive == {*late.ready, *late.open}


def test_the_events_of_a_full_disk_hold_up_the_journal_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the journal knows, the events before it know as well: so it waits for their room too."""
    from rollart.events.log import LogHandle

    scene = Scene(scene_job(train__steps=3, limits__store_full_s=300.0))
    disk = FullDisk(scene, first_s=10.0, lasts_s=50.0)
    flush: Callable[..., None] = LogHandle.flush

    def full(self: LogHandle, *, durable: bool = False) -> None:
        if durable:
            disk.write()
        flush(self, durable=durable)

    monkeypatch.setattr(LogHandle, "flush", full)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert disk.refused
    assert len(scene.trainers) == 1

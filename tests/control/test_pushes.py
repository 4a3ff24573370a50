"""A push takes its time, and delays no step: what has arrived is swapped in, what nobody needs is not pushed."""

import asyncio

import pytest

from rollart.errors import StoreFull, WeightError
from rollart.events import schema
from rollart.events.schema import Event
from rollart.types import EngineSpec, WeightManifest, WeightVersion
from tests.control.scene import PUSH_S, SWAP_S, TRAIN_S, Played, Scene, ScriptedEngine, ScriptedTrainer, scene_job


def slow_pushes(push_s: float, **settings: object) -> Scene:
    """Every push takes so long in all; rollout keeps up with the trainer."""
    scene = Scene(scene_job(**{"train__steps": 10, "rollout__staleness": 2, **settings}), step_s=0.1, reset_s=0.1)

    async def push(trainer: ScriptedTrainer, version: WeightVersion) -> None:
        await asyncio.sleep(push_s - PUSH_S)

    scene.on_publish = push
    return scene


def starts(played: Played) -> list[float]:
    return [event.t for event in played.of(schema.StepStart)]


@pytest.mark.parametrize("push_s", [1.0, 4.0, 12.0])
def test_a_step_takes_as_long_as_training_or_the_push_whichever_is_longer(push_s: float) -> None:
    """Not as long as both: the push of a version goes on beside the step that the version before allows."""
    played = slow_pushes(push_s).play()
    assert played.finished
    assert not played.violations
    began = starts(played)[3:]  # the first step waits for rollout
    steps = len(began) - 1
    assert (began[-1] - began[0]) / steps == pytest.approx(max(TRAIN_S, push_s), abs=SWAP_S / steps + 0.01)


@pytest.mark.parametrize("bound", [1, 2, 3])
@pytest.mark.parametrize("push_s", [4.0, 12.0])
def test_the_age_in_steps_is_bounded_however_slow_the_push(push_s: float, bound: int) -> None:
    played = slow_pushes(push_s, rollout__staleness=bound, train__steps=14).play()
    assert played.finished
    assert not played.violations
    assert all(event.serving >= event.step - 1 for event in played.of(schema.StepStart))
    ages = [event.step - min(event.born) for event in played.of(schema.Batch)]
    assert max(ages) <= bound + 1
    assert all(event.serving - min(event.born) <= bound for event in played.of(schema.Batch))


def test_what_has_arrived_when_a_batch_is_taken_is_swapped_in_before_the_step() -> None:
    """Rollout is slow here, so that every second batch comes when its version is there."""
    played = Scene(scene_job(train__steps=6), step_s=8.0).play()
    assert played.finished
    late = [
        batch
        for batch in played.of(schema.Batch)
        if [1 for push in played.of(schema.Pushed, version=batch.step) if push.n < batch.n]
    ]
    assert len(late) >= 2
    for batch in late:
        step = played.one(schema.StepStart, step=batch.step)
        (swap,) = [event for event in played.of(schema.SwapEnd) if batch.n < event.n < step.n]
        assert (swap.version, step.serving) == (step.step, step.step)


def test_what_has_not_arrived_goes_in_beside_the_step_and_frees_the_slots_of_its_batch() -> None:
    played = slow_pushes(3.0).play()
    for swap in played.of(schema.SwapEnd)[1:]:
        step = next(event for event in played.of(schema.StepStart) if event.step == swap.version)
        end = played.one(schema.StepEnd, step=swap.version)
        assert step.n < swap.n < end.n
        pushed = next(event for event in played.of(schema.Pushed) if event.version == swap.version)
        assert swap.t == pytest.approx(pushed.t + SWAP_S), "as soon as it is there"
        admitted = [event for event in played.of(schema.Admit) if swap.n < event.n < swap.n + 4]
        assert len(admitted) >= 2, "as many as the batch had"


def full_at(scene: Scene, version: WeightVersion, until_s: float) -> None:
    """No room for this version until then."""
    before = scene.on_publish

    async def push(trainer: ScriptedTrainer, asked: WeightVersion) -> None:
        if asked == version and asyncio.get_running_loop().time() < until_s:
            raise StoreFull("no space left on device")
        if before is not None:
            await before(trainer, asked)

    scene.on_publish = push


def test_a_version_that_was_not_pushed_before_there_is_a_newer_one_is_left_out() -> None:
    scene = slow_pushes(4.0)
    full_at(scene, 3, until_s=1000.0)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert 3 not in scene.published
    skipped = played.one(schema.PushSkipped)
    assert (skipped.version, skipped.cause) == (3, played.one(schema.Push, version=3).n)
    assert "there was version 4" in skipped.reason
    assert [event.version for event in played.of(schema.SwapEnd)][:4] == [1, 2, 4, 5]
    assert played.one(schema.StepStart, step=4).serving == 4, "which needs 3, and has a newer one"
    full, room = played.one(schema.StoreFull), played.one(schema.StoreRoom)
    assert full.what == room.what, "what was to be written then is written, of another version"
    assert not played.of(schema.TrainerDown)


@pytest.mark.parametrize("every", [1, 100])
def test_a_trainer_that_dies_in_a_push_pushes_only_what_is_newest_then(every: int) -> None:
    """Version 3 is on its way when step 3 has made version 4, and the trainer is lost."""
    scene = slow_pushes(12.0, checkpoint__every=every)

    def dies() -> None:
        scene.trainers[-1].dead = "in a push"

    scene.when(lambda event: isinstance(event, schema.StepEnd) and event.version == 4, dies)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert len(scene.trainers) == 2
    assert played.one(schema.PushSkipped).version == 3
    assert scene.published[:3] == [1, 2, 4]
    assert [event.version for event in played.of(schema.SwapEnd)][:4] == [1, 2, 4, 5]


def test_a_push_that_is_lost_with_its_trainer_during_the_step_is_made_again() -> None:
    """No newer version is there: the step that would make one is lost as well."""
    scene = slow_pushes(4.0)

    def dies() -> None:
        asyncio.get_running_loop().call_later(2.0, setattr, scene.trainers[-1], "dead", "in a push")

    scene.when(lambda event: isinstance(event, schema.StepStart) and event.step == 3, dies)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert len(played.of(schema.TrainerDown)) == 1
    assert not played.of(schema.PushSkipped)
    assert [event.version for event in played.of(schema.SwapEnd)][:4] == [1, 2, 3, 4]


def test_an_engine_that_joins_during_a_push_takes_what_is_served_and_then_what_arrives() -> None:
    scene = slow_pushes(12.0)

    def dies() -> None:
        scene.engine("fast-0").dead = "killed"

    scene.when(lambda event: isinstance(event, schema.Push) and event.version == 3, dies)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    up = played.one(schema.EngineUp)
    pushed = played.one(schema.Pushed, version=3)
    assert (up.engine, up.version) == ("fast-0", 2)
    assert up.n < pushed.n, "it does not wait for what is on its way"
    assert scene.engine("fast-0").swapped[:3] == [2, 3, 4]


def test_a_version_is_kept_while_an_engine_loads_it() -> None:
    """One that comes back loads version 2 for so long that 3 is swapped in meanwhile."""
    scene = slow_pushes(4.0)
    loads: list[tuple[str, WeightVersion]] = []

    async def long_load(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if engine is scene.engines["fast-0"][-1] and len(scene.engines["fast-0"]) == 2 and not loads:
            loads.append(("begun", manifest.version))
            await asyncio.sleep(12.0)
            loads.append(("done", max(scene.dropped)))

    def dies() -> None:
        scene.engine("fast-0").dead = "killed"

    scene.on_swap = long_load
    scene.when(lambda event: isinstance(event, schema.SwapEnd) and event.version == 2, dies)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    begun, done = loads
    during = [event.version for event in played.of(schema.SwapEnd) if event.n < played.one(schema.EngineUp).n]
    assert max(during) > begun[1], "the others went on"
    assert done[1] <= begun[1], "and nothing was dropped that it was reading"
    assert max(scene.dropped) > begun[1], "but later"
    assert not played.of(schema.WeightsDamaged)


def test_an_engine_stages_a_version_when_it_has_loaded_the_one_before() -> None:
    """It keeps one staged version: told of the next too early it would let go of what it is about to load."""
    scene = slow_pushes(12.0)
    told: dict[str, list[tuple[WeightVersion, WeightVersion]]] = {}

    async def staged(engine: ScriptedEngine, version: WeightVersion) -> None:
        told.setdefault(engine.spec.id, []).append((version, engine.version))

    scene.on_stage = staged
    played = scene.play()
    assert played.finished
    for engine in scene.all_engines():
        seen = told[engine.spec.id]
        assert [version for version, _ in seen] == list(range(1, len(seen) + 1))
        assert all(has == version - 1 for version, has in seen)


def test_an_engine_that_is_slow_to_stage_holds_up_no_push() -> None:
    scene = slow_pushes(1.0)

    async def slow(engine: ScriptedEngine, version: WeightVersion) -> None:
        await asyncio.sleep(3.0)

    scene.on_stage = slow
    played = scene.play()
    for event in played.of(schema.Pushed):
        assert event.t == pytest.approx(played.one(schema.Push, version=event.version).t + PUSH_S)


def test_engines_that_cannot_have_what_is_served_any_more_go_on_with_the_next() -> None:
    """The buckets of version 3 are lost when a trainer that begins at 4 is all there is: no engine can load it, and no
    batch is there that would let 4 in."""
    scene = slow_pushes(12.0, checkpoint__every=1, rollout__staleness=1, limits__engine_restarts=3)

    async def lost(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if manifest.version == 3:
            await asyncio.sleep(2.0)
            raise WeightError("bucket 0 is missing")

    def dies() -> None:
        scene.trainers[-1].dead = "after its checkpoint"

    def slower() -> None:
        scene.step_s = 15.0

    scene.on_swap = lost
    scene.when(lambda event: isinstance(event, schema.SwapStart) and event.version == 2, slower)
    scene.when(lambda event: isinstance(event, schema.Checkpoint) and event.step == 4, dies)
    played = scene.play()
    assert played.finished, played.error
    assert {event.version for event in played.of(schema.WeightsDamaged)} == {3}
    assert len(played.of(schema.EngineDown)) == 2
    assert {event.version for event in played.of(schema.EngineUp)} == {4}
    assert played.one(schema.EngineUp, engine="fast-0").n < played.one(schema.Batch, step=4).n


def test_a_restart_of_the_coordinator_in_a_push_begins_with_the_weights_of_its_trainer() -> None:
    scene = slow_pushes(12.0, checkpoint__every=2)

    def kill(event: Event) -> bool:
        return isinstance(event, schema.StepEnd) and event.version == 5

    played = scene.play(kills=[kill])
    assert played.finished, played.error
    assert not played.violations
    resumed = played.one(schema.Resumed)
    first = next(event for event in played.of(schema.SwapEnd) if event.n > resumed.n)
    assert first.version == resumed.step


def test_the_last_evaluation_waits_for_the_last_weights() -> None:
    scene = slow_pushes(12.0, train__steps=3, evaluation={"every": 3, "episodes": 2})
    played = scene.play()
    assert played.finished
    assert [event.versions for event in played.of(schema.Eval)] == [[3, 3]]


def test_a_slow_start_of_an_engine_is_no_reason_to_wait_either() -> None:
    """An engine that is away while weights change takes part in none of it."""
    scene = slow_pushes(4.0)

    async def slow_start(spec: EngineSpec, before: int) -> None:
        await asyncio.sleep(20.0 if before else 0.0)

    def dies() -> None:
        scene.engine("fast-0").dead = "killed"

    scene.on_start = slow_start
    scene.when(lambda event: isinstance(event, schema.StepStart) and event.step == 3, dies)
    played = scene.play()
    assert played.finished
    assert not played.violations
    up = played.one(schema.EngineUp)
    assert up.version >= max(event.version for event in played.of(schema.SwapEnd) if event.n < up.n)


def test_a_swap_waits_until_the_version_is_on_every_host_and_stops_no_engine_for_that() -> None:
    scene = slow_pushes(1.0)
    here: dict[tuple[str, WeightVersion], float] = {}

    async def slow(engine: ScriptedEngine, version: WeightVersion) -> None:
        await asyncio.sleep(2.5 if engine.spec.id == "fast-1" else 0.5)
        here[engine.spec.id, version] = asyncio.get_running_loop().time()

    scene.on_stage = slow
    played = scene.play()
    assert played.finished
    assert not played.violations
    assert played.of(schema.EngineSwap)
    for event in played.of(schema.SwapStart):
        staged = played.one(schema.Staged, version=event.version)
        began = played.one(schema.Push, version=event.version)
        assert staged.n < event.n
        assert staged.t == pytest.approx(began.t + 2.5), "the slower of both hosts"
    for wave in played.of(schema.Suspend):
        back = {
            one.engines[0]: one.t for one in played.of(schema.Resume) if one.n > wave.n and one.t < wave.t + 2 * SWAP_S
        }
        exposed_s = {name: back[name] - wave.t for name in wave.engines}
        assert exposed_s == pytest.approx(dict.fromkeys(wave.engines, SWAP_S))


def test_engines_that_hold_a_version_nobody_swapped_to_take_a_newer_one_that_is_asked_for() -> None:
    """The last evaluation wants the last version: it waits for no swap to the one before, which no batch asks for."""
    scene = slow_pushes(1.0, train__steps=3, evaluation={"every": 3, "episodes": 2})

    async def slow(engine: ScriptedEngine, version: WeightVersion) -> None:
        await asyncio.sleep(20.0 if version == 2 else 0.0)

    scene.on_stage = slow
    played = scene.play()
    assert played.finished, played.error
    assert [event.versions for event in played.of(schema.Eval)] == [[3, 3]]


def test_an_engine_that_hangs_while_it_stages_is_found_and_the_others_go_on() -> None:
    """It has no requests: nobody would notice, and no version would ever arrive."""
    pools = [
        {"name": "fast", "hardware": "h20", "engines": {"count": 2}},
        {"name": "idle", "hardware": "h800", "engines": {"count": 1}},
        {"name": "rooms", "slots": 64},
    ]
    tasks = [{"name": "t", "group_size": 2, "max_turns": 4, "max_tokens": 8, "affinity": "fast"}]
    scene = slow_pushes(1.0, limits__progress_s=30.0, pools=pools, tasks=tasks)

    async def hangs(engine: ScriptedEngine, version: WeightVersion) -> None:
        if engine is scene.engines["idle-0"][0] and version == 3:
            engine.hung = True
            await engine.well()

    scene.on_stage = hangs
    played = scene.play()
    assert played.finished, played.error
    down = played.one(schema.EngineDown)
    assert down.engine == "idle-0"
    assert "asked for its progress" in down.reason
    assert down.t - played.one(schema.Push, version=3).t < 60
    assert played.one(schema.EngineUp).engine == "idle-0"

"""Weights change under running work: nothing is lost, nothing goes back, nothing grows too old."""

import asyncio
import re

import pytest

from rollart.config.job import Job
from rollart.control.groups import GroupPlayer
from rollart.events import schema
from rollart.events.schema import Event
from rollart.ports import Env
from rollart.types import GenerateRequest, Observation, Status, Task, Trajectory, TrajectoryId, WeightManifest
from tests.control.invariant import check_first_invariant
from tests.control.scene import Played, Scene, ScriptedEngine, ScriptedEnv, scene_job

FOUR = [{"name": "fast", "hardware": "h20", "engines": {"count": 4}}, {"name": "rooms", "slots": 64}]
LONG = [{"name": "a", "group_size": 2, "max_turns": 8, "max_tokens": 200}]


def rollout(**settings: object) -> dict[str, object]:
    return {"groups_per_step": 2, **settings}


def long_answers(job: Job) -> Scene:
    """Answers of 4 s and more, so that swaps come in the middle of them."""
    return Scene(job, answer_tokens=lambda request: 30 + 7 * (sum(map(ord, request.id)) % 5))


def test_suspend_swap_resume_keeps_in_flight_work_and_its_spans_show_both_versions() -> None:
    scene = long_answers(scene_job(tasks=LONG, train__steps=6))
    played = scene.play()
    assert played.finished
    assert not played.violations
    assert not played.of(schema.Lost)
    assert not played.ends("failed")
    both = [event for event in played.of(schema.Said) if len(event.spans) > 1]
    assert both
    assert all(event.spans[0][0] < event.spans[1][0] for event in both)
    check_first_invariant(scene)
    trained = {group for event in played.of(schema.Batch) for group in event.groups}
    assert {event.id.split(".")[0] for event in both} & trained, "and it is trained on"


@pytest.mark.parametrize("rolling", [1, 2, 3])
@pytest.mark.parametrize("swap", ["after_batch", "when_published"])
def test_rolling_swaps_never_serve_a_trajectory_with_older_weights_than_it_has_seen(swap: str, rolling: int) -> None:
    scene = long_answers(
        scene_job(tasks=LONG, pools=FOUR, rollout=rollout(rolling=rolling, swap=swap, staleness=2), train__steps=8)
    )
    played = scene.play()
    assert played.finished
    assert not played.violations
    waves = played.of(schema.Suspend)
    assert max(len(event.engines) for event in waves) <= rolling
    newest: dict[str, int] = {}
    for said in scene.said:
        assert said.versions == sorted(said.versions)
        assert said.versions[0] >= newest.get(said.request.session, 0)
        assert said.versions[0] >= said.request.min_version
        newest[said.request.session] = said.versions[-1]
    for engine in scene.all_engines():
        for request, version in engine.asked:
            assert version >= request.min_version


def test_a_trajectory_whose_engine_dies_in_the_middle_of_a_rolling_swap_waits_for_weights_as_new_as_its_own() -> None:
    """It has tokens of the new weights; the other engines still have the old ones, and are free."""
    scene = Scene(scene_job(pools=FOUR, rollout=rollout(rolling=1, staleness=2), train__steps=6), turns=8)

    async def slow(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if engine.spec.id != "fast-0":
            await asyncio.sleep(8.0)

    scene.on_swap = slow

    def first_wave(event: Event) -> bool:
        return bool(
            isinstance(event, schema.Resume) and event.engines == ["fast-0"] and scene.engine("fast-0").version == 3
        )

    def kill_soon() -> None:
        asyncio.get_running_loop().call_later(2.0, setattr, scene.engine("fast-0"), "dead", "killed")

    scene.when(first_wave, kill_soon)
    played = scene.play()
    assert played.finished
    assert not played.violations
    lost = {event.id for event in played.of(schema.Lost) if event.engine == "fast-0"}
    asked = [request for engine in scene.all_engines() for request, _ in engine.asked]
    assert [request for request in asked if request.id in lost and request.min_version == 3], "it had seen the new ones"
    for engine in scene.all_engines():
        for request, version in engine.asked:
            assert version >= request.min_version


def test_while_one_wave_swaps_the_others_serve() -> None:
    scene = long_answers(scene_job(tasks=LONG, pools=FOUR, rollout=rollout(rolling=1, staleness=2), train__steps=6))
    played = scene.play()
    suspended: set[str] = set()
    served = 0
    for event in played.events:
        if isinstance(event, schema.Suspend):
            suspended = set(event.engines)
        elif isinstance(event, schema.Resume):
            suspended = set()
        elif isinstance(event, schema.Send):
            assert event.engine not in suspended
            served += bool(suspended)
    assert served


def test_engines_are_told_of_a_coming_version_before_it_is_there() -> None:
    scene = Scene()
    played = scene.play()
    for engine in scene.all_engines():
        assert engine.staged[:3] == [1, 2, 3]
        assert engine.swapped == [1, 2]
    assert scene.published == [1, 2]
    assert scene.dropped == [1, 2], "older ones are dropped from the store"
    assert [event.version for event in played.of(schema.SwapEnd)] == [1, 2]


def test_drain_waits_for_the_trajectories_in_flight_and_they_end_on_old_weights() -> None:
    scene = long_answers(scene_job(mode="one-off", tasks=LONG, rollout=rollout(), train__steps=5))
    played = scene.play()
    assert played.finished
    assert not played.violations
    assert all(len(event.spans) == 1 for event in played.of(schema.Said))
    running: set[str] = set()
    for event in played.events:
        if isinstance(event, schema.Start):
            running.add(event.id)
        elif isinstance(event, schema.End):
            running.discard(event.id)
        elif isinstance(event, schema.SwapStart):
            assert not running
    versions: dict[str, set[int]] = {}
    for said in scene.said:
        versions.setdefault(said.request.session, set()).update(said.versions)
    assert all(len(seen) == 1 for seen in versions.values())


def test_drain_holds_a_retry_back_until_the_swap_is_done() -> None:
    scene = Scene(scene_job(mode="one-off", rollout=rollout(), train__steps=8, limits__backoff_s=0.1), step_s=4.0)

    async def fails_first(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.member == 1 and trajectory.attempt == 0 and task.index >= 4:
            await asyncio.sleep(1.0 + task.index * 7 % 10)
            raise RuntimeError("no")
        return None

    scene.on_open = fails_first
    played = scene.play()
    assert played.finished
    assert not played.violations
    swaps = [(start.n, end.n, end.t) for start, end in pairs(played)]
    for event in played.of(schema.Start):
        assert not any(first < event.n < last for first, last, _ in swaps), "nothing starts while weights change"
    failed_s = {event.id.rpartition(".")[0]: event.t for event in played.ends("failed")}
    retries = [event for event in played.of(schema.Start) if event.id.endswith(".1")]
    held = [
        event
        for event in retries
        if event.t in {end_s for _, _, end_s in swaps} and event.t > failed_s[event.id.rpartition(".")[0]] + 0.2
    ]
    assert held, "it would have been tried again 0.1 s after it failed"


def pairs(played: Played) -> list[tuple[Event, Event]]:
    return list(zip(played.of(schema.SwapStart), played.of(schema.SwapEnd), strict=True))


class EndsLate(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        await asyncio.sleep(60.0)
        return await super().step(action)


def where_it_waits(scene: Scene, place: str) -> None:
    """Trajectories of one group stay for a minute in their engine, environment or reward."""

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        return EndsLate(scene, task, trajectory) if trajectory.group == "g5" else None

    async def generate(engine: ScriptedEngine, request: GenerateRequest) -> None:
        if request.session.startswith("g5.") and request.turn == 1:
            await asyncio.sleep(60.0)

    async def score(trajectory: Trajectory) -> None:
        if trajectory.id.group == "g5":
            await asyncio.sleep(60.0)

    match place:
        case "environment":
            scene.on_open = opened
        case "engine":
            scene.on_generate = generate
        case _:
            scene.on_score = score


@pytest.mark.parametrize("place", ["engine", "environment", "reward"])
def test_what_is_too_old_after_a_swap_is_stopped_wherever_it_waits_and_its_task_comes_back(place: str) -> None:
    scene = Scene(scene_job(train__steps=8, rewards__timeout_s=100.0))
    where_it_waits(scene, place)
    played = scene.play()
    assert played.finished
    assert not played.violations
    ended = played.one(schema.Group, group="g5")
    assert ended.how == "stale"
    swap = next(event for event in played.of(schema.SwapEnd) if event.n == ended.cause)
    assert swap.t == ended.t, "at the swap, not when it would have ended"
    stopped = [event for event in played.ends("stale") if event.id.startswith("g5.")]
    assert len(stopped) in (1, 2)
    assert {event.t for event in stopped} == {swap.t}
    assert {event.reason for event in stopped} == {"too old after a swap"}
    again = [event for event in played.of(schema.Admit) if event.task == "a/5"]
    assert len(again) == 2
    if place == "engine":
        assert [name for engine in scene.all_engines() for name in engine.aborted if name.startswith("g5.")]


def test_a_trajectory_too_old_before_its_next_turn_does_not_take_it() -> None:
    """Seen from inside: the check that stands before each send."""
    scene = Scene(scene_job(train__steps=6))
    coordinator_checks: list[Status] = []

    async def ages(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory == ("g1", 1, 0):
            return AgesInside(scene, task, trajectory)
        return None

    class AgesInside(ScriptedEnv):
        async def step(self, action: str) -> Observation:
            assert scene.coordinator is not None
            assert scene.coordinator.learner is not None
            players = scene.coordinator.learner.rollout.players
            assert isinstance(players, GroupPlayer)
            group = players.groups["g1"]
            attempt = group.members[1].attempt
            assert attempt is not None
            attempt.born = -5
            coordinator_checks.append(Status.STALE)
            return self.says("go on")

    scene.on_open = ages
    played = scene.play()
    assert played.finished
    assert coordinator_checks
    end = played.one(schema.End, id="g1.1.0")
    assert (end.status, end.reason) == ("stale", "too old before its next turn")
    assert played.one(schema.Group, group="g1").how == "stale"
    sibling = played.one(schema.End, id="g1.0.0")
    assert (sibling.status, sibling.reason) == ("stale", "a member of the group is too old")


def test_with_bound_0_everything_trained_on_is_of_the_weights_it_is_trained_with() -> None:
    scene = Scene(scene_job(mode="sync+", rollout=rollout(spare_groups=2), train__steps=5))
    played = scene.play()
    assert played.finished
    assert not played.violations
    formed: float | None = None
    for event in played.events:
        match event:
            case schema.Batch():
                formed = event.t
            case schema.SwapEnd():
                formed = None
            case schema.Admit():
                assert formed is None, "what starts before the swap would be too old for the next batch"
    for step, batch in scene.journal.all.items():
        assert batch.serving == step
        for sample in batch.samples:
            assert set(sample.versions[sample.mask].tolist()) == {step}


def test_a_step_starts_only_when_the_engines_are_new_enough() -> None:
    """The push is slow: training waits for the engines rather than running ahead of them."""
    scene = Scene(scene_job(train__steps=6, rollout=rollout(swap="when_published")))

    async def slow(*_: object) -> None:
        await asyncio.sleep(30.0)

    scene.on_publish = slow
    played = scene.play()
    assert played.finished
    assert not played.violations
    assert all(event.serving >= event.step - 1 for event in played.of(schema.StepStart))
    assert played.one(schema.Finished).t > 4 * 30.0


def starving() -> Played:
    scene = Scene(scene_job(train__steps=40, tasks=[*scene_tasks()], rollout=rollout(groups_per_step=4)))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        return EndsLate(scene, task, trajectory) if task.domain == "long" else None

    scene.on_open = opened
    return scene.play()


def scene_tasks() -> list[dict[str, object]]:
    return [
        {"name": "short", "weight": 9, "group_size": 2, "max_tokens": 8},
        {"name": "long", "weight": 1, "group_size": 2, "max_tokens": 8},
    ]


def test_a_task_that_nearly_always_goes_stale_is_named_with_the_bound_it_needs() -> None:
    """Shares give way only within the tolerance, so a starving task is made by killing its groups by hand."""
    scene = Scene(scene_job(train__steps=4))

    def starve() -> None:
        assert scene.coordinator is not None
        assert scene.coordinator.learner is not None
        mix = scene.coordinator.learner.rollout.mix
        for _ in range(20):
            name, index = mix.next()
            mix.died(name, index, again=False, stale=True)
        mix.took_s("a", 1000.0)

    scene.at(8.0, starve)
    played = scene.play()
    assert played.finished
    texts = [event.text for event in played.of(schema.Warning) if "nearly all of its groups go stale" in event.text]
    assert len(texts) == 1, "once"
    assert "task 'a'" in texts[0]
    needed = re.search(r"rollout\.staleness of about (\d+),", texts[0])
    assert needed is not None
    assert int(needed[1]) > 20, "a group took 1,000 s, and versions come every few"


def test_long_and_short_tasks_share_the_batches_as_they_should() -> None:
    played = starving()
    assert played.finished, played.error
    counts = {"short": 0, "long": 0}
    for event in played.of(schema.Batch):
        for task in event.tasks:
            counts[task.split("/")[0]] += 1
    assert counts["long"] / (counts["long"] + counts["short"]) == pytest.approx(0.1, abs=0.05)


def test_a_version_that_two_ask_for_is_swapped_in_once() -> None:
    """The push of the last version and the evaluation that waits for it; after a kill the push and the resumed job."""
    scene = Scene(scene_job(rollout__swap="when_published", evaluation__every=1, evaluation__episodes=1))
    played = scene.play(kills=[lambda event: isinstance(event, schema.StepEnd) and event.step == 1])
    assert played.finished
    resumed = played.one(schema.Resumed).n
    for later in (False, True):
        swaps = [event.version for event in played.of(schema.SwapStart) if (event.n > resumed) == later]
        assert swaps == sorted(set(swaps))
    assert swaps[-1] == 3

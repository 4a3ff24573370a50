"""A part that stands still while the rest goes on is named: an engine, a task, a trajectory."""

import asyncio
import contextlib
import itertools
from typing import Any

import pytest

from rollart.control.context import JobContext
from rollart.control.watchdog import Watchdog
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle
from rollart.policy.stalls import Part
from rollart.ports import Env
from rollart.sim.clock import VirtualLoop
from rollart.types import GenerateRequest, Observation, Task, TrajectoryId
from tests.control.scene import Scene, ScriptedEngine, ScriptedEnv, for_ever, scene_job

THREE_ENGINES = [
    {"name": "fast", "hardware": "h20", "engines": {"count": 3}},
    {"name": "rooms", "slots": 64},
]
TWO_TASKS = [{"name": name, "group_size": 2, "max_turns": 8, "max_tokens": 8} for name in ("a", "b")]

LIVELY = tuple(Part(kind="engine", name=f"fast-{number}", still_s=1.0) for number in (2, 3))


def job(**settings: Any) -> Any:
    return scene_job(train__steps=40, limits__lag_s=40.0, **settings)


def test_an_engine_that_stands_still_is_named_while_the_others_serve() -> None:
    scene = Scene(job(pools=THREE_ENGINES, rollout__staleness=40, limits__progress_s=80.0))

    async def stands_still(engine: ScriptedEngine, request: GenerateRequest) -> None:
        if engine is scene.engines["fast-1"][0]:
            await for_ever()

    scene.on_generate = stands_still
    played = scene.play()
    assert played.finished, played.error
    named = played.of(schema.Lagging)
    assert {(event.kind, event.name) for event in named} == {("engine", "fast-1")}, "its calls are not named too"
    down = played.one(schema.EngineDown)
    assert named[0].for_s >= 40.0
    assert named[0].t < down.t, "long before it is taken for hung"
    assert played.of(schema.SwapEnd), "the rest goes on"
    gaps = [event.for_s for event in named]
    assert all(later >= 2 * sooner for sooner, later in itertools.pairwise(gaps)), "not again and again"
    warning = next(event for event in played.of(schema.Warning) if event.cause == named[0].n)
    assert "engine fast-1 has not moved for" in warning.text


class Stuck(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        await for_ever()
        raise AssertionError


def test_a_task_whose_environments_stand_still_is_named_and_not_each_of_its_trajectories() -> None:
    scene = Scene(job(tasks=TWO_TASKS, rollout__staleness=20, limits__open_s=300.0))

    async def stuck(task: Task, trajectory: TrajectoryId) -> Env | None:
        if task.domain == "b":
            await for_ever()
        return None

    scene.on_open = stuck
    played = scene.play()
    first = played.of(schema.Lagging)[0]
    assert (first.kind, first.name) == ("task", "b")
    assert first.t < 300.0
    assert not [event for event in played.of(schema.Lagging) if event.kind == "trajectory" and event.t < 300.0]
    assert played.of(schema.Ready), "the rest goes on"


def test_one_trajectory_that_stands_still_is_named_with_what_it_waits_on() -> None:
    scene = Scene(job(rollout__staleness=20, limits__step_s=300.0))

    async def stuck(task: Task, trajectory: TrajectoryId) -> Env | None:
        return Stuck(scene, task, trajectory) if str(trajectory) == "g0.0.0" else None

    scene.on_open = stuck
    played = scene.play()
    named = played.of(schema.Lagging)
    assert {(event.kind, event.name) for event in named} == {("trajectory", "g0.0.0")}
    assert named[0].what == "env.step"
    warning = next(event for event in played.of(schema.Warning) if event.cause == named[0].n)
    assert "far longer than other trajectories of a" in warning.text
    assert "it waits on env.step" in warning.text


def test_nothing_is_named_in_a_job_that_moves() -> None:
    played = Scene(job(pools=THREE_ENGINES, tasks=TWO_TASKS)).play()
    assert played.finished
    assert not played.of(schema.Lagging)


def test_what_the_watchdog_names_is_no_movement() -> None:
    """All but one trajectory have ended, and that one is stuck: the whole job stalls, and that is said."""
    tasks = [{"name": "a", "group_size": 4, "max_turns": 99, "max_tokens": 8}]
    scene = Scene(
        scene_job(tasks=tasks, limits__lag_s=20.0, limits__stall_s=90.0, limits__step_s=400.0, train__steps=1)
    )
    scene.turns = 60

    async def stuck(task: Task, trajectory: TrajectoryId) -> Env | None:
        return Stuck(scene, task, trajectory) if trajectory.member == 0 and trajectory.attempt == 0 else None

    scene.on_open = stuck
    played = scene.play()
    assert played.finished, played.error
    named, stalls = played.of(schema.Lagging), played.of(schema.Stall)
    assert named
    assert stalls
    last = max(event.t for event in played.of(schema.Reward) if event.t < stalls[0].t)
    assert f"nothing has moved for {stalls[0].t - last:.0f} s" in stalls[0].text


@pytest.mark.parametrize("parts", [(), (Part(kind="engine", name="fast-1", still_s=50.0), *LIVELY)])
def test_what_the_watchdog_says_is_no_movement_on_a_clock_that_goes_on_meanwhile(parts: tuple[Part, ...]) -> None:
    async def stalls() -> list[str]:
        loop = asyncio.get_running_loop()
        ticks = itertools.count()
        log = EventLog(lambda: loop.time() + 1e-6 * next(ticks))  # a little later at each look, as a real one is
        texts: list[str] = []
        log.read_by(lambda event: texts.append(event.text.split(":")[0]) if isinstance(event, schema.Stall) else None)
        limits = {"stall_s": 90.0, "lag_s": 30.0}
        watchdog = Watchdog(
            JobContext(scene_job(limits=limits), LogHandle(log)), lambda: parts, stalled=lambda text: None
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(285.0):
                await watchdog.run()
        return texts

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        said = runner.run(stalls())
    assert said == [f"nothing has moved for {seconds} s" for seconds in (90, 180, 270)]

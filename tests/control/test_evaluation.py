"""Held-out play beside training: exempt from the bound and the slots, and never waited for by a swap."""

import asyncio

import pytest

from rollart.events import schema
from rollart.ports import Env
from rollart.types import Observation, Task, TrajectoryId
from tests.control.scene import Scene, ScriptedEnv, scene_job

SLOW_S = 15.0


def slow_evaluation(**settings: object) -> Scene:
    """Evaluation environments take far longer than a version lasts."""
    scene = Scene(
        scene_job(train__steps=12, evaluation={"every": 2, "episodes": 2, "concurrency": 2}, **settings), turns=3
    )

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.group.startswith("eval"):
            assert "held-out" in task.id
        return None

    scene.on_open = opened
    return scene


def test_evaluation_plays_held_out_tasks_and_says_which_versions_played_them() -> None:
    played = slow_evaluation().play()
    assert played.finished
    first = played.one(schema.Eval, name="eval2")
    assert (first.episodes, first.scored, first.reward) == (2, 2, 0.5)
    assert 1 <= first.versions[0] <= first.versions[1]


class Slow(ScriptedEnv):
    async def step(self, action: str) -> Observation:
        await asyncio.sleep(SLOW_S)
        return await super().step(action)


def straddling() -> Scene:
    scene = slow_evaluation()
    scene.step_s = 1.0

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.group.startswith("eval"):
            return Slow(scene, task, trajectory, 2)
        return None

    scene.on_open = opened
    return scene


@pytest.mark.parametrize("mode", ["rollart", "one-off", "sync+", "areal"])
def test_it_is_older_than_the_bound_allows_and_goes_on_and_no_swap_waits_for_it(mode: str) -> None:
    scene = straddling()
    scene.job = scene_job(mode=mode, train__steps=12, evaluation=scene.job.evaluation, rollout={"groups_per_step": 2})
    played = scene.play()
    assert played.finished
    done = played.of(schema.Eval)
    assert done
    assert all(event.scored == 2 for event in done)
    assert max(event.versions[1] - event.versions[0] for event in done) > 1, "beyond the bound"
    steps = played.of(schema.StepEnd)
    assert steps[-1].t < 12 * 15.0, "no step waited for an evaluation"
    assert not [event for event in played.of(schema.End) if event.id.startswith("eval") and event.status == "stale"]


def test_it_takes_no_slot_and_enters_no_batch() -> None:
    played = straddling().play()
    assert not [event for event in played.of(schema.Admit) if event.group.startswith("eval")]
    assert not [group for event in played.of(schema.Batch) for group in event.groups if group.startswith("eval")]


def test_it_has_its_own_share_of_concurrency() -> None:
    scene = straddling()
    scene.job = scene_job(train__steps=12, evaluation={"every": 2, "episodes": 6, "concurrency": 2})
    under_way, most = 0, 0
    for event in scene.play().events:
        if isinstance(event, schema.Start) and event.eval:
            under_way += 1
        if isinstance(event, schema.End) and event.id.startswith("eval"):
            under_way -= 1
        most = max(most, under_way)
    assert most == 2


def test_an_episode_that_fails_is_not_scored_and_disturbs_nobody() -> None:
    scene = slow_evaluation()

    async def broken(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.group.startswith("eval"):
            raise RuntimeError("no")
        return None

    scene.on_open = broken
    played = scene.play()
    assert played.finished
    assert {(e.scored, e.reward, e.std, *e.versions) for e in played.of(schema.Eval)} == {(0, None, None)}


def test_the_weights_of_the_last_step_are_evaluated_too() -> None:
    played = slow_evaluation().play()
    assert "eval12" in {event.name for event in played.of(schema.Eval)}


def test_nothing_new_is_admitted_while_the_last_evaluation_is_waited_for() -> None:
    played = slow_evaluation().play()
    assert played.finished
    last = [event for event in played.of(schema.Checkpoint) if event.step == 12][-1]
    assert not [event for event in played.of(schema.Admit) if event.n > last.n]
    assert not played.violations


def test_greedy_play_is_asked_for_at_temperature_zero_and_told_apart() -> None:
    scene = slow_evaluation()
    scene.job = scene_job(train__steps=2, evaluation={"every": 2, "episodes": 2, "greedy": True})
    played = scene.play()
    assert played.finished
    assert [(event.play, event.episodes) for event in played.of(schema.Eval)] == [("sampled", 2), ("greedy", 2)]
    asked = {
        request.session.split("-")[1]: request.sampling.temperature
        for lives in scene.engines.values()
        for engine in lives
        for request, _ in engine.asked
        if request.session.startswith("eval")
    }
    assert asked == {"sampled": 1.0, "greedy": 0.0}


def test_training_and_evaluation_sample_as_their_task_says() -> None:
    scene = slow_evaluation()
    task = {"name": "a", "group_size": 2, "max_tokens": 8, "top_p": 0.9, "top_k": 5, "stop": ["END", "."]}
    scene.job = scene_job(tasks=[task], train__steps=2, evaluation={"every": 2, "episodes": 2, "greedy": True})
    assert scene.play().finished
    asked = {
        (said.request.session.startswith("eval"), said.request.sampling.temperature): said.request.sampling
        for said in scene.said
    }
    assert set(asked) == {(False, 1.0), (True, 1.0), (True, 0.0)}
    for sampling in asked.values():
        assert (sampling.top_p, sampling.top_k, sampling.stop) == (0.9, 5, ("END", "."))


def test_the_last_weights_are_evaluated_whatever_every_says() -> None:
    scene = slow_evaluation()
    scene.job = scene_job(train__steps=3, evaluation={"every": 2, "episodes": 2})
    assert [event.name for event in scene.play().of(schema.Eval)] == ["eval2", "eval3"]


def test_an_evaluation_alone_plays_the_model_as_it_is_and_starts_no_trainer() -> None:
    scene = slow_evaluation()
    scene.job = scene_job(evaluation={"episodes": 3})
    scene.only_evaluate = True
    played = scene.play()
    assert played.finished
    assert not played.violations
    done = played.one(schema.Eval)
    assert (done.name, done.episodes, done.versions) == ("eval0", 3, [0, 0])
    assert scene.trainers == []
    assert not played.of(schema.Admit)


def test_the_mean_is_over_those_that_were_scored() -> None:
    """One of three breaks: the other two decide, with what they earned."""
    scene = slow_evaluation()
    scene.job = scene_job(evaluation={"episodes": 3})
    scene.only_evaluate = True
    scene.reward = lambda trajectory: 0.5 + trajectory.id.member

    async def one_breaks(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.member == 2:
            raise RuntimeError("no")
        return None

    scene.on_open = one_breaks
    done = scene.play().one(schema.Eval)
    assert (done.episodes, done.scored, done.reward) == (3, 2, 1.0)


def test_what_fails_is_counted_with_its_reason_and_is_no_rate() -> None:
    """Whether the episode breaks, or its task cannot be drawn."""

    async def broken(task: Task, trajectory: TrajectoryId) -> Env | None:
        raise RuntimeError("no room")

    def undrawn(domain: str, index: int) -> None:
        raise OSError("no such file")

    for change, reason in (
        ({"on_open": broken}, "EnvError: env.open: RuntimeError: no room"),
        ({"on_held_out": undrawn}, "held_out(0): OSError: no such file"),
    ):
        scene = Scene(scene_job(evaluation={"episodes": 3}), only_evaluate=True, **change)
        done = scene.play().one(schema.Eval)
        assert (done.scored, done.reward, done.rate) == (0, None, False)
        assert (done.failed, done.reason) == (3, f"3 x {reason}")

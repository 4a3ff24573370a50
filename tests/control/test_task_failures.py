"""What goes wrong with one task is that task's: its attempts fail, it leaves the mix, it comes back, it is named."""

import asyncio
import re

import pytest

from rollart.errors import EnvError, JobError, JobStopped
from rollart.events import schema
from rollart.events.schema import Event
from rollart.ports import Env
from rollart.types import Message, Observation, Task, Trajectory, TrajectoryId
from tests.control.scene import REFUSED, Played, Scene, ScriptedEnv, scene_job

TWO = [{"name": name, "group_size": 2, "max_turns": 8, "max_tokens": 8} for name in ("a", "b")]
"""Half of each batch for each."""


def two_tasks(**settings: object) -> Scene:
    settings = {"train__steps": 12, "rollout__groups_per_step": 4, **settings}
    return Scene(scene_job(tasks=TWO, **settings))


def tasks_of(played: Played, step: int) -> list[str]:
    return [task.split("/")[0] for task in played.one(schema.Batch, step=step).tasks]


class Narrated(ScriptedEnv):
    """Says something in a role that the chat template refuses."""

    async def step(self, action: str) -> Observation:
        return Observation(messages=(Message(role=REFUSED, content="meanwhile"),))


def test_an_observation_that_the_template_refuses_ends_its_attempt_and_no_more() -> None:
    scene = two_tasks(train__steps=3)

    async def some_are_narrated(task: Task, trajectory: TrajectoryId) -> Env | None:
        return Narrated(scene, task, trajectory) if trajectory.member == 0 and trajectory.attempt == 0 else None

    scene.on_open = some_are_narrated
    played = scene.play()
    assert played.finished, played.error
    reasons = {event.reason for event in played.ends("failed")}
    assert len(reasons) == 1
    assert "the chat template refuses messages in the roles narrator" in reasons.pop()
    assert not played.violations


def test_a_first_prompt_that_does_not_fit_is_called_that() -> None:
    scene = Scene(scene_job(model__context_tokens=256))

    async def long(task: Task, trajectory: TrajectoryId) -> Env | None:
        return Long(scene, task, trajectory)

    class Long(ScriptedEnv):
        async def reset(self) -> Observation:
            return self.says("x" * 999)

    scene.on_open = long
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert "the first prompt has 1000 tokens" in str(played.error)
    assert "model.context_tokens 256" in str(played.error)


def raises(index: int) -> Task:
    raise KeyError(f"row {index}")


def exits(index: int) -> Task:
    raise SystemExit(3)


def says_the_job_is_wrong(index: int) -> Task:
    raise JobError("too few problems")


class Speechless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def cannot_say_why(index: int) -> Task:
    raise Speechless


def names_no_utf8(index: int) -> Task:
    raise OSError("no file caf\udce9.txt")


DRAWS = {
    "raises": (raises, "KeyError: 'row"),
    "exits": (exits, "SystemExit: 3"),
    "cannot say why": (cannot_say_why, "Speechless, whose text cannot be had (ZeroDivisionError)"),
    "no UTF-8": (names_no_utf8, "no file caf?.txt"),
    "blames the job": (says_the_job_is_wrong, "too few problems"),
    "no task": (lambda index: "a/1", "returned a str, not a Task"),
    "another domain": (lambda index: Task(id=f"c/{index}", domain="c", index=index), "of the domain 'c'"),
    "no id": (lambda index: Task(id="problem", domain="a", index=index), "the id 'problem'"),
    "another index": (lambda index: Task(id="a/7", domain="a", index=-7), "the index -7"),
    "no payload": (lambda index: Task(id=f"a/{index}", domain="a", index=index, payload=[1]), "payload that is a list"),  # type: ignore[arg-type]
    "not JSON": (lambda index: Task(id=f"a/{index}", domain="a", index=index, payload={"f": raises}), "JSON values"),
}


@pytest.mark.parametrize("how", DRAWS)
def test_a_task_that_cannot_be_drawn_leaves_the_mix_and_the_job_goes_on(how: str) -> None:
    drawn, words = DRAWS[how]
    scene = two_tasks(train__steps=4, limits={"task_failures": 3})
    scene.on_draw = lambda domain, index: drawn(index) if domain == "a" else None
    played = scene.play()
    assert played.finished, played.error
    failed = played.of(schema.DrawFailed)
    assert {event.task for event in failed} == {"a"}
    assert all(words in event.reason for event in failed)
    assert [event.index for event in failed] == list(range(len(failed))), "each is passed over"
    opened = played.of(schema.BreakerOpen)[0]
    assert (opened.task, opened.failures, opened.probes) == ("a", 3, 0)
    assert opened.reason.startswith("3 x ")
    assert words in opened.reason
    assert all(tasks_of(played, step) == ["b"] * 4 for step in range(4)), "its share goes to the other"
    assert not played.violations


def test_a_held_out_task_that_cannot_be_drawn_is_an_episode_that_is_not_scored() -> None:
    scene = two_tasks(train__steps=2, evaluation={"every": 2, "episodes": 3})

    def none_at_1(domain: str, index: int) -> None:
        if index == 1:
            raise OSError("no such file")

    scene.on_held_out = none_at_1
    played = scene.play()
    assert played.finished, played.error
    assert {(event.episodes, event.scored) for event in played.of(schema.Eval)} == {(3, 2)}
    assert {event.reason for event in played.of(schema.DrawFailed)} == {"held_out(1): OSError: no such file"}


def broken_between(scene: Scene, task: str, since_s: float, until_s: float) -> None:
    """Environments of this task do not open at these times."""

    async def opened(opening: Task, trajectory: TrajectoryId) -> Env | None:
        if opening.domain == task and since_s <= asyncio.get_running_loop().time() < until_s:
            raise EnvError(f"no machine {trajectory} at 10.0.0.{trajectory.member}")
        return None

    scene.on_open = opened


def test_a_task_that_fails_for_a_while_leaves_the_mix_is_probed_and_comes_back_with_its_share() -> None:
    scene = two_tasks(train__steps=40)
    broken_between(scene, "a", 20.0, 100.0)
    played = scene.play()
    assert played.finished, played.error
    opened, closed = played.of(schema.BreakerOpen), played.one(schema.BreakerClose)
    probes = played.of(schema.BreakerProbe)
    assert opened[0].failures == 5
    assert [event.wait_s for event in opened] == [10.0 * 2**number for number in range(len(opened))]
    assert len(opened) == len(probes) > 1, "every probe but the last failed"
    assert [event.probes for event in opened] == list(range(len(opened)))
    assert closed.group == probes[-1].group
    assert re.fullmatch(r"\d+ x EnvError: no machine g\d+\.\d\.\d at 10\.0\.0\.\d", opened[0].reason), opened
    out = [event for event in played.of(schema.Batch) if opened[0].t + 10 < event.t < closed.t]
    assert out
    assert all(task.startswith("b/") for event in out for task in event.tasks)
    back = [event for event in played.of(schema.Batch) if event.t > closed.t][2:]
    assert len(back) > 5
    shares = [sum(task.startswith("a/") for task in event.tasks) for event in back]
    assert sum(shares) == pytest.approx(2 * len(back), abs=2), "half, and not what it missed"
    assert max(shares) <= 3
    assert not played.violations


def test_nothing_of_a_task_is_admitted_while_it_is_out_but_its_probes() -> None:
    scene = two_tasks(train__steps=30)
    broken_between(scene, "a", 20.0, 90.0)
    played = scene.play()
    since = played.of(schema.BreakerOpen)[0].n
    until = played.one(schema.BreakerClose).n
    admitted = [
        event.group for event in played.of(schema.Admit) if event.task.startswith("a/") and since < event.n < until
    ]
    assert admitted == [event.group for event in played.of(schema.BreakerProbe)]


def test_groups_under_way_when_their_task_leaves_the_mix_are_not_dropped() -> None:
    """Those that were opened before it broke are trained on."""
    scene = two_tasks(train__steps=8, rollout__staleness=3)
    broken_between(scene, "a", 3.0, 60.0)
    scene.step_s = 12.0
    played = scene.play()
    assert played.finished
    opened = played.of(schema.BreakerOpen)[0]
    before = {event.group for event in played.of(schema.Admit) if event.task.startswith("a/")} - {
        event.group for event in played.of(schema.Group)
    }
    trained = {group: event.n for event in played.of(schema.Batch) for group in event.groups}
    assert [group for group in before if trained.get(group, 0) > opened.n], "some, after it went out"
    assert not played.violations


def test_when_no_task_is_left_the_job_waits_for_the_probes_and_goes_on() -> None:
    scene = two_tasks(train__steps=6)

    async def down(task: Task, trajectory: TrajectoryId) -> Env | None:
        if 20.0 <= asyncio.get_running_loop().time() < 70.0:
            raise EnvError("all machines are away")
        return None

    scene.on_open = down
    played = scene.play()
    assert played.finished, played.error
    assert {event.task for event in played.of(schema.BreakerOpen)} == {"a", "b"}
    assert sorted(event.task for event in played.of(schema.BreakerClose)) == ["a", "b"]
    assert not played.violations


def test_when_no_task_is_left_and_none_comes_back_the_job_stops_and_says_why() -> None:
    scene = two_tasks()

    async def nan(trajectory: Trajectory) -> float | None:
        if trajectory.task.domain == "a":
            return float("nan")
        raise RuntimeError(f"no model on port {4000 + trajectory.id.member}")

    scene.on_score = nan
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    text = str(played.error)
    assert "no task is left" in text
    assert re.search(r"task 'a': out of the mix .*most often \d+ x RewardError: returned nan, which is not", text)
    assert re.search(r"task 'b': .*most often \d+ x RewardError: reward: RuntimeError: no model on port \d+", text)
    opened = played.of(schema.BreakerOpen)
    probes = {event.task: event.probes for event in opened}
    assert min(probes.values()) == 3, "three probes each, at the least"


def test_what_is_ready_is_trained_on_before_a_job_without_tasks_stops() -> None:
    scene = Scene(scene_job(train__steps=9))

    async def after_one_group(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.group != "g0":
            raise EnvError("gone")
        return None

    scene.on_open = after_one_group
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert [event.groups for event in played.of(schema.Batch)] == [["g0"]]
    assert not played.violations


def test_a_resumed_job_leaves_out_what_was_out_and_probes_it_at_once() -> None:
    scene = two_tasks(train__steps=30, checkpoint__every=1)
    broken_between(scene, "a", 20.0, 110.0)

    def later(event: Event) -> bool:
        return bool(isinstance(event, schema.BreakerOpen) and event.probes == 2)

    played = scene.play(kills=[later])
    assert played.finished, played.error
    resumed = played.one(schema.Resumed)
    assert resumed.out == ["a"]
    after = [event for event in played.events if event.n > resumed.n]
    first = next(event for event in after if isinstance(event, schema.BreakerProbe))
    ready = [event.group for event in after if isinstance(event, schema.Admit) and event.n < first.n]
    assert all(group in resumed.open for group in ready), "before anything new is admitted"
    assert played.one(schema.BreakerClose).t >= 110.0
    assert not played.violations


def test_two_runs_with_a_failing_task_are_the_same_run() -> None:
    def events() -> list[Event]:
        scene = two_tasks(train__steps=12)
        broken_between(scene, "a", 20.0, 90.0)
        return scene.play().events

    assert events() == events()


def test_a_stop_for_want_of_anything_to_learn_names_the_tasks_and_what_they_earned() -> None:
    scene = two_tasks()
    scene.reward = lambda trajectory: -0.11 if trajectory.task.domain == "a" else 1.0
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert re.search(
        r"task 'a': \d+ groups were filtered, most often \d+ x all members earned -0.11", str(played.error)
    )
    assert re.search(r"task 'b': \d+ groups were filtered, most often \d+ x all members earned 1", str(played.error))


def test_a_task_whose_groups_all_earn_the_same_is_warned_of_once_and_again_after_it_taught_something() -> None:
    scene = two_tasks(train__steps=40, rollout__zero_variance="keep")
    flat = {*range(0, 25), *range(26, 60)}
    scene.reward = lambda trajectory: (
        -0.11 if trajectory.task.domain == "a" and trajectory.task.index in flat else float(trajectory.id.member)
    )
    played = scene.play()
    assert played.finished
    texts = [event.text for event in played.of(schema.Warning) if "earned the same" in event.text]
    assert len(texts) == 2
    assert all("task 'a': in each of its last 20 groups" in text and "-0.11" in text for text in texts)
    assert not [event for event in played.of(schema.Ready) if event.gradient and event.group in ("g0", "g2")]
    assert [event for event in played.of(schema.Ready) if event.gradient]

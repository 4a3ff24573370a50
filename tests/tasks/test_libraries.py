"""Environments of libraries, with the real packages: those that are light, here and in another interpreter."""

import asyncio
import importlib.util
import json
import os
import time
import venv
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollart.cli import main
from rollart.envs.process import ProcessEnvHost
from rollart.errors import EnvError, JobError
from rollart.tasks.api import TaskSet, as_observation, text_of
from rollart.tasks.check import check_task
from rollart.tasks.libraries import GUESTS, Guest, installed
from rollart.tasks.load import load_task_set
from rollart.types import Message, Observation, TrajectoryId
from tests.contracts.tasks import TaskSetContract
from tests.tasks.libraries import interpreter_like_ours

STRANGE = """
import os, time
import gymnasium

class Strange(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)
    def reset(self, seed=None, options=None):
        print("noise on stdout"); os.write(1, b"more noise\\n")
        return f"seed {seed}", {}
    def step(self, action):
        if action == "exit": os._exit(3)
        if action == "crash": os.abort()
        if action == "hang": time.sleep(600)
        if action == "raise": raise KeyError("x")
        if action == "pid": return str(os.getpid()), 0.0, False, False, {}
        return f"said {action}", 0.5, action == "end", False, {}

gymnasium.register("Strange-v0", Strange)
"""
MANY_PARTS = """
import gymnasium
import numpy as np
from gymnasium import spaces

class Parts(gymnasium.Env):
    observation_space = spaces.Dict({"at": spaces.Box(0, 4, (2,), np.float32)})
    action_space = spaces.Discrete(2)
    def _seen(self):
        inner = {"a": (np.int64(1), np.float32(0.25))}
        bits = np.array([[1, 0]], np.int8)
        return {"at": np.array([0.1, 2], np.float32), "goal": np.int64(3), "bits": bits, "word": "hé", "in": inner}
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {"action_mask": np.array([1, 0], np.int8)}
    def step(self, action):
        return self._seen(), np.float32(1.5), np.bool_(True), False, {}

gymnasium.register("Parts-v0", Parts)
"""
USE = "gymnasium:strange_module:Strange-v0"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("gymnasium")
    made = interpreter_like_ours(tmp_path_factory.mktemp("other") / "venv", {"strange_module": STRANGE})
    yield str(made)
    GUESTS.end()


def opened(use: str, **args: Any) -> tuple[TaskSet, Any]:
    task_set = load_task_set(use, args, seed=1)
    task_set.prepare()
    return task_set, task_set.environment(task_set.task(0))


def played(env: Any, *actions: str) -> list[Observation]:
    seen = [as_observation(env.reset()), *(as_observation(env.step(action)) for action in actions)]
    env.close()
    return seen


LAKE = {"is_slippery": False, "actions": ["left", "down", "right", "up"]}
WAY = ("Down", "I go down", "right", "not left, but right", "down", "right")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_gymnasium_is_drawn_and_its_actions_have_names(elsewhere: bool, python: str) -> None:
    args = {**LAKE, "python": python} if elsewhere else LAKE
    _, env = opened("gymnasium:FrozenLake-v1", **args)
    seen = played(env, *WAY)
    assert text_of(seen[0]) == "Answer with one of: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert text_of(seen[1]).endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [one.reward for one in seen] == [0.0] * 6 + [1.0]
    assert [one.done for one in seen] == [False] * 6 + [True]


def test_an_answer_without_an_action_is_told_so_and_does_not_go_on_for_ever() -> None:
    _, env = opened("gymnasium:CliffWalking-v1", instruction="Say 0 to 3.")
    seen = played(env, *["what?"] * 10)
    assert {text_of(one) for one in seen[1:]} == {"Say 0 to 3."}
    assert [one.truncated for one in seen] == [False] * 10 + [True]


def test_seeds_tell_environments_apart_and_colours_are_written_down() -> None:
    tasks = load_task_set("gymnasium:Taxi-v4", {}, seed=0)
    first = [text_of(as_observation(env.reset())) for env in (tasks.environment(tasks.task(n)) for n in (0, 0, 1))]
    assert first[0] == first[1] != first[2]
    assert "(magenta)" in first[0]
    assert "\x1b" not in first[0]


def test_an_observation_of_many_parts_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "many_parts.py").write_text(MANY_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    _, env = opened("gymnasium:many_parts:Parts-v0")
    seen = played(env, "1")
    shown = '{"at": [0.1, 2.0], "goal": 3, "bits": [[1, 0]], "word": "hé", "in": {"a": [1, 0.25]}}'
    assert text_of(seen[0]) == f"Answer with one of: 0, 1.\n{shown}"
    assert seen[1] == Observation(messages=(Message(role="user", content=shown),), reward=1.5, done=True)


def test_what_cannot_be_played_is_not_listed() -> None:
    names = installed()["gymnasium"]["names"]
    assert "FrozenLake-v1" in names
    assert not [name for name in names if name.startswith(("Ant", "Gym", "CartPole"))]


def test_reasoning_gym_asks_and_scores(python: str) -> None:
    tasks, env = opened("reasoning_gym:chain_sum", min_terms=2, max_terms=2, python=python)
    task = tasks.task(0)
    assert played(env, tasks.scripted(task, [], None))[-1] == Observation(reward=1.0, done=True)  # type: ignore[arg-type]
    assert check_task("reasoning_gym:chain_sum", {"min_terms": 3}).findings == []
    assert task.payload["question"].count("+") + task.payload["question"].count("-") == 1


@pytest.mark.parametrize(
    ("use", "args", "message"),
    [
        ("gymnasium:Nope-v1", {}, "tasks.use: gymnasium:Nope-v1 cannot be opened: Environment `Nope` doesn't exist"),
        ("gymnasium:Pendulum-v1", {}, "only Discrete and Text can be said by a model: write a task file"),
        ("gymnasium:FrozenLake-v1", {"actions": ["up"]}, "it has 4 actions, and `actions` names 1"),
        ("gymnasium:FrozenLake-v1", {"actions": "up"}, "tasks.args.actions: 'up' does not fit"),
        ("gymnasium:FrozenLake-v1", {"slippery": False}, "unexpected keyword argument 'slippery'"),
        (
            "gymnasium:FrozenLake-v1",
            {"python": "/nowhere/python"},
            "tasks.args.python: /nowhere/python is not a program",
        ),
        (
            "gymnasium:FrozenLake-v1",
            {"python": "true"},
            "cannot be opened in true: the interpreter that has its library exited with status 0",
        ),
        ("gymnasium:nomodule:X-v0", {}, "tasks.use: gymnasium:nomodule:X-v0 needs the package nomodule: pip"),
        ("gymnasium:Nope-v1", {}, "(`rollart envs` lists what there is)"),
        ("gymnasium", {}, "tasks.use: gymnasium is a library; say which of its environments, as gymnasium:NAME"),
        ("gym:Nope-v1", {}, "; give a module or the path of a .py file, or LIBRARY:NAME with one of gymnasium, "),
        ("gymnasium:FrozenLake-v1", {"id": "x"}, "tasks.args.id: is 'FrozenLake-v1' already"),
        ("reasoning_gym:nope", {}, "tasks.use: reasoning_gym:nope cannot be reset (Dataset 'nope' not registered)"),
        (
            "openenv:http://127.0.0.1:9",
            {"fields": 1},
            "tasks.args.fields: openenv:http://127.0.0.1:9 has no such argument",
        ),
    ],
)
def test_what_cannot_be_opened_is_said(use: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as raised:
        load_task_set(use, args).prepare()
    assert message in str(raised.value)


def test_a_library_that_is_not_there_is_named_with_both_ways_out() -> None:
    if importlib.util.find_spec("gem") is not None:
        pytest.skip("gem is installed here")
    with pytest.raises(JobError, match=r"needs gem: .*pip install .*\[gem\].*; or, .*args: {python: "):
        load_task_set("gem:game:GuessTheNumber-v0-easy").prepare()


# --- another interpreter ------------------------------------------------------------------------------------------


def test_it_is_another_process_that_is_used_again_and_what_is_printed_is_no_answer(python: str) -> None:
    tasks, env = opened(USE, python=python)
    seen = played(env, "pid", "end")
    assert text_of(seen[0]) == f"seed {tasks.task(0).payload['seed']}"
    assert (seen[-1].reward, seen[-1].done) == (0.5, True)
    assert int(text_of(seen[1])) != os.getpid()
    assert text_of(played(tasks.environment(tasks.task(1)), "pid", "end")[1]) == text_of(seen[1])


@pytest.mark.parametrize(
    ("action", "words"),
    [("exit", "exited with status 3"), ("crash", "was ended by SIGABRT"), ("raise", "KeyError: 'x'")],
)
def test_its_end_is_that_attempts_failure_only(action: str, words: str, python: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with hosted(python, tmp_path) as (host, tasks):
            env = await host.open(tasks.task(0), TrajectoryId("g", 0, 0))
            await env.reset()
            with pytest.raises(EnvError, match=words):
                await env.step(action)
            await env.close()
            again = await host.open(tasks.task(1), TrajectoryId("g", 1, 0))
            assert text_of(await again.reset()) == f"seed {tasks.task(1).payload['seed']}"
            assert text_of(await again.step("hello")) == "said hello"
            await again.close()

    asyncio.run(run())


def test_one_that_hangs_is_gone_when_its_step_is_given_up(python: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with hosted(python, tmp_path) as (host, tasks):
            env = await host.open(tasks.task(0), TrajectoryId("g", 0, 0))
            await env.reset()
            pid = int(text_of(await env.step("pid")))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await env.step("hang")
            await env.close()
            for _ in range(100):
                if not is_running(pid):
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("it still runs")
            other = await host.open(tasks.task(1), TrajectoryId("g", 1, 0))
            assert text_of(await other.reset()).startswith("seed")
            await other.close()

    asyncio.run(run())


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


@asynccontextmanager
async def hosted(python: str, tmp_path: Path) -> AsyncIterator[tuple[ProcessEnvHost, TaskSet]]:
    args = {"python": python}
    host = ProcessEnvHost({"d": USE}, args={"d": args}, slots=1, log_dir=tmp_path / "logs")
    try:
        yield host, load_task_set(USE, args, domain="d")
    finally:
        await host.close()


def test_it_ends_with_its_parent_even_where_it_hangs(python: str) -> None:
    guest = Guest(python)
    guest.ask("open", "gymnasium", "strange_module:Strange-v0", {})
    guest.ask("ask", "reset", [0])
    process = guest.process
    assert process.stdin is not None
    process.stdin.write(json.dumps([99, "ask", ["step", ["hang"]]]) + "\n")
    process.stdin.flush()
    time.sleep(0.3)
    process.stdin.close()  # as when its parent dies
    assert process.wait(10) == 0
    guest.end()


class TestLibraryTasks(TaskSetContract):
    def tasks(self, seed: int = 0) -> TaskSet:
        return load_task_set("gymnasium:FrozenLake-v1", {}, seed=seed, domain="a")


# --- the commands -------------------------------------------------------------------------------------------------


def test_envs_lists_what_is_installed_here_and_there(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert set(here) == {"gymnasium", "reasoning_gym", "gem", "textarena", "verifiers", "openenv"}
    assert "FrozenLake-v1" in here["gymnasium"]["names"]
    assert "chain_sum" in here["reasoning_gym"]["names"]
    assert main(["envs", "--python", python]) == 0
    assert "  gymnasium:FrozenLake-v1\n" in capsys.readouterr().out
    assert main(["envs", "--python", "/nowhere"]) == 2
    assert "--python: /nowhere is not a program that can be run here" in capsys.readouterr().err
    assert main(["envs", "--python", "true"]) == 2
    assert "--python: true is no Python that lists its libraries" in capsys.readouterr().err


def test_another_interpreter_without_the_library_is_told_how_to_get_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    with pytest.raises(
        JobError, match=r"No module named 'gymnasium'; install it there: .*python -m pip install gymnasium"
    ):
        load_task_set("gymnasium:FrozenLake-v1", {"python": str(python)}).prepare()


def test_play_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(WAY)
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    words = ["is_slippery=false", "actions=[left, down, right, up]"]
    assert main(["play", "gymnasium:FrozenLake-v1", *words]) == 0
    said = capsys.readouterr().out
    assert said.endswith("done after 6 turns, reward 1\n")
    assert "[S]FFF\nFHFH" in said

    def end() -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(["play", "rollart.tasks.guess_number", "--json", "--held-out"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["status"], out["reward"], out["task"]["id"]) == ("truncated", 0.0, "guess_number/held_out/0")
    assert main(["play", "rollart.tasks.guess_number", "highest=3"]) == 2
    assert "it takes no arguments" in capsys.readouterr().err


def test_play_adds_up_the_rewards_that_the_job_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "form.py").write_text("def short(episode):\n    return 2.0 / len(episode.turns)\n")
    (tmp_path / "job.yaml").write_text("""
name: lakes
model: {path: models/mine}
tasks:
  - name: lake
    use: gymnasium:FrozenLake-v1
    args: {is_slippery: false, actions: [left, down, right, up]}
    max_turns: 8
    rewards:
      - {name: game, type: local, weight: 3.0}
      - {name: form, type: local, function: form.py:short}
      - {type: judge, url: "http://127.0.0.1:9/v1", model: any, rubric: Short.}
pools: [{name: cpu, engines: {count: 1}}, {name: environments, slots: 4}]
""")
    lines = iter(WAY)
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    assert main(["play", str(tmp_path / "job.yaml"), "--json"]) == 0
    said = capsys.readouterr()
    played = json.loads(said.out)
    assert played["parts"] == {"game": 3.0, "form": pytest.approx(2.0 / 6)}
    assert played["reward"] == pytest.approx(3.0 + 2.0 / 6)
    assert "reward judge: not asked for" in said.err

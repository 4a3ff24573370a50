"""gem, textarena, verifiers and an OpenEnv server: the real packages, each in an interpreter of its own (slow)."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.errors import JobError
from rollart.tasks.api import TaskSet, as_observation, text_of
from rollart.tasks.check import check_task
from rollart.tasks.libraries import GUESTS, installed
from rollart.tasks.load import load_task_set
from rollart.types import Observation
from tests.tasks.libraries import interpreter_with

pytestmark = pytest.mark.slow

DISTRIBUTIONS = {"gem": ("gem-llm",), "textarena": ("textarena",), "verifiers": ("verifiers", "uv")}

SUMS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.answer))

class SumsConfig(vf.TasksetConfig):
    highest: int = 9

class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for a in range(self.config.highest):
            for b in range(self.config.highest):
                yield Sum(SumData(prompt=f"{a} + {b} =", system_prompt="Be brief.", answer=a + b), self.config.task)

__all__ = ["Sums"]
"""

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: str

class Hint(Observation):
    hint: str

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, highest=9, **kwargs):
        self.secret = (seed or 0) % highest
        return Hint(hint=f"a number below {highest}")
    def step(self, action, timeout_s=None, **kwargs):
        guess = int(action.number)
        if guess == self.secret:
            return Hint(hint="yes", done=True, reward=1.0)
        return Hint(hint="higher" if guess < self.secret else "lower", reward=0.0)
    @property
    def state(self):
        return State()

app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def python_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    folder = tmp_path_factory.mktemp("venvs")
    yield lambda library: str(interpreter_with(DISTRIBUTIONS.get(library, (library,)), folder, library))
    GUESTS.end()


def opened(use: str, **args: Any) -> tuple[TaskSet, Any]:
    task_set = load_task_set(use, args, seed=1)
    task_set.prepare()
    return task_set, task_set.environment(task_set.task(0))


def searched(env: Any, form: str, low: int, high: int) -> list[Observation]:
    """Halving finds a number, told `higher` or `lower`."""
    seen = [as_observation(env.reset())]
    while not seen[-1].done:
        middle = (low + high) // 2
        seen.append(as_observation(env.step(form.format(middle))))
        low, high = (middle + 1, high) if "higher" in text_of(seen[-1]) else (low, middle - 1)
    env.close()
    return seen


def test_gem(python_with: Callable[[str], str]) -> None:
    python = python_with("gem")
    assert "game:GuessTheNumber-v0-easy" in installed(python)["gem"]["names"]
    tasks, env = opened("gem:game:GuessTheNumber-v0-easy", python=python)
    seen = searched(env, "\\boxed{{{}}}", 1, 10)
    assert "between 1 and 10" in text_of(seen[0])
    assert (seen[-1].reward, seen[-1].done) == (1.0, True)
    texts = [text_of(as_observation(tasks.environment(tasks.task(0)).reset())) for _ in range(2)]
    assert texts[0] == texts[1]
    findings = check_task("gem:game:GuessTheNumber-v0-easy", {"python": python}).findings
    assert [one.text for one in findings if "scripted" not in one.text] == []
    with pytest.raises(JobError, match=r"gem has no game:GuessTheNumber-v0; it has game:GuessTheNumber-v0-"):
        load_task_set("gem:game:GuessTheNumber-v0", {"python": python}).prepare()


def test_textarena(python_with: Callable[[str], str]) -> None:
    python = python_with("textarena")
    assert "GuessTheNumber-v0" in installed(python)["textarena"]["names"]
    _, env = opened("textarena:GuessTheNumber-v0", python=python)
    seen = searched(env, "[{}]", 1, 20)
    assert "between 1 and 20" in text_of(seen[0])
    assert all(text_of(one).startswith("[GAME] The target number is") for one in seen[1:-1])
    assert seen[-1].reward == 1.0
    with pytest.raises(JobError, match="no game for one player"):
        load_task_set("textarena:TicTacToe-v0", {"python": python}).prepare()


def test_verifiers(python_with: Callable[[str], str]) -> None:
    python = python_with("verifiers")
    site = next(Path(python).parent.parent.glob("lib/python*/site-packages"))
    (site / "rollart_test_sums.py").write_text(SUMS)
    tasks, env = opened("verifiers:rollart-test-sums", python=python, highest=3)
    first = as_observation(env.reset())
    assert [message.role for message in first.messages] == ["system", "user"]
    a, b = map(int, re.findall(r"\d+", text_of(first)))
    assert as_observation(env.step(f" {a + b}\n")) == Observation(reward=1.0, done=True)
    env.close()
    epoch = {tasks.task(index).payload["seed"] for index in range(8)}
    held_out = {tasks.held_out(index).payload["seed"] for index in range(8)}
    assert (len(epoch), len(held_out)) == (8, 1)
    assert not epoch & held_out
    with pytest.raises(JobError, match=r"tasks.use: verifiers:rollart-test-sums, args .*'lowest'"):
        load_task_set("verifiers:rollart-test-sums", {"python": python, "lowest": 3}).prepare()


def test_an_openenv_server(python_with: Callable[[str], str], tmp_path: Path) -> None:
    pytest.importorskip("websockets")
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = subprocess.Popen([python_with("openenv"), str(server), str(port)], env=environment)
    try:
        use = f"openenv:http://127.0.0.1:{port}"
        for _ in range(300):
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        tasks, env = opened(use, field="number", show="hint", reset={"highest": 5})
        other = tasks.environment(tasks.task(1))
        assert text_of(as_observation(other.reset())) == "a number below 5"
        seen = searched(env, "{}", 0, 4)
        assert (text_of(seen[-1]), seen[-1].reward) == ("yes", 1.0)
        assert searched(other, "{}", 0, 4)[-1].done
        _, env = opened(use)
        assert text_of(as_observation(env.reset())) == '{"hint": "a number below 9"}'
        assert text_of(as_observation(env.step("seven"))) == "Answer with the action as a JSON object."
        assert "hint" in text_of(as_observation(env.step('{"number": "1"}')))
        with pytest.raises(RuntimeError, match="Invalid message"):
            env.step('{"no": 1}')
        env.close()
        with pytest.raises(JobError, match=r"an observation has no 'clue'; it has hint"):
            load_task_set(use, {"show": "clue"}).prepare()
    finally:
        process.kill()
        process.wait()
    with pytest.raises(JobError, match=r"cannot be opened: .*refused"):
        load_task_set(use, {}).prepare()

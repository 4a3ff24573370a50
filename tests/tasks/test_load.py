"""Finding user code, and what is said when it is not found."""

from pathlib import Path

import numpy as np
import pytest

from rollart.errors import JobError
from rollart.tasks.api import TaskSet, as_observation, as_reward, observe
from rollart.tasks.load import load_reward, load_task_set, reward_of
from rollart.types import Message, Observation

ECHO = """
from rollart.tasks.api import Environment, TaskSet, observe

class Echo(Environment):
    def __init__(self, word):
        self.word = word
    def reset(self):
        return f"Say {self.word}."
    def step(self, action):
        return observe(reward=float(action.strip() == self.word), done=True)

class EchoTasks(TaskSet):
    def draw(self, rng):
        return {"word": str(rng.randint(0, 999))}
    def environment(self, task):
        return Echo(task.payload["word"])
    def scripted(self, task, observations, rng):
        return task.payload["word"]
"""


def write(tmp_path: Path, source: str) -> str:
    path = tmp_path / "echo.py"
    path.write_text(source)
    return str(path)


def test_a_file_a_name_and_its_reward(tmp_path: Path) -> None:
    use = write(tmp_path, ECHO)
    task_set = load_task_set(use, seed=4)
    assert (task_set.domain, task_set.seed) == ("echo", 4)
    named = load_task_set(f"{use}:EchoTasks", seed=4, domain="other")
    assert named.task(3).id == "other/3"
    assert reward_of(use) == "rollart.tasks.api:score"
    with_score = write(tmp_path / "..", f"{ECHO}\ndef score(episode):\n    return 5\n")
    assert reward_of(f"{with_score}:EchoTasks") == f"{with_score}:score"
    assert load_reward(f"{with_score}:score")(None) == 5  # type: ignore[arg-type]
    assert isinstance(load_task_set("rollart.tasks.guess_number:GuessTasks"), TaskSet)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("no.such.module", "no module no.such.module"),
        ("no_such_file.py", "no file"),
        ("rollart.tasks.guess_number:Nobody", "has no Nobody"),
        ("rollart.tasks.guess_number:HIGHEST", "not a TaskSet"),
        ("rollart.tasks.guess_number:Guessing", "cannot be made|not a TaskSet"),
        ("rollart.tasks.api", "holds no class"),
    ],
)
def test_what_is_not_a_task_set(use: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_task_set(use)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_package_here", "pip install no_such_package_here"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        (
            f"{ECHO}\nclass Second(EchoTasks): pass\nclass Third(EchoTasks): pass",
            r"several task sets \(Second, Third\)",
        ),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_task_set(write(tmp_path, source))


def test_a_reward_needs_its_name() -> None:
    with pytest.raises(JobError, match=r"as rollart\.tasks\.api:score"):
        load_reward("rollart.tasks.api")
    with pytest.raises(JobError, match="not a function"):
        load_reward("rollart.tasks.guess_number:HIGHEST")


def test_a_split_without_problems_is_told(tmp_path: Path) -> None:
    use = write(tmp_path, ECHO.replace("str(rng.randint(0, 999))", '"always"'))
    task_set = load_task_set(use)
    with pytest.raises(JobError, match="too few different problems"):
        [task_set.task(0), task_set.held_out(0)]


def test_observations_and_rewards_are_checked() -> None:
    assert as_observation("hi").messages == (Message(role="user", content="hi"),)
    assert as_observation(observe("x", reward=1)) == observe("x", reward=1.0)
    for one in (True, np.True_, np.float32(1), np.int64(1), np.array(1.0)):
        earned = as_observation(observe(reward=one, done=np.True_)).reward  # type: ignore[arg-type]
        assert (earned, type(earned)) == (1.0, float)
        assert as_reward(one) == (1.0, {})
        assert as_reward({"a": one}) == (1.0, {"a": 1.0})
    for wrong in (None, 3, Observation(messages=[]), observe(reward="1"), observe(reward=float("inf"))):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="returned"):
            as_observation(wrong)
    assert as_reward({"a": 1, "b": 0.5}) == (1.5, {"a": 1.0, "b": 0.5})
    for nonsense in (None, "1", float("nan"), {"a": None}, [1], 10**400, np.array([1.0, 2.0])):
        with pytest.raises(ValueError, match="finite number"):
            as_reward(nonsense)


WITH_ARGUMENTS = ECHO.replace(
    "class EchoTasks(TaskSet):",
    """class EchoTasks(TaskSet):
    def __init__(self, *, highest: int, words: list[str] = [], folder: str = "", seed=0, domain=""):
        super().__init__(seed=seed, domain=domain)
        self.given = (highest, words, folder)
""",
)


def test_arguments_reach_the_task_set_as_its_annotations_say(tmp_path: Path) -> None:
    use = write(tmp_path, WITH_ARGUMENTS)
    made = load_task_set(use, {"highest": "12", "words": ["a"]}, seed=4)
    assert (getattr(made, "given"), made.seed) == ((12, ["a"], ""), 4)  # noqa: B009 - of the file above


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "tasks.args.highest: missing; "),
        ({"highest": 1, "word": "a"}, "no such argument, did you mean 'words'?; it takes highest, words, folder"),
        ({"highest": "many"}, "tasks.args.highest: 'many' does not fit: input should be a valid integer"),
        ({"highest": 1, "words": ["a", 2]}, "tasks.args.words.1: 2 does not fit: input should be a valid string"),
        ({"highest": 1, "seed": 2}, "tasks.args.seed: "),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(args: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as raised:
        load_task_set(write(tmp_path, WITH_ARGUMENTS), args)
    assert message in str(raised.value)
    with pytest.raises(JobError, match="it takes no arguments; remove it"):
        load_task_set("rollart.tasks.guess_number", {"highest": 1})

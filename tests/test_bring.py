"""The page "bring your task": each example is short, whole, and is run: checked as a job, played, and trained on."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import load_job
from rollart.config.settings import TaskSettings
from rollart.launch.checks import problems
from rollart.launch.play import play
from rollart.launch.training import train
from rollart.report.summary import Summary
from rollart.tasks.api import as_observation, text_of
from rollart.tasks.libraries import GUESTS
from rollart.tasks.load import load_task_set
from rollart.types import Task
from rollart.workers.sandbox import missing
from tests.tasks.libraries import interpreter_with

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "bring.md").read_text()
EXAMPLES = {
    re.search(r"^name: (.+)$", text, re.MULTILINE).group(1): text  # type: ignore[union-attr]
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}
FILES = dict(re.findall(r"^```python\n# (\w+\.py)([^`]*)^```", PAGE, re.MULTILINE))
"""By name, as their first lines have it."""
MAX_LINES = 30
ROWS = "".join(f'{{"question": "{n} and 30?", "answer": "{n}+30={n + 30}\\n#### {n + 30}"}}\n' for n in range(60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page says is there: a model, and the rows."""
    pytest.importorskip("transformers")
    from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    for name, positions in (("mine", 1024), ("smollm2", 8192)):
        path, model = tmp_path / "models" / name, tiny_model(len(tokenizer))
        tokenizer.save_pretrained(path)
        model.config.max_position_embeddings = positions
        save(model, path)
    (tmp_path / "sums.jsonl").write_text(ROWS)
    for file, text in FILES.items():
        (tmp_path / file).write_text(f"# {text}")
    return tmp_path


def written(name: str, folder: Path) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(EXAMPLES[name])
    return path


def run(name: str, folder: Path) -> list[float]:
    """The rewards of one episode of each task, played by its scripted player or by a novice."""
    job = load_job(written(name, folder))
    assert problems(job, None) == []
    return [played(task) for task in job.tasks]


def played(task: TaskSettings) -> float:
    task_set = load_task_set(task.use, task.args, domain=task.name)
    texts: list[str] = []

    def answer(messages: Any, fresh: bool) -> str:
        texts.append("\n".join(message.content for message in messages))
        try:
            return task_set.novice(task_set.task(0), texts, random.Random(3))
        except NotImplementedError:
            return "\\boxed{5}"

    done = play(task, answer, lambda text: None, seed=0, index=0, held_out=False)
    assert done.turns
    return done.reward


def trained(name: str, folder: Path) -> Summary:
    """Of one step with a model that knows nothing."""
    path = written(name, folder)
    count = len(load_job(path).tasks)
    few = ["rollout.zero_variance=keep", "rollout.groups_per_step=2", "train.steps=1"]
    few += [f"tasks.{number}.quota={2 // count}" for number in range(count)]
    result = train(load_job(path, few), folder / "run")
    assert (result.summary.state, result.violations) == ("finished", []), result.summary.reason
    assert all(task.failures == 0 for task in result.summary.tasks.values()), result.summary.tasks
    return result.summary


def test_every_example_is_here_and_short() -> None:
    assert set(EXAMPLES) == {"words", "libraries", "elsewhere", "tools", "repair", "agent"}
    files = {name: [file for file in FILES if file in text] for name, text in EXAMPLES.items()}
    assert (files["tools"], files["agent"]) == (["heights.py"], ["my_agent.py"])
    for name, text in EXAMPLES.items():
        lines = "".join([text, *(f"# {FILES[file]}" for file in files[name])]).splitlines()
        assert len([line for line in lines if line.strip()]) <= MAX_LINES, name


def test_a_dataset(folder: Path) -> None:
    assert run("words", folder)[0] in (0.0, 1.0)


def test_environments_of_libraries(folder: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("reasoning_gym")
    rewards = run("libraries", folder)
    assert rewards[1] == 1.0, "its scripted player knows the answer"


def test_tools(folder: Path) -> None:
    assert run("tools", folder) == [0.0]
    question = load_task_set(str(folder / "heights.py")).environment(
        Task(id="t", domain="t", index=0, payload={"cities": ["Bern", "Quito"]})
    )
    tool = as_observation(question.reset()).tools[0]
    assert (tool.name, tool.description) == ("height", "How high a city lies, in metres.")
    assert text_of(as_observation(question.step(CALL))) == "2850"
    assert as_observation(question.step("Quito\n")).reward == 1.0


CALL = '<tool_call>{"name": "height", "arguments": {"city": "Quito"}}</tool_call>'


def test_code_in_a_sandbox(folder: Path) -> None:
    pytest.importorskip("toolz")
    if why := missing():
        pytest.skip(why)
    assert run("repair", folder) == [0.0]


NEEDED = {"libraries": ("gymnasium", "reasoning_gym"), "repair": ("toolz",), "agent": ("openai",)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["words", "libraries", "tools", "repair", "agent"])
def test_a_step_is_trained_on_each(name: str, folder: Path) -> None:
    for needed in NEEDED.get(name, ()):
        pytest.importorskip(needed)
    if name == "repair" and (why := missing()):
        pytest.skip(why)
    summary = trained(name, folder)
    assert all(task.trained for task in summary.tasks.values())


@pytest.mark.slow
def test_another_interpreter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    python = interpreter_with(("gem-llm",), tmp_path_factory.mktemp("venvs"), "gem")
    (folder / "gem" / "bin").mkdir(parents=True)
    (folder / "gem" / "bin" / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (folder / "gem" / "bin" / "python").chmod(0o755)
    run("elsewhere", folder)
    GUESTS.end()
    assert trained("elsewhere", folder).groups.trained == 2

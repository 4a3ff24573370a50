"""The page "bring your task": each example is short, whole, and is run: checked as a job, and its tasks played."""

import re
from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import load_job
from rollart.config.settings import TaskSettings
from rollart.launch.checks import problems
from rollart.launch.play import play
from rollart.tasks.libraries import GUESTS
from rollart.tasks.load import load_task_set
from tests.tasks.libraries import interpreter_with

PAGE = Path(__file__).resolve().parent.parent / "docs" / "bring.md"
EXAMPLES = {
    re.search(r"^name: (.+)$", text, re.MULTILINE).group(1): text  # type: ignore[union-attr]
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
}
MAX_LINES = 30
ROWS = "".join(f'{{"question": "{n} and 30?", "answer": "{n}+30={n + 30}\\n#### {n + 30}"}}\n' for n in range(60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page says is there: a model, and the rows."""
    pytest.importorskip("transformers")
    from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    path = tmp_path / "models" / "mine"
    tokenizer.save_pretrained(path)
    save(tiny_model(len(tokenizer)), path)
    (tmp_path / "sums.jsonl").write_text(ROWS)
    return tmp_path


def run(name: str, folder: Path) -> list[float]:
    """The rewards of one episode of each task, played by its scripted player or by a novice."""
    (folder / f"{name}.yaml").write_text(EXAMPLES[name])
    job = load_job(folder / f"{name}.yaml")
    assert problems(job, None) == []
    return [played(task) for task in job.tasks]


def played(task: TaskSettings) -> float:
    import random

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


def test_every_example_is_here_and_short() -> None:
    assert set(EXAMPLES) == {"words", "libraries", "elsewhere"}
    assert max(text.count("\n") for text in EXAMPLES.values()) <= MAX_LINES


def test_a_dataset(folder: Path) -> None:
    assert run("words", folder)[0] in (0.0, 1.0)


def test_environments_of_libraries(folder: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("reasoning_gym")
    rewards = run("libraries", folder)
    assert rewards[1] == 1.0, "its scripted player knows the answer"


@pytest.mark.slow
def test_another_interpreter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    python = interpreter_with(("gem-llm",), tmp_path_factory.mktemp("venvs"), "gem")
    (folder / "gem" / "bin").mkdir(parents=True)
    (folder / "gem" / "bin" / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (folder / "gem" / "bin" / "python").chmod(0o755)
    run("elsewhere", folder)
    GUESTS.end()

"""`code_repair`: the mutations, the tools, and that undoing one scores 1 where guessing scores 0."""

import random
from pathlib import Path

import pytest

from benchmarks.code_repair import at_random, undone
from rollart.config.settings import RewardSettings
from rollart.errors import JobError
from rollart.tasks import repair_project
from rollart.tasks.api import Episode, EpisodeTurn, text_of
from rollart.tasks.code_repair import CodeRepair, Workspace, hidden_tests, mutation_of, score
from rollart.tasks.repair_mutations import mutations
from rollart.tasks.repair_project import site_of
from rollart.types import Task
from rollart.workers.sandbox import missing

pytest.importorskip("toolz")

SOURCE = '''"""if x < 1: a text, not code"""
LIMIT = 3


def first(items, count=2):
    """Return items < count."""
    if count < 0 and not items:
        return False
    total = 0
    for item in items:
        total += item
        if total == count:
            break
    return pair(total - 1, count)


class Box:
    def empty(self):
        return len(self.items) == 0
'''


def test_mutations_are_of_one_line_inside_functions_and_come_in_the_same_order() -> None:
    found = mutations(SOURCE)
    assert found == mutations(SOURCE)
    lines = SOURCE.splitlines()
    for mutation in found:
        assert lines[mutation.line - 1] == mutation.old != mutation.new
    changed = {(mutation.line, mutation.new.strip()) for mutation in found}
    assert {
        (7, "if count <= 0 and not items:"),
        (7, "if count < 0 or not items:"),
        (7, "if count < 0 and items:"),
        (8, "return True"),
        (11, "total -= item"),
        (12, "if total != count:"),
        (13, "continue"),
        (14, "return pair(total + 1, count)"),
        (14, "return pair(count, total - 1)"),
        (14, "return None"),
        (19, "return len(self.items) != 0"),
    } <= changed
    assert not {mutation.line for mutation in found} & {1, 2, 5, 6}, "texts, defaults and constants of the module stay"
    assert {mutation.function for mutation in found} == {"first", "Box.empty"}


@pytest.fixture(scope="module")
def tasks() -> CodeRepair:
    return CodeRepair(domain="repair", package="toolz")


def test_there_are_thousands_of_all_levels() -> None:
    pytest.importorskip("networkx")
    problems = CodeRepair().problems()
    assert len(problems) > 2000
    assert {row["level"] for row in problems} == {1, 2, 3, 4}
    assert len({(row["file"], row["mutation"]) for row in problems}) == len(problems)
    assert {row["level"] for row in CodeRepair(level=3).problems()} == {3}


def test_what_the_model_can_do(tasks: CodeRepair) -> None:
    task = tasks.task(0)
    mutation = mutation_of(task.payload)
    name = task.payload["file"]
    workspace = Workspace(task.payload)
    assert "itertoolz.py" in workspace.act("list").splitlines()
    assert "core.py" in workspace.act("list toolz/sandbox").splitlines()
    assert workspace.act(f"read {name} {mutation.line} {mutation.line}") == f"{mutation.line} {mutation.new}"
    assert f"{name} {mutation.line} " in workspace.act(f"search {mutation.new.strip()}")
    for nonsense in (
        "",
        "edit",
        "read nowhere.py",
        "read ../../etc/passwd",
        f"edit {name} 0 0",
        f"edit {name} 1 999999",
    ):
        assert workspace.act(nonsense)
        assert not workspace.edited
    assert workspace.act(f"edit {name} {mutation.line} {mutation.line}\n{mutation.old}") == "edited"
    assert workspace.act(f"read {name} {mutation.line} {mutation.line}") == f"{mutation.line} {mutation.old}"
    assert workspace.edited


def test_a_hint_says_where(tasks: CodeRepair) -> None:
    task = tasks.task(1)
    function = mutation_of(task.payload).function
    assert task.payload["test"] in tasks.environment(task).reset()
    assert function not in tasks.environment(task).reset().split("fails.")[1]
    assert f"in {function}." in CodeRepair(hint="function").environment(task).reset()


def test_a_catalogue_of_other_packages_is_refused_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.json"
    path.write_text(
        '{"packages":{"toolz":"0.1"},"files":{"toolz/itertoolz.py":{"tests":"toolz/tests/test_itertoolz.py",'
        '"sha256":"00","mutations":[[0,"test_x",1]]}}}'
    )
    with pytest.raises(JobError, match=r"pip install pytest toolz==0\.1"):
        CodeRepair(catalogue=str(path)).prepare()
    with pytest.raises(JobError, match=r"tasks\.args\.level: 9"):
        CodeRepair(level=9)


needs_sandbox = pytest.mark.skipif(bool(missing()), reason=f"sandbox {missing()}")


@needs_sandbox
def test_undoing_it_scores_1_and_guessing_0(tasks: CodeRepair) -> None:
    task = tasks.task(0)
    assert undone(tasks, task) == (1.0, True)
    assert at_random(task) == 0.0
    assert scored(task, "submit") == 0.0


def scored(task: Task, *answers: str) -> float:
    turns = tuple(EpisodeTurn(context="", text=answer, tokens=1, reward=0.0) for answer in answers)
    return score(Episode(id="a", status="done", task=task, turns=turns))


SAYS_FOR_EVER = """
import os
while True:
    for out in range(1, 20):
        try:
            os.write(out, b"x" * 65536)
        except OSError:
            pass
"""
CHEATS = {
    "leaves": "import os; os._exit(0)",
    "leaves late": "import atexit, os; atexit.register(os._exit, 0)",
    "runs no test": "import _pytest.runner as runner; runner.runtestprotocol = lambda *a, **k: []",
    "skips the file": "import pytest; pytest.skip('x', allow_module_level=True)",
    "kills": "import os; os.kill(os.getppid(), 9)",
}


@needs_sandbox
@pytest.mark.parametrize("cheat", CHEATS)
def test_tests_that_did_not_run_do_not_pass(tasks: CodeRepair, cheat: str) -> None:
    task = tasks.task(0)
    mutation, name = mutation_of(task.payload), task.payload["file"]
    assert scored(task, f"edit {name} {mutation.line} {mutation.line}\n{mutation.old}") == 1.0
    assert scored(task, f"edit {name} 1 1\n{CHEATS[cheat]}") == 0.0


@needs_sandbox
def test_a_skipped_test_has_not_passed(tasks: CodeRepair) -> None:
    task = tasks.task(0)
    mutation, name = mutation_of(task.payload), task.payload["file"]
    indent = " " * (len(mutation.old) - len(mutation.old.lstrip()))
    skip = f"{indent}__import__('pytest').skip('x')\n{mutation.old}"
    assert scored(task, f"edit {name} {mutation.line} {mutation.line}\n{skip}") == 0.0


@needs_sandbox
def test_a_run_without_end_is_bounded_and_so_is_what_it_says(
    tasks: CodeRepair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward is 0, before the job's own limit makes a failure of it."""
    assert RewardSettings().timeout_s > repair_project.RUN_S
    monkeypatch.setattr(repair_project, "RUN_S", 2.0)
    task = tasks.task(0)
    assert scored(task, f"edit {task.payload['file']} 1 1\n{SAYS_FOR_EVER}") == 0.0


@needs_sandbox
def test_thoughts_are_no_actions(tasks: CodeRepair) -> None:
    task = tasks.task(0)
    mutation = mutation_of(task.payload)
    edit = f"edit {task.payload['file']} {mutation.line} {mutation.line}\n{mutation.old}"
    assert scored(task, f"<think>\nI could exit.\n</think>\n\n{edit}") == 1.0
    environment = tasks.environment(task)
    environment.reset()
    assert text_of(environment.step(f"<think>hm</think>\n{edit}")) == "edited\n"


@needs_sandbox
def test_reading_the_installed_package_does_not_help(tasks: CodeRepair) -> None:
    """In the sandbox that scores, it is nowhere."""
    task = tasks.task(0)
    name = task.payload["file"]
    lines = len(Workspace(task.payload).changed[name].splitlines())
    original = site_of("toolz") / name
    assert original.exists()
    assert scored(task, f"edit {name} 1 {lines}\nexec(open({str(original)!r}).read())") == 0.0


def test_undoing_any_of_them_gives_the_package_back() -> None:
    pytest.importorskip("networkx")
    tasks = CodeRepair()
    for payload in tasks.problems():
        workspace = Workspace(payload)
        task = Task(id="t", domain="t", index=0, payload=payload)
        assert workspace.act(tasks.scripted(task, ["", ""], random.Random(0))) == "edited"
        file = str(payload["file"])
        assert workspace.changed[file].splitlines() == (site_of(file.partition("/")[0]) / file).read_text().splitlines()


@needs_sandbox
@pytest.mark.slow
def test_the_tests_of_all_files_pass_on_the_package_as_it_is() -> None:
    """So undoing a change scores 1 for every problem."""
    pytest.importorskip("networkx")
    files = {(str(row["file"]).partition("/")[0], str(row["tests"])) for row in CodeRepair().problems()}
    assert len(files) >= 100
    ran = {tests: hidden_tests(package, tests, {}) for package, tests in sorted(files)}
    assert {tests: one.said for tests, one in ran.items() if not one.well} == {}


@needs_sandbox
@pytest.mark.slow
def test_of_every_level_undoing_scores_1_and_guessing_0() -> None:
    pytest.importorskip("networkx")
    for level in (1, 2, 3, 4):
        tasks = CodeRepair(domain="repair", level=level)
        for task in map(tasks.task, range(4)):
            assert undone(tasks, task) == (1.0, True), task.payload
            assert at_random(task) == 0.0, task.payload


@needs_sandbox
def test_a_failing_test_reads_the_same_each_time(tasks: CodeRepair) -> None:
    def said(task: Task) -> str:
        environment = tasks.environment(task)
        try:
            environment.reset()
            return text_of(environment.step("test"))
        finally:
            environment.close()

    task = tasks.task(2)
    assert said(task) == said(task)
    assert "repair-" not in said(task)
    assert tasks.novice(task, ["x"], random.Random(0))

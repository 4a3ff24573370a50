"""The examples work, and the docs show them as they are."""

from pathlib import Path

import pytest

from rollart.cli import main
from rollart.tasks.check import check_task

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_nothing_is_wrong_with_an_example(path: Path) -> None:
    assert check_task(str(path)).findings == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_shows_the_example_as_it_is(path: Path) -> None:
    assert f"```python\n{path.read_text()}```" in (ROOT / "docs/tasks.md").read_text()


def test_task_check_says_what_is_wrong_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text((ROOT / "examples/bag_of_words.py").read_text().replace('{"found": episode.reward,', "{1: None,"))
    assert main(["task", "check", str(broken)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("error: ")

"""The generated pages are what their scripts make now, and the example is a job."""

from pathlib import Path

import pytest
import yaml

from rollart.cli import main
from rollart.config.load import build_job, load_job, warnings
from scripts import event_reference, figures, summary_reference
from scripts.job_reference import EXAMPLE, PAGE, render

ROOT = Path(__file__).resolve().parent.parent


def test_the_job_reference_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_the_event_reference_is_up_to_date() -> None:
    assert event_reference.PAGE.read_text(encoding="utf-8") == event_reference.render(), "run `make docs`"


def test_the_summary_reference_is_up_to_date() -> None:
    assert summary_reference.PAGE.read_text(encoding="utf-8") == summary_reference.render(), "run `make docs`"


def test_the_figures_of_the_readme_are_those_that_were_kept() -> None:
    assert figures.README.read_text(encoding="utf-8") == figures.render(), "run `make figures`"


def test_the_figures_of_the_modes_are_those_that_were_kept() -> None:
    assert figures.MODES.read_text(encoding="utf-8") == figures.render_modes(), "run `make figures`"


def test_every_kept_output_is_of_a_command_and_has_a_row() -> None:
    kept = {path.stem for path in figures.FOLDER.glob("*.json")}
    assert kept == set(figures.COMMANDS) == {name for _, names, _ in figures.ROWS for name in names.split()}


def test_the_example_is_a_job() -> None:
    assert warnings(build_job(yaml.safe_load(EXAMPLE))) == []


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job as the page prints it, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    printed = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "first.yaml").write_text(printed)
    return tmp_path


def test_the_example_runs_as_printed_in_the_simulator(example: Path) -> None:
    assert main(["sim", "first.yaml", "--out", "run", "train.steps=2"]) == 0


@pytest.mark.slow
def test_the_example_runs_as_printed(example: Path) -> None:
    """The model is not warmed up, so nothing may be learnt yet; and one step is enough."""
    pytest.importorskip("transformers")
    from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(example / "models" / "tiny")
    save(tiny_model(len(tokenizer)), example / "models" / "tiny")
    assert main(["check", "first.yaml"]) == 0
    assert main(["train", "first.yaml", "--out", "run", "train.steps=1", "rollout.zero_variance=skip"]) == 0


@pytest.mark.parametrize(
    "path", [*ROOT.glob("jobs/*.yaml"), *ROOT.glob("benchmarks/*.yaml")], ids=lambda path: path.stem
)
def test_the_models_of_shipped_jobs_are_where_the_docs_make_them(path: Path) -> None:
    job = load_job(path)
    assert not job.model.path or Path(job.model.path).parent == ROOT / "models"

"""The command line on wrong jobs: exit code 2, one line on stderr, no run directory; and a quick start."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from rollart.cli import EXTRAS, main
from rollart.config.job import Job
from rollart.config.load import load_job
from rollart.launch.books import RunResult
from rollart.launch.resume import Resumption, write_job
from rollart.store.journal import FileJournal
from tests.contracts.trainer import checkpoint
from tests.summaries import summary_with

ROOT = Path(__file__).resolve().parent.parent

JOB = """
name: wrong
tasks: [{name: maths, group_size: 4}]
pools:
  - {name: compute, hardware: h800, engines: {count: 2}}
  - {name: environments, slots: 256}
"""

WRONG = [
    pytest.param(JOB + "rollot: {staleness: 2}\n", "rollot: unknown key", id="unknown-key"),
    pytest.param(JOB + "rollout: {staleness: 0}\n", "rollout.staleness: 0 means on-policy", id="bound-0-after-batch"),
    pytest.param("name: [\n", "not valid YAML", id="bad-yaml"),
]


@pytest.mark.parametrize("command", ["check", "sim"])
@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_job_exits_with_2_and_leaves_nothing(
    command: str,
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text(text)

    assert main([command, str(job)]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("rollart: ")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"]


def test_check_says_that_a_job_is_for_the_simulator_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert main(["check", str(tmp_path / "job.yaml")]) == 0
    assert "\n# for the simulator alone: " in capsys.readouterr().out
    assert main(["check", str(tmp_path / "job.yaml"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["simulator_only"], said["problems"]) == (True, [])
    assert main(["check", str(tmp_path / "job.yaml"), "--json", "tasks.0.use=no_such_module"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["simulator_only"] is False
    assert [problem.split(":")[0] for problem in said["problems"]] == ["tasks.0.use", "model.path"]


@pytest.mark.parametrize(
    "words",
    [
        ["JOB", "train.steps=1", "seed=3", "--out", "OUT", "--json"],
        ["JOB", "--out", "OUT", "train.steps=1", "--json", "seed=3"],
        ["--json", "train.steps=1", "JOB", "--out", "OUT", "seed=3"],
        ["train.steps=1", "seed=3", "--out", "OUT", "--json", "JOB"],
    ],
)
def test_overrides_are_taken_in_any_position(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    places = {"JOB": str(tmp_path / "job.yaml"), "OUT": str(tmp_path / "run")}
    assert main(["sim", *(places.get(word, word) for word in words)]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    assert "seed: 3" in (tmp_path / "run" / "job.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.steps=1"], "JOB: missing"),
        (["jobs/rollart.yaml", "--json", "jobs/sync.yaml"], "override 'jobs/sync.yaml': write it as key=value"),
    ],
)
def test_words_that_make_no_sense_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 2
    assert message in capsys.readouterr().err


UNLIKELY = "rollart: warning: checkpoint.every: 10 is more than train.steps 1"


def test_sim_warns_on_stderr_and_leaves_stdout_to_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    assert main(["sim", str(job), "train.steps=1", "--json", "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith(UNLIKELY)
    assert json.loads(shown.out)["state"] == "finished"


def test_train_warns_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    assert main(["train", str(job), "train.steps=1", "--json", "--out", str(tmp_path / "run")]) == 2  # it has no task
    shown = capsys.readouterr()
    assert shown.err.startswith(UNLIKELY)
    assert shown.out == ""


def test_the_command_line_starts_light() -> None:
    code = "import rollart.cli, sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "rollart.cli" in loaded
    assert loaded & {"pydantic", "numpy", "rich", "torch"} == set()


def test_plans_are_not_kept_among_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runs of a plan before would be in the way, and count as failures of this one."""
    words = ["sim", str(ROOT / "jobs" / "chaos.yaml"), "--chaos", "1", "--workers", "1", "--out", str(tmp_path)]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"rollart: --out: {tmp_path} exists")


REAL = ROOT / "jobs" / "quickstart.yaml"


def trained(
    monkeypatch: pytest.MonkeyPatch, state: str, violations: list[str]
) -> list[tuple[Path, Job, Resumption | None]]:
    """`rollart train` without the training: what it was asked for."""
    asked: list[tuple[Path, Job, Resumption | None]] = []

    def train(job: Job, out: Path, *, resume: Resumption | None = None, watch: object = None) -> RunResult:
        asked.append((out, job, resume))
        return RunResult(summary=summary_with(state=state), violations=violations, deadlock=False, faults={})

    monkeypatch.setattr("rollart.launch.training.train", train)
    return asked


@pytest.mark.parametrize(
    ("state", "violations", "code"),
    [
        ("finished", [], 0),
        ("finished", ["promise 2: a group was trained on twice"], 1),
        ("stopped", [], 1),
        ("interrupted", [], 130),
    ],
)
def test_the_exit_code_of_train_says_how_it_went(
    state: str, violations: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(monkeypatch, state, violations)
    assert main(["train", str(REAL), "--out", str(tmp_path / "run"), "--json"]) == code


def test_a_job_is_resumed_where_it_was_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = trained(monkeypatch, "finished", [])
    out = stopped_run(Path("runs") / "quickstart-1")
    for words in ([str(REAL), "--resume"], ["--resume", str(out)], [str(REAL), "--resume", str(out)]):
        assert main(["train", *words, "--json"]) == 0
        where, job, resume = asked.pop()
        assert (where, job) == (out, load_job(REAL))
        assert resume is not None
        assert resume.changes == ()
    for wrong in (["--resume"], ["--resume", "train.steps=3"], ["--resume", str(out), "--out", "elsewhere"]):
        assert main(["train", *wrong]) == 2
    assert not asked


def stopped_run(out: Path) -> Path:
    """A run of the quickstart that was stopped after its fifth step."""
    out.mkdir(parents=True)
    write_job(out, load_job(REAL))
    (out / "events.jsonl").touch()
    FileJournal(out / "journal").commit(checkpoint(5))
    return out


@pytest.mark.parametrize("named", [False, True])
def test_what_a_resumed_run_does_otherwise_is_listed(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = trained(monkeypatch, "finished", [])
    out = stopped_run(Path("runs") / "quickstart-1")
    edited = tmp_path / "quickstart.yaml"
    raw = yaml.safe_load(yaml.safe_dump(load_job(REAL).model_dump(mode="json")))
    raw["train"] |= {"lr": 0.25, "steps": 777}
    raw["limits"]["step_s"] = 7.0
    edited.write_text(yaml.safe_dump(raw))
    words = [str(edited), "--resume"] if named else ["train.lr=0.25", "--resume", str(out), "limits.step_s=7"]
    assert main(["train", *words, "train.steps=777", "--json"]) == 0
    said = capsys.readouterr().err
    assert "rollart: changed train.lr: " in said
    assert " -> 0.25, from step 5 on\n" in said
    assert "limits.step_s: 300.0 -> 7.0, at once" in said
    (_, job, resume) = asked.pop()
    assert (job.train.lr, job.train.steps, job.limits.step_s) == (0.25, 777, 7.0)
    assert resume is not None
    assert [change.key for change in resume.changes] == ["train.steps", "train.lr", "limits.step_s"]
    assert main(["train", "--resume", str(out), "seed=9", "train.lr=0.5"]) == 2
    said = capsys.readouterr().err
    assert "another seed: 0 -> 9 (tasks and draws follow from it)" in said
    assert "train.lr" not in said
    assert not asked


@pytest.mark.parametrize("state", ["interrupted", "stopped"])
def test_the_command_to_go_on_is_printed_and_works_as_printed(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = trained(monkeypatch, state, [])
    out = stopped_run(tmp_path / "my runs" / "one")
    assert main(["train", "--resume", str(out), "--json"]) != 0
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith("rollart: to go on: rollart train ")
    words = shlex.split(printed.removeprefix("rollart: to go on: "))
    main([*words[1:], "--json"])
    assert [where for where, _, _ in asked] == [out, out]
    monkeypatch.setattr("rollart.cli.runs.run_dir", lambda *_: tmp_path / "new")
    main(["train", str(REAL), "--json"])
    assert "to go on" not in capsys.readouterr().err.splitlines()[-1], "there is nothing yet to go on from"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["tiny", "--untied"], "--untied"),
        (["smollm2", "--head-size", "32"], "--head-size"),
        (["smollm2", "--seed", "0"], "--seed"),
        (["tiny", "--go-on-from", "other", "--as-long-as", "run", "--head-size", "32"], "--head-size"),
        (["smollm2", "--go-on-from", "other", "--as-long-as", "run"], "--go-on-from"),
    ],
)
def test_an_option_of_another_kind_of_model_is_refused(
    options: list[str],
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for maker in ("smollm2.make_smollm2", "tiny.make_tiny", "tiny.continue_warmup"):
        monkeypatch.setattr(f"rollart_recipes.{maker}", lambda *args, **settings: pytest.fail("it was made"))
    assert main(["model", options[0], str(tmp_path / "model"), *options[1:]]) == 2
    assert capsys.readouterr().err.startswith(f"rollart: {key}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["train", "jobs/quickstart.yaml"], "msgpack", "train"),
        (["task", "check", "rollart.tasks.frozen_lake"], "msgpack", "tasks"),
        (["reward", "serve", "rollart.tasks.frozen_lake:score"], "msgpack", "rewards"),
        (["model", "tiny", "runs/never"], "gymnasium", "tasks"),
    ],
)
def test_a_missing_package_is_told_with_the_extra_that_brings_it(
    arguments: list[str], package: str, extra: str
) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from rollart.cli import main; sys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    command = f"{sys.executable} -m pip install -e '{ROOT}[{extra}]'"
    line = f"rollart: {package} is not installed; install it with: {command}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_a_missing_package_of_somebody_else_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.cli.looks.check", lambda arguments: __import__("nobodys_package"))
    with pytest.raises(ModuleNotFoundError, match="nobodys_package"):
        main(["check", "job.yaml"])


def test_the_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {
        extra: tuple(sorted(re.split("[<=>]", package)[0].replace("-", "_") for package in packages))
        for extra, packages in extras.items()
        if extra != "dev"
    }
    assert names == EXTRAS

"""The command line on wrong jobs: exit code 2, one line on stderr, no run directory; and a quick start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.cli import main
from rollart.config.job import Job
from rollart.run import RunResult

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


def test_workers_are_refused_where_they_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "control", "--workers", "2"]) == 2
    assert "bench affinity" in capsys.readouterr().err


REAL = ROOT / "jobs" / "quickstart.yaml"


def trained(monkeypatch: pytest.MonkeyPatch, state: str, violations: list[str]) -> list[tuple[Path, bool]]:
    """`rollart train` without the training: what it was asked for."""
    asked: list[tuple[Path, bool]] = []

    def train(job: Job, out: Path, *, resume: bool = False, watch: object = None) -> RunResult:
        asked.append((out, resume))
        return RunResult(summary={"state": state, "reason": ""}, violations=violations, deadlock=False, faults={})

    monkeypatch.setattr("rollart.training.train", train)
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
    out = Path("runs") / "quickstart-1"
    (out / "journal").mkdir(parents=True)
    (out / "journal" / "checkpoint").touch()
    (out / "events.jsonl").touch()
    (out / "job.yaml").write_text(REAL.read_text())
    assert main(["train", str(REAL), "--resume", "--json"]) == 0
    assert main(["train", "--resume", str(out), "--json"]) == 0
    assert asked == [(out, True), (out, True)]
    for wrong in (["--resume"], [str(REAL), "train.steps=3", "--resume"], [str(REAL), "--resume", str(out)]):
        assert main(["train", *wrong]) == 2

"""What reads a run's events gives the same in the run's process and in one beside it."""

import os
import signal
from pathlib import Path

import pytest

from rollart.config.load import load_job
from rollart.events.log import events_in
from rollart.launch.books import Folds, FoldsBeside
from rollart.launch.simulation import simulate

JOB = load_job(
    Path(__file__).resolve().parents[1] / "jobs" / "chaos.yaml",
    ["train.steps=4", "sim.faults=[{kind: engine_death, at_s: 40}]"],
)
"""Its attempts fail now and then, and one engine dies."""


def test_summary_audit_and_metrics_are_the_same_beside_a_run(tmp_path: Path) -> None:
    here = simulate(JOB, tmp_path / "here")
    beside = simulate(JOB, tmp_path / "beside", beside=True)
    assert beside == here
    assert here.faults["engine_death"][0] == 1
    for name in ("events.jsonl", "summary.json", "metrics.jsonl"):
        written = (tmp_path / "beside" / name).read_bytes()
        assert written, name
        assert written == (tmp_path / "here" / name).read_bytes(), name


def test_what_an_audit_beside_a_run_finds_wrong_is_told(tmp_path: Path) -> None:
    simulate(JOB, tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_bytes().splitlines(keepends=True)
    lines = [line for line in lines if b'"e":"swap.end"' not in line]
    here = Folds(None)
    for reader in here.readers:
        for event in events_in(b"".join(lines)):
            reader(event)
    beside = FoldsBeside(tmp_path, audited=True)
    for at in range(0, len(lines), 100):
        beside.take(b"".join(lines[at : at + 100]))
    found = beside.result()
    assert found.violations
    assert found == here.result()


def test_a_reader_that_breaks_is_told_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    beside = FoldsBeside(tmp_path, audited=True)
    beside.take(b'{"e":"no such kind"}\n')
    with pytest.raises(RuntimeError, match="ended with status 1; its error is above"):
        beside.result()
    assert "no such kind" in capfd.readouterr().err


def test_a_reader_that_is_killed_ends_nothing_but_its_result(tmp_path: Path) -> None:
    beside = FoldsBeside(tmp_path, audited=True)
    assert beside.pid is not None
    os.kill(beside.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with status -9"):
        beside.result()

"""One job, nothing changed but what runs it: on the virtual clock, inline, in local processes, on Ray."""

from pathlib import Path

import pytest

from rollart.launch.books import RunResult
from rollart.launch.simulation import simulate
from rollart.launch.training import train
from tests.cluster.small import STEPS, small_job


def well(result: RunResult) -> None:
    summary = result.summary
    assert (summary.state, summary.steps, summary.reason) == ("finished", STEPS, "")
    assert result.violations == []
    assert (summary.groups.lost, summary.groups.trained_twice) == (0, 0)
    assert all(task.trained_share > 0 for task in summary.tasks.values())


def test_simulated(model: Path, tmp_path: Path) -> None:
    well(simulate(small_job(model), tmp_path / "run"))


@pytest.mark.parametrize(
    "cluster", ["inline", pytest.param("local", marks=pytest.mark.slow), pytest.param("ray", marks=pytest.mark.slow)]
)
def test_for_real(model: Path, tmp_path: Path, cluster: str) -> None:
    well(train(small_job(model, cluster={"type": cluster}), tmp_path / "run"))

"""`python -m benchmarks.control`: a run with recording keeps every trajectory, and the figures say what that costs."""

import pytest

import benchmarks.control as bench
from benchmarks.control import Cost, recording_figures, run_turns


def test_a_recorded_run_does_the_same_and_keeps_every_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CALLS", 400)
    plain, recorded = run_turns(32), run_turns(32, record=True)
    assert plain.calls == recorded.calls > 300
    assert (plain.trajectories, plain.disk_bytes) == (0, 0)
    assert recorded.trajectories >= 32
    assert recorded.dropped == 0
    assert recorded.disk_bytes > 1000 * recorded.trajectories, "no two answers are alike"


def test_the_ratio_is_of_runs_side_by_side() -> None:
    recorded = [Cost(calls=100, seconds=s, trajectories=10, disk_bytes=500) for s in (1.1, 2.1, 3.6)]
    figures = recording_figures([0.01, 0.02, 0.03], recorded)
    assert figures["cost_ratio_rounds"] == [1.1, 1.05, 1.2]
    assert figures["cost_ratio"] == 1.1
    assert (figures["dropped"], figures["disk_bytes_per_trajectory"]) == (0, 50)

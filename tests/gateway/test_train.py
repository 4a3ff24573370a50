"""A whole job whose trajectories are played by programs: it trains, swaps weights under them, and nothing is lost."""

from pathlib import Path

import pytest

from rollart.events import schema
from tests.gateway.play import AGENTS, TASKS
from tests.real.harness import job, running


@pytest.mark.slow
def test_a_job_of_programs_trains_on_what_they_sampled(model: Path, tmp_path: Path) -> None:
    talk = {"name": "talk", "use": TASKS, "group_size": 4, "max_turns": 3, "max_tokens": 6}
    raw = job(
        model,
        tasks=[{**talk, "agent": {"function": f"{AGENTS}:solve"}}],
        train={"pool": "cpu", "steps": 4, "lr": 1.0e-3},
        limits={"step_s": 60.0, "backoff_s": 0.1},
    )
    with running(tmp_path, raw) as run:
        run.step(1)
        run.kill("env")  # a program dies with its environment; its attempt is made again
        assert run.wait() == 0, run.said
        summary = run.ended_well(4)
        ends = [event for event in run.events() if isinstance(event, schema.End)]
        said = [event for event in run.events() if isinstance(event, schema.Said)]
    assert {event.turns for event in ends if event.status == "done"} == {2}
    assert max(version for event in said for version, _ in event.spans) >= 2, "they went on under new weights"
    assert summary["groups"]["trained"] == 16

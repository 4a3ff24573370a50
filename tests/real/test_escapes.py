"""A job of two tasks, one of which does nothing but try to get out of its sandbox: the other one does not notice."""

from pathlib import Path

import pytest

from rollart.config.load import build_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.training import train
from rollart.workers.sandbox import missing
from tests.real.harness import TASKS, job

ESCAPES = Path(__file__).parents[1] / "envs" / "escape_tasks.py"
STEPS = 6


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"sandbox {missing()}")
def test_each_escape_fails_with_the_rollout_going_on(model: Path, tmp_path: Path) -> None:
    bounds = {"memory_mb": 192, "processes": 24, "tmp_mb": 8, "output_mb": 2, "cpu_s": 5}
    raw = job(
        model,
        tasks=[
            {"name": "good", "use": TASKS, "group_size": 4, "max_turns": 3, "max_tokens": 4},
            {
                **{"name": "bad", "use": str(ESCAPES), "group_size": 2, "max_turns": 2, "max_tokens": 4},
                **{"isolation": "sandbox", "sandbox": bounds, "warm": 2, "limits": {"step_s": 15.0}},
            },
        ],
        rollout={"groups_per_step": 4, "zero_variance": "skip", "share_tolerance": 1.0},
        pools=[
            {"name": "cpu", "engines": {"count": 1, "max_batch": 32, "kv_tokens": 8192}},
            {"name": "environments", "slots": 6},
        ],
        train={"pool": "cpu", "steps": STEPS, "lr": 1e-3},
        limits={"backoff_s": 0.05, "attempts": 2, "task_failures": 20},
    )
    result = train(build_job(raw), tmp_path / "run")
    assert result.summary.state == "finished", result.summary.reason
    assert result.violations == []
    assert result.summary.groups.lost == 0
    ends = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, schema.End)]
    good = [event for event in ends if event.task.startswith("good/") and event.status != "aborted"]
    assert {event.status for event in good} <= {"done", "truncated", "stale"}
    bad = [event for event in ends if event.task.startswith("bad/") and event.status not in ("aborted", "stale")]
    assert len(bad) >= 8
    assert {event.reward for event in bad if event.status == "done"} <= {0.0}, "something got out"
    failed = result.summary.tasks["bad"].failed_at
    assert set(failed) <= {"env.step limit", "env.step crash", "env.step timeout"}, failed

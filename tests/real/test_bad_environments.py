"""A job of two tasks, one of them broken in every way: the other one does not notice."""

from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event
from rollart.launch.training import train
from rollart.tasks.load import load_task_set
from tests.real.bad_tasks import FAILING
from tests.real.harness import TASKS, job

BAD = Path(__file__).with_name("bad_tasks.py")
STEPS = 5


def two_tasks(model: Path, isolation: str, use: str) -> dict[str, Any]:
    return job(
        model,
        tasks=[
            {"name": "good", "use": TASKS, "group_size": 4, "max_turns": 3, "max_tokens": 4, "weight": 1},
            {"name": "bad", "use": use, "group_size": 2, "max_turns": 3, "max_tokens": 4, "weight": 1},
        ],
        rollout={"groups_per_step": 4, "zero_variance": "skip", "share_tolerance": 1.0},
        pools=[
            {"name": "cpu", "engines": {"count": 1, "max_batch": 32, "kv_tokens": 8192}},
            {"name": "environments", "slots": 8, "isolation": isolation},
        ],
        train={"pool": "cpu", "steps": STEPS, "lr": 1e-3},
        limits={"backoff_s": 0.05, "step_s": 1.0, "reset_s": 1.0, "attempts": 2},
    )


SAYS = {
    "hang": "env.step: no answer in 1 s",
    "hang in reset": "env.reset: no answer in 1 s",
    "raise": "lost my keys",
    "raise in open": "no such problem",
    "leave": "3",
    "nothing": "NoneType",
    "not a number": "finite number",
    "die": "status 7",
    "babble": "nonsense",
}


@pytest.mark.slow
@pytest.mark.parametrize(("isolation", "name"), [("process", "BadTasks"), ("inline", "InlineTasks")])
def test_a_broken_environment_changes_nothing_but_its_own_trajectories(
    model: Path, tmp_path: Path, isolation: str, name: str
) -> None:
    use = f"{BAD}:{name}"
    result = train(build_job(two_tasks(model, isolation, use)), tmp_path / "run")
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert result.summary.state == "finished", result.summary.reason
    assert result.violations == []
    assert result.summary.groups.lost == 0
    ended = [event for event in events if isinstance(event, schema.End) and event.status != "aborted"]
    good = [event for event in ended if event.task.startswith("good/")]
    assert len(good) >= 4 * STEPS
    assert {event.status for event in good} <= {"done", "truncated", "stale"}
    bad_ones_say_why(events, load_task_set(use, domain="bad"))
    failures = result.summary.failures["attempt"]
    assert failures.count >= 3
    assert len(failures.reasons) >= 3


def bad_ones_say_why(events: list[Event], tasks: Any) -> None:
    """Each kind that was played to its end failed with its own reason; a megabyte of output is no failure."""
    seen: dict[str, set[str]] = {}
    for event in events:
        if isinstance(event, schema.End) and event.task.startswith("bad/") and event.status not in ("aborted", "stale"):
            kind = tasks.task(int(event.task.split("/")[1])).payload["kind"]
            seen.setdefault(kind, set()).add(event.status)
            if kind in FAILING:
                assert SAYS[kind] in event.reason, (kind, event.reason)
    assert all(statuses == {"failed"} for kind, statuses in seen.items() if kind in FAILING), seen
    assert seen.get("print", {"done"}) == {"done"}
    assert len(seen) >= 4, f"too few kinds were played to say anything: {seen}"

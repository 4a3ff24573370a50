"""The rollout of a real job in two shards: it trains, and kill -9 of a shard, its engine or the head loses nothing."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollart.events import schema
from rollart.events.schema import group_of
from tests.real.harness import Run, job, running

STEPS = 6
EARLY_S = 1.0
"""A shard learns what time it is from a message, which takes milliseconds. It starts after that: several seconds."""


def sharded(model: Path, **changes: Any) -> dict[str, Any]:
    return job(
        model,
        pools=[
            {"name": "cpu", "engines": {"count": 2, "max_batch": 32, "kv_tokens": 8192}},
            {"name": "environments", "slots": 4, "isolation": "process"},
        ],
        rewards={"workers": 2, "backoff_s": 0.1},
        train={"pool": "cpu", "steps": STEPS, "lr": 1.0e-3},
        cluster={"coordinators": 2},
        **changes,
    )


def both_played(run: Run) -> None:
    """Each on its own engine, and by the head's clock."""
    admitted: dict[str, float] = {}
    engines: set[str] = set()
    for event in run.events():
        match event:
            case schema.Admit():
                admitted[event.group] = event.t
            case schema.Start():
                assert event.t > admitted[group_of(event.id)] - EARLY_S
            case schema.Said():
                engines.add(event.engine)
    assert engines == {"cpu-0", "cpu-1"}


@pytest.mark.timeout(240)  # a whole job, on a machine that may be busy
def test_a_shard_is_killed_and_the_job_goes_on(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, sharded(model)) as run:
        run.step(2)
        run.kill("shard-1")
        assert run.wait() == 0, run.said
        summary = run.ended_well(STEPS)
        events = run.events()
        both_played(run)
    (down,) = [event for event in events if isinstance(event, schema.ShardDown)]
    assert (down.shard, down.engines) == ("shard-1", ["cpu-1"])
    assert "signal 9" in down.reason
    assert [event.shard for event in events if isinstance(event, schema.ShardUp)] in ([], ["shard-1"])
    assert summary["restarts"]["coordinator"] == 1
    (reason,) = summary["failures"]["coordinator"]["reasons"]
    assert "signal 9" in reason
    again = {event.group for event in events if isinstance(event, schema.Admit) and event.n > down.n}
    assert set(down.groups) <= again


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_shard_that_hangs_is_started_again(model: Path, tmp_path: Path) -> None:
    limits = {"backoff_s": 0.1, "progress_s": 8.0}
    with running(tmp_path, sharded(model, limits=limits)) as run:
        run.step(2)
        (pid,) = [pid for pid, role in run.members().items() if role == "shard-1"]
        os.kill(pid, signal.SIGSTOP)
        assert run.wait() == 0, run.said
        run.ended_well(STEPS)
        (down,) = [event for event in run.events() if isinstance(event, schema.ShardDown)]
    assert down.shard == "shard-1"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_engine_of_a_shard_is_killed_and_the_shard_goes_on(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, sharded(model)) as run:
        run.step(2)
        run.kill("cpu-0")
        assert run.wait() == 0, run.said
        summary = run.ended_well(STEPS)
        assert not [event for event in run.events() if isinstance(event, schema.ShardDown)]
    assert summary["restarts"]["engines"] == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_head_is_killed_and_the_job_is_resumed(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, sharded(model)) as run:
        run.step(4)
        run.kill("coordinator")
        run.wait()
        run.nobody_is_left()
        run.start("--resume", str(run.out))
        assert run.wait() == 0, run.said
        summary = run.ended_well(STEPS)
        both_played(run)
    assert summary["restarts"]["coordinator"] == 1

"""One job, nothing changed but what runs it: on the virtual clock, inline, in local processes, on Ray; in shards."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollart.config.job import Job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event
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


def in_shards(model: Path, cluster: str, steps: int = STEPS) -> Job:
    small: dict[str, Any] = {
        "pools": [
            {"name": "cpu", "engines": {"count": 2, "kv_tokens": 16384, "max_batch": 64}},
            {"name": "environments", "slots": 32, "isolation": "inline"},
        ],
        "rewards": {"workers": 2},
        "train": {"pool": "cpu", "steps": steps, "lr": 1e-4, "entropy_coef": 0.01},
    }
    return small_job(model, **small, cluster={"type": cluster, "coordinators": 2})


def test_in_shards_simulated(model: Path, tmp_path: Path) -> None:
    well(simulate(in_shards(model, "local"), tmp_path / "run"))


def happened(out: Path) -> list[Event]:
    return list(read_events(out / "events.jsonl")) if (out / "events.jsonl").exists() else []


@pytest.mark.slow
def test_in_shards_on_ray_one_of_which_is_killed(model: Path, tmp_path: Path) -> None:
    out, steps = tmp_path / "run", 12

    def kill() -> None:
        while not any(isinstance(event, schema.StepEnd) for event in happened(out)):
            time.sleep(0.1)
        places = [orjson.loads(line) for line in (out / "logs" / "placed.jsonl").read_bytes().splitlines()]
        (pid,) = [place["pid"] for place in places if place["worker"] == "shard-1"]
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    result = train(in_shards(model, "ray", steps), out)
    killer.join(60.0)
    events = happened(out)
    assert (result.summary.state, result.summary.steps) == ("finished", steps)
    assert result.violations == []
    assert (result.summary.groups.lost, result.summary.groups.trained_twice) == (0, 0)
    (down,) = [event for event in events if isinstance(event, schema.ShardDown)]
    assert (down.shard, down.engines) == ("shard-1", ["cpu-1"])
    assert {event.engine for event in events if isinstance(event, schema.Said)} == {"cpu-0", "cpu-1"}

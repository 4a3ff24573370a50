"""Commands around a real job, as a user types them: rewards behind a URL, and evaluation of a model."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.events import schema
from rollart.events.log import read_events
from tests.real.harness import ROOT, SOON_S, TASKS, job, running


def rollart(*arguments: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rollart.cli", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextmanager
def served(functions: str) -> Iterator[str]:
    """`rollart reward serve` on a free port; the URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = rollart("reward", "serve", functions, "--port", str(port))
    try:
        deadline_s = time.monotonic() + SOON_S
        while True:
            assert server.poll() is None, server.communicate()
            assert time.monotonic() < deadline_s
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_a_job_trains_with_rewards_behind_a_url(model: Path, tmp_path: Path) -> None:
    """One key of the job is another; its results are alike."""
    with served(f"slow={TASKS}:score") as url:
        raw = job(model, train={"pool": "cpu", "steps": 3, "lr": 1e-3}, rewards={"type": "http", "url": url})
        with running(tmp_path, raw) as run:
            assert run.wait() == 0, run.said
            run.ended_well(3)
            rewards = [event for event in run.events() if isinstance(event, schema.Reward)]
            assert len(rewards) >= 3 * 4 * 4
            assert {event.value for event in rewards} > {0.0, 1.0}
            assert not any(role.startswith("reward-") for role in run.members().values())


@pytest.mark.slow
def test_a_server_of_rewards_that_goes_away_stops_the_job_with_its_reason(model: Path, tmp_path: Path) -> None:
    with served(f"slow={TASKS}:score") as url:
        rewards = {"type": "http", "url": url, "retries": 1, "backoff_s": 0.1}
        train = {"pool": "cpu", "steps": 1000, "lr": 1e-3}  # it does not end before the server does
        raw = job(model, rewards=rewards, train=train, limits={"backoff_s": 0.1, "task_probe_s": 1.0})
        with running(tmp_path, raw) as run:
            run.step(1)
            os.kill(int(_listener(url)), signal.SIGKILL)
            assert run.wait() == 1, run.said
            assert run.summary()["failures"]["reward"]["count"] > 0
            assert url in str(run.summary()["failures"]["reward"]["reasons"])
            run.nothing_remains()


def _listener(url: str) -> str:
    port = url.rpartition(":")[2]
    found = [
        folder.name
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and f"--port\0{port}".encode() in _command(folder)
    ]
    return found[0]


def _command(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""


def evaluation(model: Path, tmp_path: Path, **changes: Any) -> "subprocess.Popen[bytes]":
    raw = job(model, evaluation={"episodes": 6, "concurrency": 3, "greedy": True}, **changes)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    return rollart("eval", str(tmp_path / "job.yaml"), "--model", str(model), "--out", str(tmp_path / "run"), "--json")


@pytest.mark.slow
def test_a_model_is_evaluated_as_it_is(model: Path, tmp_path: Path) -> None:
    said, errors = (process := evaluation(model, tmp_path)).communicate(timeout=SOON_S)
    assert process.returncode == 0, errors.decode()
    plays = json.loads(said)["tasks"]["slow"]
    assert set(plays) == {"sampled", "greedy"}
    for row in plays.values():
        assert (row["episodes"], row["scored"], row["versions"]) == (6, 6, [0, 0])
    assert not [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, schema.Batch)]


@pytest.mark.slow
def test_ctrl_c_stops_an_evaluation_at_once(model: Path, tmp_path: Path) -> None:
    """Its environments would take minutes."""
    latency = {"kind": "normal", "mean": 60.0, "sigma": 0.0}
    tasks = [{"name": "slow", "use": TASKS, "group_size": 4, "max_turns": 3, "max_tokens": 4, "latency": latency}]
    process = evaluation(model, tmp_path, tasks=tasks)
    path = tmp_path / "run" / "events.jsonl"
    deadline_s = time.monotonic() + SOON_S
    try:
        while not path.exists() or b'"e":"start"' not in path.read_bytes():
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped by the user" in errors.decode()

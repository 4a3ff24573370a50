"""Real jobs whose rewards come from a real server that is killed for good, killed and started again, or fails often."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollart.events import schema
from rollart.rewards.http import unreachable
from rollart.rewards.letters import FILE, read_letters
from tests.real.harness import ROOT, SOON_S, TASKS, Run, job, running

FUNCTIONS = Path(__file__).with_name("reward_functions.py")
STEPS = 6
GOOD = ("done", "truncated")


def a_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """`rollart reward serve`, as a user starts it."""

    function: str
    port: int = field(default_factory=a_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "rollart.cli", "reward", "serve", self.function, "--port", str(self.port)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline_s = time.monotonic() + SOON_S
        while (why := unreachable(self.url)) is not None:
            assert self.process.poll() is None, f"reward serve ended: {self.process.returncode}"
            assert time.monotonic() < deadline_s, why
            time.sleep(0.1)

    def kill(self) -> None:
        """kill -9, of all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(SOON_S)
            self.process = None


@contextmanager
def serving(function: str) -> Iterator[Server]:
    server = Server(function)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def scored_by(server: Server, model: Path, **rewards: Any) -> dict[str, Any]:
    settings = {"type": "http", "url": server.url, "retries": 1, "backoff_s": 0.1, "timeout_s": 30, **rewards}
    return job(model, rewards=settings, train={"pool": "cpu", "steps": STEPS, "lr": 1e-3})


def scored_once(run: Run) -> dict[str, schema.Reward]:
    """By attempt: each that ended well has one score, which is the one it ended with."""
    events = run.events()
    rewards = {event.id: event for event in events if isinstance(event, schema.Reward)}
    times = Counter(event.id for event in events if isinstance(event, schema.Reward))
    assert set(times.values()) == {1}, "scored twice"
    ended = {event.id: event for event in events if isinstance(event, schema.End)}
    for attempt, end in ended.items():
        if end.status in GOOD:
            assert end.reward == rewards[attempt].value, attempt
    lost = [end.reason for end in ended.values() if end.stage == "reward"]
    assert lost == [], "an attempt failed for want of a score"
    return rewards


def outages(run: Run) -> list[schema.RewardOutage]:
    return [event for event in run.events() if isinstance(event, schema.RewardOutage)]


@pytest.mark.slow
def test_local_workers_score_when_the_server_never_comes_back(model: Path, tmp_path: Path) -> None:
    with serving(f"{FUNCTIONS}:slowly") as server:
        raw = scored_by(server, model, on_outage="local", workers=1)
        with running(tmp_path, raw) as run:
            run.step(1)
            server.kill()
            assert run.wait() == 0, run.said
            told = run.ended_well(STEPS)["reward"]
            rewards = scored_once(run)
            down = next(event.n for event in run.events() if isinstance(event, schema.RewardOutage))
            assert "local workers score meanwhile" in run.said
    assert (told["outages"], told["given_up"], told["dead_letters"]) == (1, 0, 0)
    assert told["calls"] == len(rewards)
    local = [reward for reward in rewards.values() if reward.local]
    assert told["local"] == len(local) > 0
    assert len(local) < len(rewards), "the server scored too"
    assert all(reward.local for reward in rewards.values() if reward.n > down), "nobody else was there"
    assert not (run.out / FILE).exists()


@pytest.mark.slow
def test_trajectories_wait_until_the_server_is_back(model: Path, tmp_path: Path) -> None:
    with serving(f"{FUNCTIONS}:slowly") as server:
        raw = scored_by(server, model, on_outage="wait", outage_s=SOON_S)
        with running(tmp_path, raw) as run:
            run.step(1)
            server.kill()
            run.until(lambda _: "trouble: rewards: nobody answers, on_outage is wait" in run.said, "word of it")
            time.sleep(5.0)
            server.start()
            assert run.wait() == 0, run.said
            told = run.ended_well(STEPS)["reward"]
            rewards = scored_once(run)
            down = outages(run)
            back = [event for event in run.events() if isinstance(event, schema.RewardBack)]
    assert (told["outages"], told["given_up"], told["dead_letters"], told["local"]) == (1, 0, 0, 0)
    assert told["calls"] == len(rewards)
    assert told["outage_s"] > 5.0
    assert [event.policy for event in down] == ["wait"]
    assert not [reward for reward in rewards.values() if down[0].n < reward.n < back[0].n]
    assert not (run.out / FILE).exists()


@pytest.mark.slow
def test_what_fails_for_good_is_kept_and_a_healthy_server_scores_it(model: Path, tmp_path: Path) -> None:
    with serving(f"{FUNCTIONS}:moody") as server:
        with running(tmp_path, scored_by(server, model, on_outage="fail")) as run:
            assert run.wait() == 0, run.said
            told = run.ended_well(STEPS)["reward"]
            gone = [event for event in run.events() if isinstance(event, schema.RewardGivenUp)]
            failed = {e.id for e in run.events() if isinstance(e, schema.End) and e.stage == "reward"}
        code, still = replayed(run)
        assert code == 1
        assert {one["earned"] for one in still} == {None}
    letters = {letter.episode.id: letter for letter in read_letters(run.out / FILE)}
    assert told["given_up"] == told["dead_letters"] == len(gone) == len(letters) > 0
    assert told["outages"] == 0, "an error of the function is no outage"
    assert failed == set(letters) == {event.id for event in gone}
    for letter in letters.values():
        assert letter.tries == (2 if "table of answers" in letter.reason else 1), letter.reason
    assert len({letter.tries for letter in letters.values()}) == 2, "of both kinds"
    before = (run.out / FILE).read_bytes()
    with serving(f"{TASKS}:score") as healthy:
        code, scored = replayed(run, "--url", healthy.url)
    assert code == 0
    earned = {one["id"]: one["earned"] for one in scored}
    assert earned == {name: sum(turn.reward for turn in letter.episode.turns) for name, letter in letters.items()}
    assert (run.out / FILE).read_bytes() == before


def replayed(run: Run, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """`rollart reward replay`: its exit code, and what it says of each letter."""
    done = subprocess.run(
        [sys.executable, "-m", "rollart.cli", "reward", "replay", str(run.out), *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        timeout=SOON_S,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)

"""One job over two clusters that share nothing but a slow link: network, mount and process namespaces on this machine.

Ray's head, the coordinator and the trainer are on one side; engines and environments on the other, where model and
tokenizer are not. The link is taken away for 20 s in the middle, and once more during a push.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import orjson
import pytest

from benchmarks.two_clusters import STORES, Run, job_for, play, two_clusters, weights_for
from benchmarks.two_sides import OWN, REPOSITORY, TwoSides, missing
from rollart.events import schema

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]

RATE_MBIT = 80.0
MODEL_MB = 60
STEPS = 8
CUT_S = 20.0
NEEDS = {"mooncake": "mooncake"}
"""A store's package."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", sorted(STORES))
def test_a_job_runs_over_both_and_outlives_cuts_of_the_link(tmp_path: Path, store: str) -> None:
    if store in NEEDS and find_spec(NEEDS[store]) is None:
        pytest.skip(f"needs {NEEDS[store]}")
    with two_clusters(tmp_path / "two", RATE_MBIT, MODEL_MB * 1_000_000) as sides:
        with pytest.raises(RuntimeError):
            sides.rollout.run(["ls", str(OWN / "model")], 30)
        run = Run(sides, job_for(weights_for(sides, store, MODEL_MB * 1_000_000), STEPS), "run")
        found = play(run, STEPS, CUT_S)
        events = run.events()
    assert (found["state"], found["steps"], found["cuts"]) == ("finished", STEPS, 2)
    assert found["groups"] == {"lost": 0, "trained_twice": 0}
    assert (found["engines_lost"], found["trainers_lost"]) == (0, 0), "a cut is no lost machine"
    assert found["max_steps"] <= 3, "staleness 2 and one step"
    placed = [orjson.loads(line) for line in (run.out / "logs" / "placed.jsonl").read_bytes().splitlines()]
    hosts = {row["worker"]: row["host"] for row in placed}
    assert hosts == {"rollout-0": "rollout", "environments-env-0": "rollout", "trainer": "trainer"}
    pushes = [event for event in events if isinstance(event, schema.Push)]
    staged = {event.version: event.t for event in events if isinstance(event, schema.Staged)}
    took_s = [staged[event.version] - event.t for event in pushes if event.version in staged]
    alone_s = MODEL_MB * 8 / RATE_MBIT
    assert min(took_s) > 0.9 * alone_s, "every version crossed the link"
    assert max(took_s) > alone_s + 0.8 * CUT_S, "one was cut off on its way"
    assert found["weights"]["exposed_s"] < 0.2 * found["weights"]["arrival_s"], "nobody stood still for the link"


def sides_of(process: int) -> list[int]:
    """All processes below this one."""
    below = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [one for child in below for one in (int(child), *sides_of(int(child)))]


@pytest.mark.timeout(60)
def test_nothing_is_left_when_the_process_that_made_both_sides_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from benchmarks.two_sides import TwoSides\n"
        "with TwoSides(Path(sys.argv[1]), 100) as sides:\n"
        "    sides.rollout.start(['sleep', '600'], Path(sys.argv[1]) / 'log')\n"
        "    print('ready', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "two")], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline().strip() == "ready"
        there = sides_of(maker.pid)
        assert len(there) >= 4
        os.kill(maker.pid, signal.SIGKILL)
    until_s = time.monotonic() + 10
    while left := [one for one in there if Path(f"/proc/{one}").exists()]:
        assert time.monotonic() < until_s, f"still there: {left}"
        time.sleep(0.05)
    assert "wan" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.timeout(60)
def test_the_sides_share_no_folder_and_the_link_has_its_rate(tmp_path: Path) -> None:
    listen = "import socket; s = socket.create_server(('10.77.0.2', 7000)); c, _ = s.accept(); "
    listen += "n = 0\nwhile d := c.recv(1 << 20): n += len(d)\nprint(n)"
    send = "import socket, time; s = socket.create_connection(('10.77.0.2', 7000)); "
    send += "t = time.monotonic(); s.sendall(bytes(4_000_000)); s.shutdown(1); s.recv(1); print(time.monotonic() - t)"
    with TwoSides(tmp_path / "two", 40.0) as sides:
        sides.trainer.run(["sh", "-c", f"echo x > {OWN}/a; echo x > /tmp/a; echo x > /dev/shm/a"], 10)
        seen = sides.rollout.run(["sh", "-c", f"ls -A {OWN} /tmp /dev/shm"], 10).split()
        code = Path(__file__).parts  # each side has the checkout, and so the folders above it
        code_below_tmp = list(code[2:3]) if code[1] == "tmp" else []
        assert sorted(seen) == sorted([f"{OWN}:", "/dev/shm:", "/tmp:", *code_below_tmp]), "each is empty there"
        log = tmp_path / "two" / "log"
        listening = sides.rollout.start([sys.executable, "-c", listen], log)
        time.sleep(1.0)
        took_s = float(sides.trainer.run([sys.executable, "-c", send], 30))
        assert listening.wait(30) == 0
        assert log.read_text().strip() == "4000000"
        assert took_s == pytest.approx(4_000_000 * 8 / 40e6, rel=0.5)
        assert sides.sent_bytes() > 4_000_000

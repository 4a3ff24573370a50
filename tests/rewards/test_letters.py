"""Dead letters: what failed for good is in the run directory, and can be asked about again."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollart.cli import main
from rollart.config.load import build_job
from rollart.config.settings import RewardSettings
from rollart.errors import JobError, RewardError
from rollart.launch.replay import replay
from rollart.launch.rundir import make_run_dir
from rollart.rewards.http import HttpRewards
from rollart.rewards.letters import FILE, LetterFile, read_letters
from tests.contracts.reward_functions import decode, numbered

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a secret of the tests"
TASK = '''
from pathlib import Path
from rollart.tasks.api import Environment, TaskSet

class Tasks(TaskSet):
    def draw(self, rng):
        return {}

def score(episode):
    """Broken while a file says so."""
    if (Path(__file__).parent / "broken").exists():
        raise RuntimeError("the table of answers is not there")
    return {"sum": episode.reward, "more": 0.5}
'''


def a_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    (tmp_path / "broken").touch()
    return path


@pytest.fixture
def url(task: Path) -> Iterator[str]:
    """Its reward function, served by `rollart reward serve`."""
    port = a_port()
    command = f"from rollart.rewards.serve import serve; serve('{task}:score', port={port})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROLLART_REWARD_TOKEN": TOKEN}
    server = subprocess.Popen([sys.executable, "-c", command], env=environment, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            httpx.get(address, trust_env=False)
            break
        except httpx.TransportError:
            assert server.poll() is None
            asyncio.run(asyncio.sleep(0.1))
    yield address
    server.terminate()
    server.wait()


def a_run(out: Path, task: Path, **rewards: Any) -> Path:
    """The directory of a run that has this task."""
    pools = [{"name": "p", "engines": {}, "slots": 4}]
    settings = {"retries": 1, "backoff_s": 0.0, **rewards}
    job = {"name": "run", "tasks": [{"name": "strange", "use": str(task)}], "pools": pools, "rewards": settings}
    make_run_dir(build_job(job), out)
    return out


def test_a_function_that_fails_and_then_works(
    url: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run", task, type="http", url=url)
    monkeypatch.setenv("ROLLART_REWARD_TOKEN", TOKEN)
    file = LetterFile(run / FILE, decode)

    async def fails() -> None:
        rewards = HttpRewards(RewardSettings(type="http", url=url), decode, TOKEN)
        for number in range(3):
            with pytest.raises(RewardError) as caught:
                await rewards.score(numbered(number))
            assert file.keep(numbered(number), reward="", reason=str(caught.value), tries=2)
        await rewards.close()

    asyncio.run(fails())
    file.close()
    text = (run / FILE).read_text()
    assert TOKEN not in text
    assert "Bearer" not in text

    assert main(["reward", "replay", str(run)]) == 1
    said = capsys.readouterr().out
    assert "still fails" in said
    assert "the table of answers is not there" in said
    assert "3 dead letters, 0 scored now, 3 still fail" in said

    (task.parent / "broken").unlink()
    assert main(["reward", "replay", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["id"], one["earned"]) for one in told] == [("g0.0.0", 0.5), ("g1.0.0", 1.5), ("g2.0.0", 2.5)]
    assert {"the table of answers" in one["failed"] for one in told} == {True}
    assert told[0]["parts"] == {"sum": 0.0, "more": 0.5}
    assert (run / FILE).read_text() == text, "nothing of the run is changed"


def test_functions_here_and_at_another_address(task: Path, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{a_port()}"
    run = a_run(tmp_path / "run", task, type="http", url=nobody)
    file = LetterFile(run / FILE, decode)
    file.keep(numbered(1), reward="", reason="nobody there", tries=4)
    file.close()
    assert replay(run)[0].fails.startswith(f"{nobody}: ConnectError")
    assert "task.py:score" in replay(run, local=True)[0].fails
    (task.parent / "broken").unlink()
    [told] = replay(run, local=True)
    assert (told.earned, told.failed, told.fails) == (1.5, "nobody there", "")
    assert main(["reward", "replay", str(run), "--local", "--url", nobody]) == 2


def test_a_judge_is_asked_at_an_endpoint(task: Path, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{a_port()}/v1"
    run = a_run(tmp_path / "run", task, type="judge", url=nobody, model="judge", rubric="short", retries=0)
    file = LetterFile(run / FILE, decode)
    file.keep(numbered(1), reward="", reason="nobody there", tries=1)
    file.close()
    assert "ConnectError" in replay(run)[0].fails
    with pytest.raises(JobError, match="a judge is no function"):
        replay(run, local=True)


def test_a_run_without_any(task: Path, tmp_path: Path) -> None:
    assert replay(a_run(tmp_path / "run", task)) == []
    with pytest.raises(JobError, match="give a run directory"):
        replay(tmp_path / "nothing")


def test_the_file_is_bounded_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / FILE
    file = LetterFile(path, decode, max_bytes=3000)
    kept = [file.keep(numbered(number), reward="far", reason="no", tries=1) for number in range(20)]
    assert kept[0] is True
    assert kept[-1] is False
    assert path.stat().st_size <= 3000
    file.close()
    again = LetterFile(path, decode, max_bytes=3000)
    assert not again.keep(numbered(30), reward="far", reason="no", tries=1), "what was written before counts"
    again.close()
    with path.open("ab") as end:
        end.write(b'{"reward": "", "rea')
    letters = list(read_letters(path))
    assert [letter.episode.id for letter in letters] == [f"g{number}.0.0" for number in range(sum(kept))]
    assert {(letter.reward, letter.reason, letter.tries) for letter in letters} == {("far", "no", 1)}


def test_without_a_letter_there_is_no_file(tmp_path: Path) -> None:
    LetterFile(tmp_path / FILE, decode).close()
    assert not (tmp_path / FILE).exists()

"""A server below us: it is waited for, its last words are heard, and it never outlives whoever started it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.engines.process import ServerProcess, free_port
from rollart.errors import EngineError
from rollart.workers import guard

SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(str(child.pid))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Answers, and has a child of its own, as vLLM has."""

PARENT = """
import asyncio, sys
from pathlib import Path
from rollart.engines.process import ServerProcess
port, folder = sys.argv[1], Path(sys.argv[2])
async def main():
    process = ServerProcess([sys.executable, "-c", sys.argv[3], port, str(folder / "child")], {}, folder / "log")
    await process.ready(f"http://127.0.0.1:{port}/", 60, "token")
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def gone(pid: int, within_s: float = 30.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_it_is_waited_for_and_ended_with_all_below_it(tmp_path: Path) -> None:
    async def work() -> None:
        port = free_port()
        process = ServerProcess(
            [sys.executable, "-c", SERVER, str(port), str(tmp_path / "child")], {}, tmp_path / "logs" / "server.log"
        )
        await process.ready(f"http://127.0.0.1:{port}/", 60, "token")
        assert not process.ended
        await process.stop()
        assert process.ended

    asyncio.run(work())
    assert gone(int((tmp_path / "child").read_text()))


def kill_group(pid: int) -> None:
    """As `LocalCluster` does it."""
    os.killpg(pid, signal.SIGKILL)


def kill_with_children(pid: int) -> None:
    """As a Ray worker ends: its direct children are killed first."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kill", [lambda pid: os.kill(pid, signal.SIGKILL), kill_group, kill_with_children])
def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path, kill: Callable[[int], None]) -> None:
    """However the parent is killed: alone, with its whole process group, or after its children."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(free_port()), str(tmp_path), SERVER],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n", (tmp_path / "log").read_text()
        kill(parent.pid)
        parent.wait()
    assert gone(int((tmp_path / "child").read_text()))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    async def work() -> None:
        process = ServerProcess([sys.executable, "-c", "raise SystemExit('no such model')"], {}, tmp_path / "log")
        with pytest.raises(EngineError, match=r"ended before it answered(.|\n)*no such model"):
            await process.ready("http://127.0.0.1:9/", 60, "token")
        await process.stop()
        absent = ServerProcess(["/no/such/python"], {}, tmp_path / "other")
        with pytest.raises(EngineError, match=r"ended before it answered(.|\n)*/no/such/python"):
            await absent.ready("http://127.0.0.1:9/", 60, "token")
        await absent.stop()
        silent = ServerProcess([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "third")
        with pytest.raises(EngineError, match=r"did not answer within 0.5 s"):
            await silent.ready("http://127.0.0.1:9/", 0.5, "token")
        await silent.stop()

    asyncio.run(work())


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import time; time.sleep(600)", 0)])
def test_the_guards_exit_status_is_the_servers_or_that_it_was_ended_as_asked(code: str, status: int) -> None:
    life, held = os.pipe()
    command = [sys.executable, guard.__file__, str(life), sys.executable, "-c", code]
    with subprocess.Popen(command, pass_fds=(life,)) as process:
        os.close(life)
        if status == 0:
            os.close(held)
        assert process.wait(30) == status
    if status:
        os.close(held)


def test_our_packages_do_not_get_before_those_of_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    code = "import os; raise SystemExit(repr(os.environ.get('PYTHONPATH')) + os.environ['A'])"

    async def work() -> None:
        process = ServerProcess([sys.executable, "-c", code], {"A": "b"}, tmp_path / "log")
        with pytest.raises(EngineError, match="Noneb"):
            await process.ready("http://127.0.0.1:9/", 60, "token")
        await process.stop()

    asyncio.run(work())

"""Environments that try to get out of their sandbox, or to harm who is outside: the payload's `do` says how.

Each step tries one thing and says what came of it; `out` in the text means that it worked. Bombs are bounded: where
the limit did not hold, they stop by themselves.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Observation, Task

MOST_FORKS = 300
MOST_MIB = 1500


def network(payload: Mapping[str, Any]) -> str:
    """Any address beyond this machine, by number: names need a network already."""
    with socket.socket() as line:
        line.settimeout(2)
        line.connect(("192.0.2.1", 80))
    return "out"


def lookup(payload: Mapping[str, Any]) -> str:
    return f"out {socket.gethostbyname('pypi.org')}"


def port(payload: Mapping[str, Any]) -> str:
    """Somebody listens on the loopback of the machine."""
    with socket.create_connection(("127.0.0.1", payload["port"]), timeout=2):
        return "out"


def unix(payload: Mapping[str, Any]) -> str:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(payload["socket"])
    return "out"


def abstract(payload: Mapping[str, Any]) -> str:
    """A socket that has a name and no file, as D-Bus and X have them."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"\0{payload['abstract']}")
    return "out"


def write(payload: Mapping[str, Any]) -> str:
    """Anywhere but in /tmp, which is its own."""
    for place in (*payload["places"], "/", "/usr", "/etc", "/dev", sys.prefix, str(Path(__file__).parent)):
        try:
            Path(place, "escaped").write_text("x")
        except OSError:
            continue
        return f"out in {place}"
    Path("/tmp/mine").write_text("x")
    return "in"


def read(payload: Mapping[str, Any]) -> str:
    """The job's files and the run directory."""
    found = [place for place in payload["places"] if Path(place).exists()]
    found += [
        name for name in ("/etc/shadow", "/etc/passwd", "/root/.ssh", "/home", "/var", "/sys") if Path(name).exists()
    ]
    return f"out {found}" if found else "in"


def secrets(payload: Mapping[str, Any]) -> str:
    """Variables of the job, of this process or of any other."""
    texts = ["\n".join(f"{name}={value}" for name, value in os.environ.items())]
    for folder in Path("/proc").glob("[0-9]*"):
        for file in ("environ", "cmdline"):
            try:
                texts.append((folder / file).read_text(errors="replace"))
            except OSError:
                continue
    return "out" if any(payload["secret"] in text for text in texts) else "in"


def kill(payload: Mapping[str, Any]) -> str:
    """Whoever started us."""
    os.kill(payload["pid"], signal.SIGTERM)
    return "out"


def disk(payload: Mapping[str, Any]) -> str:
    """Fill the place that it has."""
    written = 0
    try:
        for number in range(payload["mib"]):
            Path(f"/tmp/{number}").write_bytes(b"x" * 2**20)
            written += 1
    except OSError:
        for number in range(written + 1):
            Path(f"/tmp/{number}").unlink(missing_ok=True)
        return "in"
    return f"out {written} MiB"


def large_file(payload: Mapping[str, Any]) -> str:
    with open("/tmp/large", "wb") as file:
        for _ in range(payload["mib"]):
            file.write(b"x" * 2**20)
    return "out"


def fork_bomb(payload: Mapping[str, Any]) -> str:
    children: list[int] = []
    try:
        while len(children) < payload.get("forks", MOST_FORKS):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
        return f"out {len(children)} processes"
    except OSError:
        return f"in {len(children)} processes"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def memory_bomb(payload: Mapping[str, Any]) -> str:
    held = []
    for _ in range(MOST_MIB):
        held.append(bytearray(os.urandom(1024) * 1024))
    return f"out {len(held)} MiB"


def shared_memory_bomb(payload: Mapping[str, Any]) -> str:
    """Spread over processes, each of which is modest."""
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            held = [bytearray(os.urandom(1024) * 1024) for _ in range(MOST_MIB // 8)]
            os.kill(os.getpid(), signal.SIGSTOP if held else signal.SIGKILL)
            os._exit(0)
        children.append(child)
    ends = [os.waitpid(child, os.WUNTRACED)[1] for child in children]
    alive = sum(os.WIFSTOPPED(end) for end in ends)
    for child in children:
        os.kill(child, signal.SIGKILL)
    return f"out {MOST_MIB} MiB" if alive == len(children) else f"in {alive} of {len(children)} processes lived"


def flood(payload: Mapping[str, Any]) -> str:
    """An answer that no one could hold."""
    return "out" * 2**20


def log_flood(payload: Mapping[str, Any]) -> str:
    for _ in range(payload["mib"]):
        sys.stderr.write("x" * 2**20)
    return "in"


def spin(payload: Mapping[str, Any]) -> str:
    """More CPU than it has."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        pass
    return "out"


def outlive(payload: Mapping[str, Any]) -> str:
    """A process in a session of its own, that nobody waits for."""
    child = subprocess.Popen(["sleep", payload["seconds"]], start_new_session=True)
    return f"started {child.pid}"


ATTEMPTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    function.__name__: function
    for function in (
        *(network, lookup, port, unix, abstract, write, read, secrets, kill, disk, large_file, fork_bomb),
        *(memory_bomb, shared_memory_bomb, flood, log_flood, spin, outlive),
    )
}


class Escape(Environment):
    """Says what came of each attempt; an action names it, or the payload does."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.payload = payload

    def reset(self) -> str:
        return "try"

    def step(self, action: str) -> Observation:
        try:
            said = ATTEMPTS[self.payload.get("do", action)](self.payload)
        except (OSError, MemoryError) as error:
            said = f"in: {type(error).__name__}: {error}"
        return observe(said, reward=float(said.startswith("out")), done="do" in self.payload)


class EscapeTasks(TaskSet):
    """In a job, one after another."""

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {
            "do": rng.choice([name for name in ATTEMPTS if name != "shared_memory_bomb"]),
            "port": 1,
            "socket": "/tmp/none",
            "abstract": "none",
            "places": [str(Path(__file__).parents[2] / "docs"), "/root/.bashrc"],
            "secret": "sesame",
            "pid": 1,
            "mib": 64,
            "seconds": "7.25",
            "salt": rng.random(),
        }

    def environment(self, task: Task) -> Environment:
        return Escape(task.payload)

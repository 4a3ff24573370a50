"""Runs `rollart train` as a user does, as a process of its own, and finds everything that belongs to it.

All processes of a run carry a marker in their environment, so that none can hide: not in another session, not as a
child of init.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event
from rollart.store.host import LINGER_S

ROOT = Path(__file__).resolve().parents[2]
TASKS = str(Path(__file__).with_name("slow_tasks.py"))
MARKER = "PYTHON_ROLLART_TEST_RUN"
"""Marks every process of a run: a name that environments and rewards are given too."""
SOON_S = 150.0
"""Generous: the machine may be busy with other things."""


def job(model: Path, **changes: Any) -> dict[str, Any]:
    """A very small job; `name` is unique, so that its shared memory can be told from others'."""
    raw: dict[str, Any] = {
        "name": f"test-{uuid.uuid4().hex[:12]}",
        "model": {"path": str(model), "context_tokens": 128},
        "tasks": [{"name": "slow", "use": TASKS, "group_size": 4, "max_turns": 3, "max_tokens": 4}],
        "rollout": {"groups_per_step": 4, "zero_variance": "skip"},
        "pools": [
            {"name": "cpu", "engines": {"count": 1, "max_batch": 32, "kv_tokens": 8192}},
            {"name": "environments", "slots": 3, "isolation": "process"},
        ],
        "rewards": {"workers": 1, "backoff_s": 0.1},
        "limits": {"backoff_s": 0.1},
        "train": {"pool": "cpu", "steps": 8, "lr": 1.0e-3},
        "weights": {"bucket_mb": 1},
        "checkpoint": {"every": 3},
    }
    return {**raw, **changes}


def _die_with_the_tests() -> None:
    """In the child: tests that are themselves killed leave no job behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass
class Run:
    """One `rollart train`, and what was made of its run directory so far."""

    folder: Path
    name: str
    module: str = "rollart.cli"
    """What is run: the command line, or a test's wrapper around it."""
    within: tuple[str, ...] = ()
    """A command that becomes the one that follows it."""
    out: Path = field(init=False)
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: "subprocess.Popen[bytes] | None" = None
    """The one started last."""
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out = self.folder / "run"

    def start(self, *arguments: str) -> None:
        environment = {**os.environ, MARKER: self.marker, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(self.folder / "said", "ab") as said:
            self.process = subprocess.Popen(
                [*self.within, sys.executable, "-m", self.module, "train", *arguments],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=_die_with_the_tests,
            )
        self.started.append(self.process)

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def events(self) -> list[Event]:
        path = self.out / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def until(self, true: Callable[[list[Event]], bool], what: str, within_s: float = SOON_S) -> None:
        """Wait for something in the events. They reach the file at least once a step."""
        deadline_s = time.monotonic() + within_s
        while not true(self.events()):
            assert self.process is not None
            assert self.process.poll() is None, f"ended before {what}: {self.said}"
            assert time.monotonic() < deadline_s, f"no {what} within {within_s} s: {self.said}"
            time.sleep(0.05)

    def step(self, number: int, within_s: float = SOON_S) -> None:
        self.until(
            lambda events: any(isinstance(e, schema.Batch) and e.step >= number for e in events),
            f"batch {number}",
            within_s,
        )

    def members(self) -> dict[int, str]:
        """Every living process of the run, and its role: `coordinator`, `cpu-0`, `trainer`, `env-2`, `reward-0`."""
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                if f"{MARKER}={self.marker}".encode() not in (folder / "environ").read_bytes():
                    continue
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
                found[int(folder.name)] = Path(os.readlink(folder / "fd" / "2")).stem
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return {pid: "coordinator" if role == "said" else role for pid, role in found.items()}

    def kill(self, role: str) -> int:
        """kill -9 whoever has this role, the first that was started; waits until someone has."""
        deadline_s = time.monotonic() + SOON_S
        while True:
            for pid, known in sorted(self.members().items()):  # one that still starts is not a worker yet
                if known.startswith(role):
                    os.kill(pid, signal.SIGKILL)
                    return pid
            assert time.monotonic() < deadline_s, f"nobody is {role}: {self.said}"
            time.sleep(0.02)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(SOON_S)

    def shared_memory(self) -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"rollart-{self.name}*")]

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return summary

    def nobody_is_left(self) -> None:
        """A store's process on a host that was not told of the end, as its source was gone, stays for LINGER_S."""
        deadline_s = time.monotonic() + LINGER_S + 10
        while self.members():
            assert time.monotonic() < deadline_s, f"still there: {self.members()}"
            time.sleep(0.02)

    def ended_well(self, steps: int) -> dict[str, Any]:
        """The job is finished, nothing is lost, the audit is content, and nothing remains of it."""
        summary = self.summary()
        assert (summary["state"], summary["steps"]) == ("finished", steps), self.said
        assert (summary["groups"]["lost"], summary["groups"]["trained_twice"]) == (0, 0)
        assert [event.n for event in self.events()] == list(range(len(self.events())))
        rows = [json.loads(line)["step"] for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        assert rows == list(range(steps)), "one row a step, none twice, none lost"
        audit = subprocess.run(
            [sys.executable, "-m", "rollart.cli", "audit", str(self.out)], cwd=ROOT, capture_output=True, timeout=SOON_S
        )
        assert audit.returncode == 0, audit.stdout.decode()
        self.nothing_remains()
        return summary

    def nothing_remains(self) -> None:
        self.nobody_is_left()
        assert self.shared_memory() == []


@contextmanager
def running(
    folder: Path, raw: dict[str, Any], module: str = "rollart.cli", within: tuple[str, ...] = ()
) -> Iterator[Run]:
    """A started job; whatever happens, nothing of it outlives the test."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(raw))
    run = Run(folder, raw["name"], module, within)
    run.start(str(path), "--out", str(run.out))
    try:
        yield run
    finally:
        for pid in run.members():
            os.kill(pid, signal.SIGKILL)
        for process in run.started:  # one that nobody waits for is a warning, and an error, in a later test
            process.wait(SOON_S)
        for name in run.shared_memory():
            subprocess.run(["rm", "-rf", f"/dev/shm/{name}"], check=True)

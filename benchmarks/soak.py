"""Half an hour of a job in which everything goes wrong, here: it must finish, learn, and not grow.

    python -m benchmarks.soak --json

The quickstart's tasks and model, in processes, on 32 slots. Environments crash, hang, return NaN, pages of 100,000
characters and roles that the chat template refuses, each in 5 % of the attempts (`soak_tasks.py`). Besides:

- the reward server is killed every three minutes, and started again after five seconds, as a platform would;
- the engine, the trainer and an environment worker are killed once each, with `kill -9`;
- the run directory is a small file system of its own, and is filled to the last byte for a minute.

Kills of workers and the full disk come before the middle, so that the second half shows whether memory stays flat;
environments and the reward server go on failing. Needs root, for the
mount. Exit code 1 where anything that must hold does not.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "benchmarks" / "soak.yaml"
PORT = 8765
LOOK_S = 5.0
"""Between two looks at the processes."""
SERVER_DOWN_S = 5.0
FULL_S = 60.0
"""How long the disk is full, at least."""
GROWTH = 1.05
"""Flat: the median of the last quarter is at most this times that of the quarter before, ..."""
GROWTH_MB = 8.0
"""... or larger by less than this."""
LEARNT = 0.3
"""What held-out success must gain on each task."""


@dataclass
class Soak:
    """One run, and what is done to it."""

    minutes: float
    out: Path
    disk: Path
    train: "subprocess.Popen[bytes]"
    server: "subprocess.Popen[bytes] | None" = None
    server_kills: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    disk_full_s: float = 0.0
    full_since_s: float | None = None
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Role -> (seconds since the start, MB); workers of environments as one role, the largest of them."""

    def drive(self) -> None:
        """Do to the job what is due, until it ends. The schedule begins with the first step."""
        metrics = self.out / "metrics.jsonl"
        while self.train.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(1.0)
        began_s = time.monotonic()
        minute_s = self.minutes * 60 / 30  # the schedule is written for half an hour
        due: list[tuple[float, Callable[[], None]]] = [
            (4 * minute_s, lambda: self.kill("cpu-0")),
            (7 * minute_s, lambda: self.kill("trainer")),
            (9 * minute_s, lambda: self.kill("env")),
            (11 * minute_s, self.fill),
        ]
        next_kill_s, server_back_s = 3 * minute_s, 0.0
        while self.train.poll() is None:
            now_s = time.monotonic() - began_s
            self.look(now_s)
            while due and due[0][0] <= now_s:
                due.pop(0)[1]()
            if self.full_since_s is not None and time.monotonic() - self.full_since_s >= FULL_S:
                self.free()
            if self.server is None and now_s >= server_back_s:
                self.server = reward_server()
            elif self.server is not None and now_s >= next_kill_s:
                self.server.kill()
                self.server.wait()
                self.server = None
                self.server_kills += 1
                next_kill_s, server_back_s = now_s + 3 * minute_s, now_s + SERVER_DOWN_S
            time.sleep(LOOK_S)
        self.seconds = time.monotonic() - began_s

    def members(self) -> dict[int, str]:
        """The job's processes and their roles: `coordinator`, `cpu-0`, `trainer`, `env-7`, by their log's name."""
        parents: dict[int, int] = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        found = {self.train.pid: "coordinator"}
        grown = True
        while grown:
            grown = False
            for pid, parent in parents.items():
                if parent in found and pid not in found:
                    with contextlib.suppress(OSError):
                        found[pid] = Path(os.readlink(f"/proc/{pid}/fd/2")).stem
                        grown = True
        return found

    def look(self, now_s: float) -> None:
        largest: dict[str, float] = {}
        for pid, role in self.members().items():
            with contextlib.suppress(OSError, StopIteration, ValueError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
                name = "environment worker" if role.startswith("env") else role
                largest[name] = max(largest.get(name, 0.0), kilobytes / 1024)
        for name, megabytes in largest.items():
            self.memory.setdefault(name, []).append((now_s, round(megabytes, 1)))

    def kill(self, role: str) -> None:
        for pid, known in self.members().items():
            if known.startswith(role):
                os.kill(pid, signal.SIGKILL)
                self.kills[role] = self.kills.get(role, 0) + 1
                say(f"killed {known}, pid {pid}")
                return

    def fill(self) -> None:
        """Take every byte of the run's file system."""
        with open(self.disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(1 << 16))
        self.full_since_s = time.monotonic()
        say(f"the disk is full: {os.statvfs(self.disk).f_bavail} blocks left")

    def free(self) -> None:
        assert self.full_since_s is not None
        (self.disk / "ballast").unlink()
        self.disk_full_s = time.monotonic() - self.full_since_s
        self.full_since_s = None
        say("the disk has room again")

    def report(self) -> dict[str, Any]:
        summary = json.loads((self.out / "summary.json").read_text())
        audit = subprocess.run([*ROLLART, "audit", str(self.out)], capture_output=True, text=True)
        memory = {role: self._quarters(series) for role, series in self.memory.items()}
        memory = {role: row for role, row in memory.items() if row}
        learnt = {task: row["after"] - row["before"] for task, row in summary["eval"].items()}
        wrong = [
            *([f"the job {summary['state']}: {summary['reason']}"] if summary["state"] != "finished" else []),
            *([f"rollart audit: {audit.stdout[-500:]}"] if audit.returncode else []),
            *[f"{task} gained {gain:.2f} only" for task, gain in learnt.items() if gain < LEARNT],
            *[
                f"{role} grew from {row['third_mb']} to {row['last_mb']} MB"
                for role, row in memory.items()
                if not row["flat"]
            ],
        ]
        return {
            "minutes": round(self.seconds / 60, 1),
            "state": summary["state"],
            "steps": summary["steps"],
            "eval": summary["eval"],
            "groups": summary["groups"],
            "trajectories": summary["trajectories"],
            "restarts": summary["restarts"],
            "failures": summary["failures"],
            "killed": {**self.kills, "reward server": self.server_kills},
            "disk_full_s": round(self.disk_full_s, 1),
            "memory_mb": memory,
            "warnings": summary["warnings"][:20],
            "wrong": wrong,
        }

    def _quarters(self, series: list[tuple[float, float]]) -> dict[str, Any]:
        """Memory in the third and in the last quarter of the run."""
        third = [size for at_s, size in series if self.seconds / 2 <= at_s < self.seconds * 3 / 4]
        last = [size for at_s, size in series if at_s >= self.seconds * 3 / 4]
        if not third or not last:
            return {}
        before, after = statistics.median(third), statistics.median(last)
        return {
            "third_mb": before,
            "last_mb": after,
            "largest_mb": max(size for _, size in series),
            "flat": after <= before * GROWTH or after - before < GROWTH_MB,
        }


ROLLART = (sys.executable, "-m", "rollart.cli")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="what the schedule of faults is stretched to")
    parser.add_argument(
        "--steps", type=int, default=720, help="train steps, with which the job ends: half an hour on two cores"
    )
    parser.add_argument("--disk-mb", type=int, default=2048, help="size of the run's own file system, in memory")
    parser.add_argument("--keep", type=Path, help="copy the run directory here")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("soak: needs root, to mount a small file system that it can fill; run it with sudo")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the file system goes whatever ends this
    model = ROOT / "models" / "tiny-0"
    if not model.exists():
        say("making the quickstart's model, about a minute")
        subprocess.run([*ROLLART, "model", "tiny", str(model)], check=True, capture_output=True, cwd=ROOT)
    with small_disk(args.disk_mb) as disk:
        soak = start(args.minutes, args.steps, model, disk)
        try:
            soak.drive()
        finally:
            for process in (soak.train, soak.server):
                if process is not None and process.poll() is None:
                    process.terminate()
                    process.wait(60)
        report = soak.report()
        if args.keep:
            subprocess.run(["cp", "-r", str(soak.out), str(args.keep)], check=True)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"{report['steps']} steps in {report['minutes']} minutes: {report['state']}")
        for role, row in report["memory_mb"].items():
            print(f"{role}: {row['third_mb']} MB in the third quarter, {row['last_mb']} MB in the last")
        print("; ".join(report["wrong"]) or "all that must hold held")
    return 1 if report["wrong"] else 0


def start(minutes: float, steps: int, model: Path, disk: Path) -> Soak:
    server = reward_server()
    wait_until_it_listens()
    out = disk / "run"
    command = [*ROLLART, "train", str(JOB), f"model.path={model}", f"train.steps={steps}", f"evaluation.every={steps}"]
    train = subprocess.Popen([*command, "--out", str(out)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    return Soak(minutes=minutes, out=out, disk=disk, train=train, server=server)


def reward_server() -> "subprocess.Popen[bytes]":
    tasks = ROOT / "benchmarks" / "soak_tasks.py"
    functions = f"lake={tasks}:lake,maths={tasks}:maths"
    return subprocess.Popen(
        [*ROLLART, "reward", "serve", functions, "--port", str(PORT)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_until_it_listens() -> None:
    """`rollart train` looks at the reward's address before it starts."""
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), timeout=1.0):
            return
        time.sleep(0.2)
    raise SystemExit("soak: the reward server did not start within a minute")


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rollart-soak-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

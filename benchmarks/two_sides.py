"""Two machines on this one, with a slow link between them: what `benchmarks.two_clusters` and its test stand on.

Each side is a set of namespaces of its own: network, processes, mounts, host name, shared memory. It sees the system
and this repository, and nothing that the other side writes: `/tmp` and `/dev/shm` are its own, and `OWN` is a folder of
its own. A pair of virtual Ethernet devices joins them, shaped by `tc tbf` in both directions; `cut` takes it down.
Everything is held by the first process of each side, which ends when this process does, however that ends: the kernel
then ends the others, and removes devices and mounts. Needs root, `ip`, `tc`, `unshare` and `nsenter`.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson

OWN = Path("/mnt/own")
"""Where each side sees the folder that is its own."""
REPOSITORY = Path(__file__).resolve().parent.parent
TRAINER, ROLLOUT = "10.77.0.1", "10.77.0.2"
PREPARE = """
set -e
hostname {name}
mount -t tmpfs -o size=1m none /mnt
mkdir {own} /mnt/repository
mount --bind {folder} {own}
mount --bind {repository} /mnt/repository
mount -t tmpfs -o size=4g none /dev/shm
mount -t tmpfs -o size=4g none /tmp
[ -d {repository} ] || {{ mkdir -p {repository} && mount --bind /mnt/repository {repository}; }}
[ -d {hidden} ] && mount -t tmpfs -o size=1m none {hidden}
ip link set lo up
echo ready
read wait
"""
"""Of a side's first process. It waits for the end of its input, which is this process's."""
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
DEVICE = "wan"
"""Each side's end of the link."""
NEEDS = ("ip", "tc", "unshare", "nsenter")


def missing() -> str:
    """What keeps this machine from being two; empty where nothing does."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [name for name in NEEDS if shutil.which(name) is None]
    return f"needs {', '.join(lacking)}" if lacking else ""


@dataclass(slots=True, kw_only=True)
class Side:
    """One of the two."""

    name: str
    address: str
    folder: Path
    """What it sees as `OWN`."""
    _first: "subprocess.Popen[str]" = field(init=False)
    _pid: int = field(init=False)
    _started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def open(self, hidden: Path) -> None:
        self.folder.mkdir(parents=True)
        script = PREPARE.format(name=self.name, own=OWN, folder=self.folder, hidden=hidden, repository=REPOSITORY)
        self._first = subprocess.Popen(
            [*UNSHARE, "bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        if self._first.stdout.readline().strip() != "ready":
            raise RuntimeError(f"side {self.name} could not be made")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        self._pid = int(children[0])

    def close(self) -> None:
        self._first.kill()
        self._first.wait()
        for process in self._started:  # the kernel has ended them with the first
            process.wait()
        for pipe in (self._first.stdin, self._first.stdout):
            assert pipe is not None
            pipe.close()

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._pid

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command, run there, in the repository's folder."""
        return ["nsenter", "-t", str(self._pid), "-m", "-n", "-p", "-u", "-i", f"--wd={REPOSITORY}", *command]

    def start(
        self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        with log.open("ab") as file:
            started = subprocess.Popen(
                self.enter(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment(variables),
            )
            self._started.append(started)
            return started

    def run(self, command: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None = None) -> str:
        """Its output. Raises RuntimeError with its end where it fails."""
        done = subprocess.run(
            self.enter(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self._environment(variables),
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def network(self, *command: str) -> None:
        """A command in its network alone."""
        subprocess.run(["nsenter", "-t", str(self._pid), "-n", *command], check=True, capture_output=True, timeout=30)

    def _environment(self, variables: Mapping[str, str] | None) -> dict[str, str]:
        """Without what a Ray of this process has set for itself (its token's mode, for one): a side has its own."""
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**own, "HOME": str(OWN / "home"), "PATH": path, **(variables or {})}


class TwoSides:
    """Both, and the link between them. A context manager."""

    def __init__(self, folder: Path, rate_mbit: float) -> None:
        """`folder`: becomes `trainer/` and `rollout/`."""
        self.folder = folder.resolve()
        self.rate_mbit = rate_mbit
        self.trainer = Side(name="trainer", address=TRAINER, folder=self.folder / "trainer")
        self.rollout = Side(name="rollout", address=ROLLOUT, folder=self.folder / "rollout")

    def __enter__(self) -> Self:
        opened: list[Side] = []
        try:
            for side in (self.trainer, self.rollout):
                side.open(self.folder)
                opened.append(side)
            self._link()
        except BaseException:
            for side in opened:
                side.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for side in (self.rollout, self.trainer):
            side.close()

    def _link(self) -> None:
        ends = [DEVICE, "netns", str(self.trainer.pid), "type", "veth", "peer", "name", DEVICE]
        subprocess.run(["ip", "link", "add", *ends, "netns", str(self.rollout.pid)], check=True, timeout=30)
        for side in (self.trainer, self.rollout):
            side.network("ip", "addr", "add", f"{side.address}/24", "dev", DEVICE)
            side.network("ip", "link", "set", DEVICE, "up")
        self.shape(self.rate_mbit)

    def shape(self, rate_mbit: float) -> None:
        """Let so much pass from now on, in each direction."""
        self.rate_mbit = rate_mbit
        shape = ["rate", f"{rate_mbit:g}mbit", "burst", "256k", "latency", "50ms"]
        for side in (self.trainer, self.rollout):
            side.network("tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", *shape)

    def sent_bytes(self) -> int:
        """From the trainer's side to the rollout's, since the link is there."""
        shown = orjson.loads(self.trainer.run(["ip", "-s", "-j", "link", "show", "dev", DEVICE], timeout_s=30))
        return int(shown[0]["stats64"]["tx"]["bytes"])

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing passes meanwhile."""
        self.trainer.network("ip", "link", "set", DEVICE, "down")
        try:
            yield
        finally:
            self.trainer.network("ip", "link", "set", DEVICE, "up")

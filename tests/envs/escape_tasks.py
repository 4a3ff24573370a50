"""Environments that try to get out of their sandbox, or to harm who is outside: the payload's `do` says how.

Each step tries one thing and says what came of it; `out` in the text means that it worked. Bombs are bounded: where
the limit did not hold, they stop by themselves.
"""

import ctypes
import os
import platform
import random
import signal
import socket
import stat
import struct
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


def other_networks(payload: Mapping[str, Any]) -> str:
    """Kinds of sockets that no namespace keeps apart: to the machine that runs this one, and to the kernel."""
    for family, kind in ((40, socket.SOCK_STREAM), (38, socket.SOCK_SEQPACKET), (17, socket.SOCK_RAW)):
        try:
            socket.socket(family, kind).close()
        except OSError:
            continue
        return f"out by family {family}"
    return "in"


def own_namespace(payload: Mapping[str, Any]) -> str:
    """In one of users we would be root again, and could mount."""
    for word in ("--user", "--map-root-user", "--mount", "--net"):
        done = subprocess.run(["unshare", word, "true"], capture_output=True, check=False)
        if done.returncode == 0:
            return f"out by {word}"
    flags = 0x10000000 | signal.SIGCHLD
    child = _kernel().syscall({"x86_64": 56, "aarch64": 220}[platform.machine()], flags, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return "out by clone" if child > 0 else "in"


def kernel(payload: Mapping[str, Any]) -> str:
    """Its keyrings, which may be our parents', and what makes sockets or looks around past filters and namespaces."""
    calls = {
        "x86_64": {"keyctl": 250, "bpf": 321, "perf": 298, "userfaultfd": 323, "io_uring": 425, "setns": 308},
        "aarch64": {"keyctl": 219, "bpf": 280, "perf": 241, "userfaultfd": 282, "io_uring": 425, "setns": 268},
    }
    for name, number in calls[platform.machine()].items():
        ctypes.set_errno(0)
        done = _kernel().syscall(number, 0, -3, 0, 0, 0)
        if done >= 0 or ctypes.get_errno() not in (1, 38):  # neither "not permitted" nor "not there"
            return f"out by {name}: {os.strerror(ctypes.get_errno())}"
    return "in"


def _kernel() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def privileges(payload: Mapping[str, Any]) -> str:
    """Of root, or of whoever is more than we are."""
    tries: dict[str, Callable[[], object]] = {
        "root": lambda: os.setuid(0),
        "another root": lambda: os.chroot("/tmp"),
        "device": lambda: os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, os.makedev(8, 0)),
        "real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 5),
        "last to be killed": lambda: Path("/proc/self/oom_score_adj").write_text("-900"),
        "settings of the kernel": lambda: Path("/proc/sys/kernel/core_pattern").write_text("x"),
        "a file that is more": lambda: subprocess.run(
            ["mount", "-t", "tmpfs", "none", "/tmp"], check=True, stderr=subprocess.DEVNULL
        ),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except (OSError, subprocess.CalledProcessError):
            continue
        return f"out by {name}"
    status = Path("/proc/self/status").read_text()
    return "in" if "NoNewPrivs:\t1" in status and "CapEff:\t0000000000000000" in status else f"out: {status}"


def processes(payload: Mapping[str, Any]) -> str:
    """The first one, where it is another's (in a container it is ourselves), and what leads from it to the outside."""
    if os.stat("/proc/1").st_uid == os.getuid():
        return "in" if Path("/proc/1/root").samefile("/") else "out by its root"
    for name in ("root", "cwd", "environ", "mem", "fd", "map_files"):
        place = Path("/proc/1", name)
        try:
            found = os.listdir(place) if place.is_dir() else place.read_bytes()[:1]
        except OSError:
            continue
        return f"out by {place}: {found!r}"
    return "out by tracing" if _kernel().ptrace(16, 1, 0, 0) == 0 else "in"


def descriptors(payload: Mapping[str, Any]) -> str:
    """What was handed down and is not ours: folders lead anywhere, and a log may be read as well as written."""
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.stat(f"/proc/self/fd/{name}").st_mode
            where = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # of the listing itself
            continue
        if stat.S_ISDIR(kind):
            return f"out by the folder {where}"
        if stat.S_ISREG(kind) and payload.get("root"):  # who is not root has another log in each box, but is its owner
            try:
                return f"out by {where}: {os.open(f'/proc/self/fd/{name}', os.O_RDWR)}"
            except OSError:
                continue
    return "in"


def kill_all(payload: Mapping[str, Any]) -> str:
    """Whom we may."""
    with subprocess.Popen(["sleep", "60"]):
        os.kill(-1, signal.SIGKILL)
    return "in"


def stop(payload: Mapping[str, Any]) -> str:
    """No time passes for who is stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "out"


def forge(payload: Mapping[str, Any]) -> str:
    """An answer of a million parts, on the line to whoever asked, in place of the right one."""
    body = (
        b"\x93" + bytes([payload.get("call", 4)]) + b"\xc3\x91\xdd" + struct.pack(">I", 1_000_000) + b"\x80" * 1_000_000
    )
    for name in os.listdir("/proc/self/fd"):
        try:
            os.write(int(name), struct.pack(">Q", len(body)) + body)
        except OSError:
            continue
    return "in"


def unnamed_files(payload: Mapping[str, Any]) -> str:
    """Memory that no process has."""
    held = [os.memfd_create(str(number)) for number in range(MOST_MIB)]
    for file in held:
        os.write(file, b"x" * 2**20)
    return "out"


def spin_together(payload: Mapping[str, Any]) -> str:
    """Many that use the CPU a little each: more than one box is to have."""
    began_s = time.monotonic()
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            while time.monotonic() < began_s + 3:
                pass
            os._exit(0)
        children.append(child)
    used = [os.wait4(child, 0)[2] for child in children]
    share = sum(one.ru_utime + one.ru_stime for one in used) / (time.monotonic() - began_s)
    return f"{'out' if share > 2 * payload['cpus'] else 'in'} {share:.2f} CPUs"


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
        *(memory_bomb, shared_memory_bomb, flood, log_flood, spin, outlive, other_networks, own_namespace, kernel),
        *(privileges, processes, descriptors, kill_all, stop, forge, unnamed_files, spin_together),
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
            "cpus": 1000.0,
            "salt": rng.random(),
        }

    def environment(self, task: Task) -> Environment:
        return Escape(task.payload)

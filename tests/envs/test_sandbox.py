"""Environments in sandboxes: the contract, what they cannot do, and what it costs nobody else."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.config.settings import SandboxSettings
from rollart.envs.process import Boxed, ProcessEnvHost
from rollart.errors import EnvError
from rollart.launch.checks import unsupported
from rollart.ports import EnvHost
from rollart.tasks.load import code_of
from rollart.types import Observation, Task
from rollart.workers import cgroup, sandbox
from rollart.workers import pool as pools
from rollart.workers.sandbox import Sandbox, missing
from tests.contracts.user_envs import DOMAIN, ID, SOON_S, TASKS, UserEnvHostContract, closing, run, task, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"sandbox {missing()}")

ESCAPES = str(Path(__file__).with_name("escape_tasks.py"))
SMALL: dict[str, Any] = {"memory_mb": 192, "processes": 24, "tmp_mb": 8, "output_mb": 2, "cpu_s": 5}


def make_host(
    tmp_path: Path, use: str, slots: int = 1, warm: int = 0, write: Sequence[Path] = (), **limits: Any
) -> ProcessEnvHost:
    settings = SandboxSettings(**limits)

    def box(name: str) -> Sandbox:
        return Sandbox(settings=settings, read=code_of(use), write=write)

    boxed = Boxed(box=box, wall_s=settings.wall_s, warm=warm)
    return ProcessEnvHost({DOMAIN: use}, slots=slots, log_dir=tmp_path / "logs", boxed=boxed)


@pytest.mark.slow
class TestSandboxedEnvHost(UserEnvHostContract):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        tmp_path.chmod(0o777)
        return closing(make_host(tmp_path, TASKS, slots, write=(tmp_path,)))


@pytest.mark.slow
class TestWarmSandboxedEnvHost(TestSandboxedEnvHost):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        tmp_path.chmod(0o777)
        return closing(make_host(tmp_path, TASKS, slots, warm=2, write=(tmp_path,)))


def escape(**payload: Any) -> Task:
    return Task(id=f"{DOMAIN}/escape", domain=DOMAIN, index=0, payload=payload)


async def tried(host: EnvHost, *names: str, **payload: Any) -> list[str]:
    """What came of these attempts, one after another in one sandbox."""
    env = await host.open(escape(**payload), ID)
    try:
        await env.reset()
        return [said_by(await env.step(name)) for name in names]
    finally:
        await env.close()


def said_by(observation: Observation) -> str:
    return "".join(message.content for message in observation.messages)


def processes_with(word: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if word.encode() in words and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_for(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_what_is_outside_cannot_be_reached_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SESAME_TOKEN", "open-sesame")
    (tmp_path / "job.yaml").write_text("name: secret")
    names = ["network", "lookup", "port", "unix", "abstract", "write", "read", "secrets", "kill"]

    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, **SMALL)) as host:
            said = await tried(
                host,
                *names,
                port=listening[0].getsockname()[1],
                socket=str(tmp_path / "control"),
                abstract=abstract,
                places=[str(tmp_path), str(Path.cwd() / "pyproject.toml"), str(Path.home() / ".bashrc")],
                secret="open-sesame",
                pid=os.getpid(),
            )
            assert [(name, what[:2]) for name, what in zip(names, said, strict=True)] == [
                (name, "in") for name in names
            ], said

    abstract = f"rollart-test-{os.getpid()}"
    listening = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    try:
        listening[1].bind(str(tmp_path / "control"))
        listening[2].bind(f"\0{abstract}")
        for one in listening[1:]:
            one.listen()
        (tmp_path / "control").chmod(0o777)
        run(work)
    finally:
        for one in listening:
            one.close()
    assert not list(tmp_path.rglob("escaped"))


PRIVILEGES = ("other_networks", "own_namespace", "kernel", "privileges", "processes", "descriptors", "kill_all")


def test_nothing_more_can_be_had_of_the_kernel(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, **SMALL)) as host:
            said = await tried(host, *PRIVILEGES, root=os.geteuid() == 0)
            assert {what[:2] for what in said} == {"in"}, dict(zip(PRIVILEGES, said, strict=True))

    run(work)


THREADS = """
import errno, socket, threading
from rollart.workers.seccomp import confine
go, said = threading.Event(), []
def late():
    go.wait()
    try:
        socket.socket(40, socket.SOCK_STREAM)
    except OSError as error:
        said.append(error.errno == errno.EAFNOSUPPORT)
thread = threading.Thread(target=late)
thread.start()
confine()
go.set()
thread.join()
socket.socket(socket.AF_INET).close()
print(said)
"""


def test_threads_that_were_there_before_are_held_to_the_filter_too() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[True]"


def test_who_stops_itself_is_killed_by_the_limit_of_its_step(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, **SMALL)) as host:
            env = await host.open(escape(), ID)
            await env.reset()
            stopped = asyncio.ensure_future(env.step("stop"))
            await until(lambda: any(state_of(pid) == "T" for pid in below(host.pool.pids[0])))
            stopped.cancel()  # as a limit does
            await asyncio.gather(stopped, return_exceptions=True)
            await env.close()
            await until(lambda: not host.pool.pids)

    run(work)


def below(pid: int) -> list[int]:
    """It and all that it started."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


def state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def test_a_forged_answer_ends_who_made_it_before_it_costs_anything(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, slots=2, **SMALL)) as host:
            other = await host.open(escape(places=[]), ID)
            await other.reset()
            with pytest.raises(EnvError, match=r"^step: its process answered nonsense and was killed"):
                await tried(host, "forge")
            assert said_by(await other.step("write")) == "in"

    run(work)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs control groups")
def test_all_of_a_box_together_have_so_many_cpus(tmp_path: Path) -> None:
    """Few, since six that want one get more than that on a busy machine too."""
    if (group := cgroup.Cgroup.make(2**28, 10, 1.0)) is None:
        pytest.skip("no control group can be made here")
    group.remove()

    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, **{**SMALL, "cpus": 0.1})) as host:
            said = await tried(host, "spin_together", cpus=0.1)
            assert said[0].startswith("in "), said

    run(work)


def test_files_processes_and_output_are_bounded(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, **SMALL)) as host:
            few = await tried(host, "fork_bomb", forks=30)  # first: does the limit hold at all?
            assert few[0].startswith("in "), few
            said = await tried(host, "disk", "large_file", "log_flood", "fork_bomb", mib=16)
            assert [what[:2] for what in said] == ["in"] * 4, said
            assert int(said[3].split()[1]) < SMALL["processes"]
            assert sum(log.stat().st_size for log in (tmp_path / "logs").iterdir()) <= SMALL["output_mb"] * 2**20
            with pytest.raises(EnvError, match=r"more than 2097152 bytes"):
                await tried(host, "flood")

    run(work)


@pytest.mark.parametrize("kind", ["memory_bomb", "shared_memory_bomb", "unnamed_files"])
def test_a_memory_bomb_ends_itself_and_nobody_else(tmp_path: Path, kind: str) -> None:
    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, slots=2, **SMALL)) as host:
            other = await host.open(escape(places=[]), ID)
            await other.reset()
            ended = await asyncio.gather(tried(host, kind), return_exceptions=True)
            assert "sandbox.memory_mb 192" in str(ended[0]) or str(ended[0]).startswith("['in"), ended
            assert said_by(await other.step("write")) == "in"
            await other.close()

    run(work)


@pytest.mark.slow
def test_a_process_has_so_much_cpu(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, **{**SMALL, "cpu_s": 2})) as host:
            with pytest.raises(EnvError, match=r"status 1(37|52)"):  # by SIGKILL or SIGXCPU
                await tried(host, "spin")

    run(work)


def test_it_ends_with_its_episode_and_with_all_that_it_started(tmp_path: Path) -> None:
    seconds = f"{3600 + os.getpid() / 1e6:.6f}"

    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, **SMALL)) as host:
            env = await host.open(escape(seconds=seconds), ID)
            await env.reset()
            await env.step("outlive")
            await until(lambda: bool(processes_with(seconds)))
            await env.close()
            await until(lambda: not processes_with(seconds))
            assert host.pool.pids == []

    run(work)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["outlive", "spin"])
def test_it_ends_with_us(tmp_path: Path, kind: str) -> None:
    seconds = f"{3600 + os.getpid() / 1e6:.6f}"
    script = f"""
        import asyncio
        from pathlib import Path
        from tests.envs.test_sandbox import ESCAPES, escape, make_host
        from tests.contracts.user_envs import ID

        async def main():
            host = make_host(Path({str(tmp_path)!r}), ESCAPES, processes=24)
            env = await host.open(escape(seconds={seconds!r}), ID)
            await env.reset()
            await env.step("outlive")
            print("up", flush=True)
            await env.step({kind!r})
            await asyncio.sleep(3600)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == "up"
        wait_for(lambda: bool(processes_with(seconds)))
        parent.kill()
    wait_for(lambda: not processes_with(seconds))


def test_a_life_that_is_too_long_ends(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(make_host(tmp_path, ESCAPES, wall_s=0.3)) as host:
            env = await host.open(escape(), ID)
            await env.reset()
            with pytest.raises(EnvError, match=r"longer than sandbox\.wall_s 0\.3"):
                await env.step("spin")
            await env.close()

    run(work)


def test_each_episode_has_a_sandbox_of_its_own_warm_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with closing(make_host(tmp_path, TASKS, warm=1)) as host:
            seen = []
            for _ in range(3):
                env = await host.open(task("count"), ID)
                seen.append(host.pool.pids)
                assert host.pool.num_ahead == 1
                await env.close()
            assert not set(seen[0]) & set(seen[2]), "one was used again"
            monkeypatch.setattr(pools, "WARM_S", 0.2)
            await (await host.open(task("count"), ID)).close()
            await until(lambda: host.pool.num_ahead == 0 and not host.pool.pids)
            waiting = asyncio.ensure_future(host.open(task("count"), ID))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: len(host.pool.pids) <= 1)
            await (await host.open(task("count"), ID)).close()

    run(work)


NOT_ROOT = """
import ctypes, os, signal
children = []
try:
    for _ in range(40):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError:
    pass
for child in children:
    os.kill(child, 9)
written = []
for place in ("/", "/dev", "/usr", "/tmp"):
    try:
        open(place + "/escaped", "w").write("x")
        written.append(place)
    except OSError:
        pass
try:
    held = bytearray(300 << 20)
except MemoryError:
    held = None
new_user_namespace = ctypes.CDLL(None).unshare(0x10000000) == 0
print(os.getuid(), len(children) < 24, written, held is None, new_user_namespace)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_without_root_and_control_groups_the_same_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any user has it, with the system's own Python: ours may be where only root can read."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sandbox, "python_places", list)
    monkeypatch.setattr(cgroup.Cgroup, "make", lambda *limits: None)
    box = Sandbox(settings=SandboxSettings(processes=24, memory_mb=200, tmp_mb=4))
    words, environment = box.command(["/usr/bin/python3", "-c", NOT_ROOT], {"PATH": os.defpath})
    user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]
    done = subprocess.run([*user, *words], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "1000 True ['/tmp'] True False", done.stdout + done.stderr


JOB: dict[str, Any] = {
    "name": "boxes",
    "tasks": [{"name": "a", "use": ESCAPES, "isolation": "sandbox"}],
    "pools": [{"name": "cpu", "engines": {}, "slots": 4}],
}


def test_a_machine_without_bubblewrap_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(unsupported(build_job(JOB)))
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else which(name))
    (said,) = unsupported(build_job(JOB))
    assert said.startswith("tasks.0.isolation: sandbox needs bwrap")
    assert "apt-get install bubblewrap" in said

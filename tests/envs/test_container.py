"""Environments in containers: the contract and the escapes with runtimes that are here, the commands of all.

The image is a skeleton: links and empty folders. What Python needs is put in from this machine, as code is in a job.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

import pytest

from rollart.config.load import build_job
from rollart.config.settings import ContainerSettings, SandboxSettings
from rollart.envs.process import Boxed, ProcessEnvHost
from rollart.launch.checks import unsupported
from rollart.ports import EnvHost
from rollart.tasks.load import code_of
from rollart.workers.container import Container
from tests.contracts.user_envs import DOMAIN, ID, TASKS, UserEnvHostContract, closing, run, until
from tests.envs.test_sandbox import ESCAPES, SMALL, escape, processes_with, tried, wait_for

Runtime = Literal["podman", "docker", "runc"]
RUNTIMES: list[Runtime] = ["runc", "podman", "docker"]
IMAGE = "localhost/rollart-skeleton:test"
PYTHON_PLACES = [Path(place) for place in dict.fromkeys(("/usr", sys.base_prefix, sys.prefix))]


@contextlib.contextmanager
def docker_engine(folder: Path) -> Iterator[None]:
    """One of our own, without a network, where none runs."""
    if subprocess.run(["docker", "version"], capture_output=True, timeout=60, check=False).returncode == 0:
        yield
        return
    if shutil.which("dockerd") is None:
        pytest.skip("needs dockerd (apt-get install docker.io), or an engine that runs")
    socket = f"unix://{folder}/docker.sock"
    words = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    words += ["--host", socket, "--iptables=false", "--bridge=none", "--storage-driver=vfs"]
    before = os.environ.get("DOCKER_HOST")
    with open(folder / "log", "wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as engine:
        try:
            os.environ["DOCKER_HOST"] = socket
            asks = ["docker", "version"]
            wait_for(lambda: subprocess.run(asks, capture_output=True, timeout=60, check=False).returncode == 0)
            yield
        finally:
            engine.terminate()
            os.environ.pop("DOCKER_HOST") if before is None else os.environ.update(DOCKER_HOST=before)


@pytest.fixture(scope="module", params=RUNTIMES)
def container(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerSettings]:
    runtime: Runtime = request.param
    if os.geteuid() != 0 or shutil.which(runtime) is None:
        pytest.skip(f"needs {runtime}, and root")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollart-")))
        if runtime == "docker":
            stack.enter_context(docker_engine(folder))
        root = tmp_path_factory.mktemp("image") / "root"
        _make_root(root)
        if runtime == "runc":
            yield ContainerSettings(runtime=runtime, image=str(root), python=sys.executable)
            return
        tar = subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True).stdout
        subprocess.run([runtime, "import", "-", IMAGE], input=tar, capture_output=True, check=True, timeout=60)
        yield ContainerSettings(runtime=runtime, image=IMAGE, python=sys.executable)
        subprocess.run([runtime, "rmi", "--force", IMAGE], capture_output=True, check=False, timeout=60)


def _make_root(root: Path) -> None:
    root.mkdir(mode=0o755)
    for place in ("usr", "proc", "dev", "tmp", "etc"):
        (root / place).mkdir()
    (root / "tmp").chmod(0o1777)  # as in every image; runc keeps it
    for link in ("bin", "lib", "lib64", "sbin"):
        (root / link).symlink_to(f"usr/{link}")


def make_host(
    container: ContainerSettings,
    tmp_path: Path,
    use: str,
    slots: int = 1,
    read: list[Path] | None = None,
    **limits: Any,
) -> ProcessEnvHost:
    settings = SandboxSettings(**limits)

    def box(name: str) -> Container:
        return Container(settings=settings, container=container, code=code_of(use), read=PYTHON_PLACES)

    boxed = Boxed(box=box, wall_s=settings.wall_s)
    return ProcessEnvHost({DOMAIN: use}, slots=slots, log_dir=tmp_path / "logs", boxed=boxed)


@pytest.mark.slow
class TestContainedEnvHost(UserEnvHostContract):
    @pytest.fixture(autouse=True)
    def _container(self, container: ContainerSettings) -> None:
        self.container = container

    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(make_host(self.container, tmp_path, TASKS, slots))

    def test_close_under_a_running_step(self, tmp_path: Path) -> None:
        """The common one writes files that a container cannot."""


@pytest.mark.slow
def test_escapes_fail(container: ContainerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SESAME_TOKEN", "open-sesame")
    names = ["network", "lookup", "port", "write", "secrets", "kill", "disk", "large_file", "fork_bomb"]

    async def work() -> None:
        async with closing(make_host(container, tmp_path, ESCAPES, **SMALL)) as host:
            few = await tried(host, "fork_bomb", forks=30)
            assert few[0].startswith("in "), few
            said = await tried(
                host, *names, port=22, places=[str(tmp_path)], secret="open-sesame", pid=os.getpid(), mib=16
            )
            assert [what[:2] for what in said] == ["in"] * len(names), dict(zip(names, said, strict=True))
            assert (await tried(host, "read", places=[str(tmp_path)]))[0].count("pytest") == 0

    run(work)


@pytest.mark.slow
def test_it_ends_with_its_episode_and_leaves_nothing(container: ContainerSettings, tmp_path: Path) -> None:
    seconds = f"{3600 + os.getpid() / 1e6:.6f}"

    async def work() -> None:
        async with closing(make_host(container, tmp_path, ESCAPES, **SMALL)) as host:
            env = await host.open(escape(seconds=seconds), ID)
            await env.reset()
            await env.step("outlive")
            await until(lambda: bool(processes_with(seconds)))
            await env.close()
            await until(lambda: not processes_with(seconds))

    run(work)
    listing = ["list"] if container.runtime == "runc" else ["ps", "--all"]
    words = [container.runtime, *listing, "--quiet"]
    wait_for(lambda: not subprocess.run(words, capture_output=True, check=True, timeout=60).stdout.strip())


@pytest.mark.slow
def test_it_ends_with_us(container: ContainerSettings, tmp_path: Path) -> None:
    seconds = f"{3600 + os.getpid() / 1e6:.6f}"
    script = f"""
        import asyncio
        from pathlib import Path
        from rollart.config.settings import ContainerSettings
        from tests.envs.test_container import ESCAPES, escape, make_host
        from tests.contracts.user_envs import ID

        async def main():
            container = ContainerSettings.model_validate_json({container.model_dump_json()!r})
            host = make_host(container, Path({str(tmp_path)!r}), ESCAPES, processes=24)
            env = await host.open(escape(seconds={seconds!r}), ID)
            await env.reset()
            await env.step("outlive")
            print("up", flush=True)
            await env.step("spin")

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == "up"
        wait_for(lambda: bool(processes_with(seconds)))
        parent.kill()
    wait_for(lambda: not processes_with(seconds))


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_podman_and_docker_are_asked_in_the_same_words(runtime: Runtime) -> None:
    box = Container(settings=SandboxSettings(), container=ContainerSettings(image="img", runtime=runtime), name="n")
    words, environment = box.command(["/host/python", "-m", "m"], {"A_KEY": "secret", "PATH": "/host/bin", "LANG": "C"})
    line = " ".join(words)
    assert words[-4:] == ["img", "python3", "-m", "m"]
    assert f"{runtime} run --rm --interactive --name n --network none --read-only --cap-drop ALL" in line
    assert "--env A_KEY" in line
    assert "secret" not in line
    assert environment["A_KEY"] == "secret"
    assert "/host/bin" not in environment["PATH"]
    assert environment["REMOVE"] == f"{runtime} rm --force n"


JOB: dict[str, Any] = {
    "name": "boxes",
    "tasks": [{"name": "a", "use": ESCAPES, "isolation": "container"}],
    "pools": [{"name": "cpu", "engines": {}, "slots": 4}],
}


@pytest.mark.parametrize(
    ("container", "text"),
    [
        ({}, "tasks.0.container.image: missing"),
        ({"runtime": "runc", "image": "/nowhere"}, "tasks.0.container.image: /nowhere is no folder"),
        ({"runtime": "docker", "image": "x"}, "tasks.0.container.runtime: docker is not on this machine; install it"),
    ],
)
def test_what_is_missing_is_refused(container: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which("true") if name == "runc" else None)
    (said,) = unsupported(build_job({**JOB, "tasks": [{**JOB["tasks"][0], "container": container}]}))
    assert said.startswith(text)

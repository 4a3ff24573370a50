"""Environments in containers: the contract and the escapes with runtimes that are here, the commands of all.

The image is a skeleton: links and empty folders. What Python needs is put in from this machine, as code is in a job.
Pods are run by the cluster of `kubectl`, where ROLLART_TEST_POD says how (a task's `container`, as JSON, whose image
has what RollArt needs); else by `kubectl_standin.py`.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from rollart.config.load import build_job
from rollart.config.settings import ContainerSettings, SandboxSettings
from rollart.envs.process import Boxed, ProcessEnv, ProcessEnvHost
from rollart.launch.checks import unsupported
from rollart.ports import EnvHost
from rollart.tasks.load import code_of
from rollart.workers.box import Box
from rollart.workers.container import KEPT, Container
from rollart.workers.pod import BEGIN, LABELS, MAX_SENT_BYTES, RIGHTS, Pod, mount_points
from tests.contracts.user_envs import DOMAIN, ID, TASKS, UserEnvHostContract, closing, run, until
from tests.envs.kubectl_standin import STANDS_FOR
from tests.envs.test_sandbox import ESCAPES, PRIVILEGES, SMALL, escape, processes_with, tried, wait_for

Runtime = Literal["podman", "docker", "runc", "kubernetes"]
RUNTIMES: list[Runtime] = ["runc", "podman", "docker", "kubernetes"]
IN_A_CLUSTER = os.environ.get("ROLLART_TEST_POD", "")
STAND_IN = Path(__file__).with_name("kubectl_standin.py")
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


@contextlib.contextmanager
def standing_in_for_kubectl(folder: Path) -> Iterator[None]:
    (folder / "kubectl").write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    (folder / "kubectl").chmod(0o755)
    before = os.environ["PATH"]
    os.environ |= {"PATH": f"{folder}{os.pathsep}{before}", STANDS_FOR: os.pathsep.join(map(str, PYTHON_PLACES))}
    try:
        yield
    finally:
        os.environ["PATH"] = before
        del os.environ[STANDS_FOR]


@pytest.fixture(scope="module", params=RUNTIMES)
def container(request: pytest.FixtureRequest) -> Iterator[ContainerSettings]:
    runtime: Runtime = request.param
    if runtime == "kubernetes" and IN_A_CLUSTER:
        yield ContainerSettings.model_validate({**json.loads(IN_A_CLUSTER), "runtime": runtime})
        return
    engine: Runtime = "podman" if runtime == "kubernetes" else runtime
    if os.geteuid() != 0 or shutil.which(engine) is None:
        pytest.skip(f"needs {engine}, and root")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollart-")))
        if runtime == "docker":
            stack.enter_context(docker_engine(folder))
        if runtime == "kubernetes":
            stack.enter_context(standing_in_for_kubectl(folder))
        image = stack.enter_context(skeleton_image(engine, folder))
        yield ContainerSettings(runtime=runtime, image=image, python=sys.executable)


@contextlib.contextmanager
def skeleton_image(engine: Runtime, folder: Path) -> Iterator[str]:
    """What `container.image` says of it."""
    root = folder / "root"
    _make_root(root)
    if engine == "runc":
        yield str(root)
        return
    tar = subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True).stdout
    subprocess.run([engine, "import", "-", IMAGE], input=tar, capture_output=True, check=True, timeout=60)
    yield IMAGE
    subprocess.run([engine, "rmi", "--force", IMAGE], capture_output=True, check=False, timeout=60)


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
    **limits: Any,
) -> ProcessEnvHost:
    settings = SandboxSettings(**limits)

    def box(name: str) -> Box:
        if container.runtime == "kubernetes":
            return Pod(settings=settings, container=container, code=code_of(use))
        return Container(settings=settings, container=container, code=code_of(use), read=PYTHON_PLACES)

    boxed = Boxed(box=box, wall_s=settings.wall_s)
    return ProcessEnvHost({DOMAIN: use}, slots=slots, log_dir=tmp_path / "logs", boxed=boxed)


LISTING = {
    "runc": ["runc", "list", "--quiet"],
    "podman": ["podman", "ps", "--all", "--quiet"],
    "docker": ["docker", "ps", "--all", "--quiet"],
    "kubernetes": ["kubectl", "get", "pods", "--selector", "app.kubernetes.io/managed-by=rollart", "--output=name"],
}


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
    names = ["network", "lookup", "port", "write", "secrets", "kill", "disk", "large_file", "fork_bomb", *PRIVILEGES]

    async def work() -> None:
        async with closing(make_host(container, tmp_path, ESCAPES, **SMALL)) as host:
            few = await tried(host, "fork_bomb", forks=30)
            assert few[0].startswith("in "), few
            said = await tried(
                host, *names, port=22, places=[str(tmp_path)], secret="open-sesame", pid=os.getpid(), mib=16
            )
            found = dict(zip(names, said, strict=True))
            if container.runtime == "kubernetes":  # its code is a copy of its own, in its own memory
                assert found.pop("write") == f"out in {Path(ESCAPES).parent}", found
                assert not Path(ESCAPES).with_name("escaped").exists()
            assert {what[:2] for what in found.values()} == {"in"}, found
            assert (await tried(host, "read", places=[str(tmp_path)]))[0].count("pytest") == 0

    run(work)


def listed(container: ContainerSettings) -> set[str]:
    """Containers that are there. Podman's are runc's too, where it runs them by that; ours have their name."""
    done = subprocess.run(LISTING[container.runtime], capture_output=True, check=True, timeout=60, text=True)
    return {one for one in done.stdout.split() if container.runtime != "runc" or one.startswith("rollart-")}


@pytest.mark.slow
def test_it_ends_with_its_episode_and_leaves_nothing(container: ContainerSettings, tmp_path: Path) -> None:
    before = listed(container)
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
    wait_for(lambda: listed(container) <= before)


def runcs() -> set[str]:
    """All containers that runc knows, podman's too, where it runs them by that."""
    if shutil.which("runc") is None:
        return set()
    return set(subprocess.run(["runc", "list", "--quiet"], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.slow
def test_one_that_is_given_up_while_it_starts_leaves_nothing(container: ContainerSettings, tmp_path: Path) -> None:
    """At whatever moment: a runtime that is killed while it makes a container forgets it."""
    before, before_of_all = listed(container), runcs()

    async def work() -> None:
        async with closing(make_host(container, tmp_path, ESCAPES, slots=8, **SMALL)) as host:
            for moment in range(24):
                opening = asyncio.ensure_future(host.open(escape(), ID))
                await asyncio.sleep(0.025 * moment)
                opening.cancel()
                for one in await asyncio.gather(opening, return_exceptions=True):
                    if isinstance(one, ProcessEnv):
                        await one.close()

    run(work)
    wait_for(lambda: listed(container) <= before and runcs() <= before_of_all)


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
    container = ContainerSettings(image="img", runtime=runtime)
    box = Container(settings=SandboxSettings(cpus=0.5), container=container, name="n")
    words, environment = box.command(["/host/python", "-m", "m"], {"A_KEY": "secret", "PATH": "/host/bin", "LANG": "C"})
    line = " ".join(words)
    assert words[-4:] == ["img", "python3", "-m", "m"]
    assert f"{runtime} run --rm --interactive --name n --network none --read-only --cap-drop ALL" in line
    assert "--env A_KEY" in line
    assert "--cpus 0.5" in line
    assert "--stop-timeout 0" in line
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
        ({"runtime": "kubernetes", "image": "x"}, "tasks.0.container.runtime: kubectl is not on this machine; install"),
    ],
)
def test_what_is_missing_is_refused(container: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which("true") if name == "runc" else None)
    (said,) = unsupported(build_job({**JOB, "tasks": [{**JOB["tasks"][0], "container": container}]}))
    assert said.startswith(text)


def test_a_pod_says_all_that_bounds_it_and_nothing_that_is_secret(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("x = 1")
    container = ContainerSettings(
        image="img", runtime="kubernetes", namespace="ns", pod={"nodeSelector": {"disk": "ssd"}, "volumes": 1}
    )
    pod = Pod(
        settings=SandboxSettings(memory_mb=300, cpus=0.5, wall_s=60.5), container=container, code=[file], name="n"
    )
    words, environment = pod.command(["/host/python", "-m", "m"], {"A_KEY": "secret", "PATH": "/host/bin", "LANG": "C"})
    assert words[len(KEPT) :][4:9] == ["--namespace", "ns", "run", "n", "--image"]
    assert "secret" not in " ".join(words)
    assert b'"A_KEY": "secret"' in pod.opening
    assert b"/host/bin" not in pod.opening
    assert environment["REMOVE"] == "kubectl --namespace ns delete pod n --ignore-not-found --now --wait=false"
    spec = json.loads(words[words.index("--overrides") + 1])["spec"]
    assert (spec["nodeSelector"], spec["activeDeadlineSeconds"]) == ({"disk": "ssd"}, 3661)
    assert spec["automountServiceAccountToken"] is False
    (inside,) = spec["containers"]
    bounds = {"cpu": "500m", "memory": "300Mi"}
    assert inside["resources"] == {"requests": bounds, "limits": bounds}
    assert inside["image"] == "img"
    assert {mount["name"] for mount in inside["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_what_is_sent_ahead_is_put_in_its_place_and_becomes_the_worker(tmp_path: Path) -> None:
    """As an image's Python does it, here; its places are where they are already."""
    (tmp_path / "said.py").write_text("import os, resource; print(os.environ['A_KEY'], resource.getrlimit(4), input())")
    container = ContainerSettings(image="img", runtime="kubernetes")
    pod = Pod(settings=SandboxSettings(), container=container, code=[tmp_path / "said.py"])
    pod.command(["python", str(tmp_path / "said.py")], {"A_KEY": "secret"})
    done = subprocess.run(
        [sys.executable, "-c", BEGIN], input=pod.opening + b"and more\n", capture_output=True, timeout=60, check=False
    )
    assert done.stdout == b"secret (0, 0) and more\n", done.stderr


@pytest.mark.parametrize("network", [True, False])
def test_a_pod_with_a_network_ends_itself(network: bool) -> None:
    """Without one, the address of the cluster's API is refused at once, as a broadcast's is here."""
    container = ContainerSettings(image="img", runtime="kubernetes")
    pod = Pod(settings=SandboxSettings(), container=container, code=[Path(__file__)])
    pod.command(["python", "-c", "print('in')"], {})
    with socket.create_server(("127.0.0.1", 0)) as api:
        port = str(api.getsockname()[1])
        host = "127.0.0.1" if network else "255.255.255.255"
        environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        done = subprocess.run(
            [sys.executable, "-c", BEGIN], env=environment, input=pod.opening, capture_output=True, check=False
        )
    if network:
        assert done.returncode == 1
        assert b"apply deploy/environment-pods.yaml" in done.stderr
    else:
        assert done.stdout == b"in\n", done.stderr


def test_the_policy_that_is_shipped_closes_the_network_of_such_pods_and_its_role_is_enough() -> None:
    file = Path(__file__).parents[2] / "deploy" / "environment-pods.yaml"
    policy, role = (part for part in yaml.safe_load_all(file.read_text()))
    pod = Pod(settings=SandboxSettings(), container=ContainerSettings(image="img", runtime="kubernetes"))
    assert policy["spec"]["podSelector"]["matchLabels"] == LABELS
    assert pod.manifest()["metadata"] == {"name": pod.name, "labels": LABELS}
    assert set(policy["spec"]) == {"podSelector", "policyTypes"}, "a rule would open something"
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    allowed = {(verb, what) for rule in role["rules"] for verb in rule["verbs"] for what in rule["resources"]}
    assert {*RIGHTS, ("create", "pods"), ("deletecollection", "pods")} <= allowed


def test_places_of_a_pod_are_folders_none_in_another(tmp_path: Path) -> None:
    assert mount_points([Path("/tmp/x.py"), Path("/srv/a/b.py"), Path("/srv/a"), Path("/opt/z.py")]) == ["/opt", "/srv"]


REFUSING = """#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in {cases} *) exit 0;; esac
"""


@pytest.mark.parametrize(
    ("cases", "text"),
    [
        ('*dry-run*) echo "namespace x not found" >&2; exit 1;;', "create --dry-run=server: namespace x not found"),
        ("*can-i*attach*) echo no; exit 1;;", "takes no such pod (kubectl auth can-i create pods/attach: no)"),
    ],
)
def test_a_cluster_that_takes_no_pods_is_refused_with_what_it_said(
    cases: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(REFUSING.format(cases=cases))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    pods = {"container": {"runtime": "kubernetes", "image": "x"}}
    (said,) = unsupported(build_job({**JOB, "tasks": [{**JOB["tasks"][0], **pods}]}))
    assert said.startswith("tasks.0.container.runtime: the cluster takes no such pod")
    assert text in said
    program.write_text(REFUSING.format(cases=""))
    assert list(unsupported(build_job({**JOB, "tasks": [{**JOB["tasks"][0], **pods}]}))) == []
    assert "delete pods --selector app.kubernetes.io/managed-by=rollart" in Path(f"{program}.log").read_text()


def test_an_agents_program_is_refused_in_a_pod() -> None:
    task = {**JOB["tasks"][0], "container": {"runtime": "kubernetes", "image": "x"}, "agent": {"command": ["x"]}}
    said = list(unsupported(build_job({**JOB, "tasks": [task]})))
    assert any(one.startswith("tasks.0.container.runtime: kubernetes, but an agent that is a program") for one in said)


def test_too_much_to_send_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "data", "wb") as file:
        file.truncate(MAX_SENT_BYTES + 1)
    container = ContainerSettings(image="x", runtime="kubernetes")
    said = Pod(settings=SandboxSettings(), container=container, read=[tmp_path]).unusable()
    assert said.startswith("image: 6")
    assert "put them into the image" in said

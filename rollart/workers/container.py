"""A box made by a container runtime: an OCI image by podman or docker, or a folder that holds one by runc.

The image brings Python and what the task set needs, `rollart` with its dependencies among it. RollArt's own code and
the task set's file or package are put in read-only, so that they are this machine's. No network, a root that cannot be
written, a /tmp of its own, no capabilities, a user that is nobody, and the limits of `sandbox`. It ends with its
process, and with ours: the container is removed by its name, by us or, when we are gone, by a shell that waited.
"""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rollart
from rollart.config.settings import ContainerSettings, SandboxSettings
from rollart.workers.cgroup import PERIOD_US
from rollart.workers.lifeline import lifeline
from rollart.workers.sandbox import MIB, OPEN_FILES, OWN

NOBODY = 65534
REMOVE_S = 30.0
USERS_PROCESSES = 4096
"""Of nobody's in all containers; one container's own bound is `sandbox.processes`."""
INSTALL = {
    "podman": "apt-get install podman",
    "docker": "docs.docker.com/engine/install",
    "runc": "apt-get install runc",
}
CLIENTS = ("PATH", "HOME", "XDG_RUNTIME_DIR", "CONTAINER_HOST", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG")
"""Variables by which a runtime's client finds its engine and its images."""
KEPT = ("sh", "-c", '(cat /dev/fd/"$LIFE"; eval "$REMOVE") < /dev/null > /dev/null 2>&1 & exec "$@"', "sh")
"""What a box's command begins with: when we are gone, a shell that waited removes the box."""
NAMED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "JAVA_HOME", "SHELL")
"""Variables that say where things are on this machine: the image has its own."""


@dataclass(slots=True, kw_only=True)
class Container:
    """The box of one process."""

    settings: SandboxSettings
    container: ContainerSettings
    code: Sequence[Path] = ()
    """Files and packages of this machine that can be imported inside."""
    read: Sequence[Path] = ()
    """Files and folders of this machine that can be read inside, under the same names."""
    name: str = field(default_factory=lambda: f"rollart-{secrets.token_hex(8)}")
    _bundle: Path | None = field(default=None, init=False)

    @property
    def output_bytes(self) -> int:
        return self.settings.output_mb * MIB

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (lifeline(),)

    @property
    def opening(self) -> bytes:
        return b""

    @property
    def ends_with_command(self) -> bool:
        return False

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """`words`: a command of this machine's Python, which becomes one of the image's."""
        words = [self.container.python, *words[1:]]
        code = [Path(rollart.__file__).parent, *self.code]
        places = list(dict.fromkeys([*code, *self.read]))
        inside = environment_inside(environment, code)
        removing = shlex.join(self._removing)
        if self.container.runtime == "runc":
            run, bundle = self._runc(words, inside, places), shlex.quote(str(self._bundle))
            # once more, since `runc run` removes it too, and one of them may be in the other's way
            return [*KEPT, *run], clients_environment(f"{removing}; sleep 1; {removing}; rm -r {bundle}")
        here = clients_environment(removing)
        # Names on the command line, values in the client's environment: no secret is in the list of processes.
        # The client's own HOME and PATH are needed to find its images, so these are written out.
        written = {name: value for name, value in inside.items() if name in here}
        passed = {name: value for name, value in inside.items() if name not in here}
        options = [word for name in passed for word in ("--env", name)]
        options += [word for name, value in written.items() for word in ("--env", f"{name}={value}")]
        return [*KEPT, *self._run(places), *options, self.container.image, *words], {**here, **passed}

    def over(self) -> str:
        return ""

    def remove(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(self._removing, capture_output=True, timeout=REMOVE_S, check=False)
        if self._bundle is not None:
            shutil.rmtree(self._bundle, ignore_errors=True)

    @property
    def _removing(self) -> list[str]:
        runtime = self.container.runtime
        return [runtime, "delete" if runtime == "runc" else "rm", "--force", self.name]

    def _run(self, places: Sequence[Path]) -> list[str]:
        """The same for podman and docker."""
        limits = self.settings
        memory, output = f"{limits.memory_mb}m", limits.output_mb * MIB
        words = [self.container.runtime, "run", "--rm", "--interactive", "--name", self.name]
        words += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        words += ["--stop-timeout", "0"]  # else one that does not listen takes ten seconds to end
        words += ["--user", f"{NOBODY}:{NOBODY}", "--workdir", "/tmp", "--log-driver", "none"]
        words += ["--tmpfs", f"/tmp:rw,mode=1777,size={limits.tmp_mb}m", "--memory", memory, "--memory-swap", memory]
        words += ["--pids-limit", str(limits.processes), "--ulimit", "core=0", "--ulimit", f"nofile={OPEN_FILES}"]
        words += ["--ulimit", f"nproc={USERS_PROCESSES}"]
        words += ["--cpus", f"{limits.cpus:g}"]
        words += ["--ulimit", f"cpu={max(1, round(limits.cpu_s))}", "--ulimit", f"fsize={output}"]
        return words + [word for place in places for word in ("--volume", f"{place}:{place}:ro")]

    def _runc(self, words: Sequence[str], inside: Mapping[str, str], places: Sequence[Path]) -> list[str]:
        """The bundle is a folder of this machine, for its owner alone: it holds the variables."""
        self._bundle = Path(tempfile.mkdtemp(prefix="rollart-runc-"))
        (self._bundle / "config.json").write_text(json.dumps(self._spec(words, inside, places)))
        return ["runc", "run", "--bundle", str(self._bundle), self.name]

    def _spec(self, words: Sequence[str], inside: Mapping[str, str], places: Sequence[Path]) -> dict[str, object]:
        """By the OCI runtime specification."""
        limits = self.settings
        rlimits = {"CORE": 0, "NOFILE": OPEN_FILES, "CPU": max(1, round(limits.cpu_s)), "FSIZE": limits.output_mb * MIB}
        memory = limits.memory_mb * MIB
        share = {"period": PERIOD_US, "quota": round(limits.cpus * PERIOD_US)}
        own = ["nosuid", "nodev"]
        size = f"size={limits.tmp_mb * MIB}"
        mounts: list[dict[str, object]] = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "mode=755", "size=64k"],
            },
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*own, "mode=1777", size]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": [*own, "mode=1777", size]},
        ]
        for place in places:
            options = ["rbind", "ro", "nosuid", "nodev"]
            mounts.append({"destination": str(place), "type": "bind", "source": str(place), "options": options})
        hidden = ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware"]
        return {
            "ociVersion": "1.0.2",
            "hostname": "container",
            "root": {"path": str(Path(self.container.image).absolute()), "readonly": True},
            "process": {
                "user": {"uid": NOBODY, "gid": NOBODY},
                "args": list(words),
                "env": [f"{name}={value}" for name, value in {"PATH": os.defpath, **inside}.items()],
                "cwd": "/tmp",
                "noNewPrivileges": True,
                "capabilities": {},
                "rlimits": [
                    {"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in rlimits.items()
                ],
            },
            "mounts": mounts,
            "linux": {
                "namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount", "cgroup")],
                "resources": {
                    "devices": [{"allow": False, "access": "rwm"}],
                    "memory": {"limit": memory, "swap": memory},
                    "pids": {"limit": limits.processes},
                    "cpu": share,
                },
                "maskedPaths": hidden,
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
            },
        }


def environment_inside(environment: Mapping[str, str], code: Sequence[Path]) -> dict[str, str]:
    """What of a process's environment it gets in an image, with which this code is found."""
    paths = os.pathsep.join(dict.fromkeys(str(place.parent) for place in code))
    inside = {name: value for name, value in environment.items() if name not in NAMED}
    return {**inside, **OWN, "PYTHONPATH": paths}


def clients_environment(removing: str) -> dict[str, str]:
    """What a runtime's client is given, and `KEPT`. `removing`: a command of a shell."""
    found = {name: os.environ[name] for name in CLIENTS if name in os.environ}
    return found | {"LIFE": str(lifeline()), "REMOVE": removing}


def unusable(container: ContainerSettings) -> str:
    """Why no container can be made here, and the fix; nothing where one can, as far as is seen without starting one."""
    runtime, image = container.runtime, container.image
    if shutil.which(runtime) is None:
        return f"runtime: {runtime} is not on this machine; install it ({INSTALL[runtime]}), or give another"
    if runtime == "runc":
        return "" if Path(image).is_dir() else f"image: {image} is no folder; runc takes the root of an unpacked image"
    done = subprocess.run([runtime, "image", "inspect", image], capture_output=True, timeout=REMOVE_S, check=False)
    if done.returncode == 0:
        return ""
    said = " ".join(done.stderr.decode(errors="replace").split())[-200:]
    return f"image: {image} is not here ({said}); bring it: {runtime} pull {image}"

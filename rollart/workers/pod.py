"""A box that is a pod of Kubernetes: `kubectl run` makes it, and carries its standard input and output.

Its machine may be any of the cluster, so nothing of this one can be mounted into it. RollArt's code, the task set's,
what is to be read and the variables go ahead of the calls over the standard input (`opening`), to a few lines of Python
(`BEGIN`) that put them in their places, bound the process and become the worker. So no variable is in the pod's
description, where others may read it. The places are in memory, and count as the pod's.

No token of the cluster, no capabilities, a root that cannot be written, a user that no other pod has. A pod cannot be
told to have no network: a NetworkPolicy does that (`deploy/environment-pods.yaml`), and a pod that finds the cluster's
API within reach ends itself. The pod is deleted by its name, by us or, when we are gone, by a shell that waited; where
this machine is gone too, the cluster ends it in time.
"""

import functools
import io
import json
import math
import os
import secrets
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rollart
from rollart.config.settings import ContainerSettings, SandboxSettings
from rollart.types import JsonObject
from rollart.workers.container import KEPT, REMOVE_S, clients_environment, environment_inside
from rollart.workers.sandbox import FIRST_USER, MIB, OPEN_FILES, OWN_TMP

START_S = 300.0
"""How long the cluster may take to find a machine, fetch the image and start it."""
SPARE_S = 3600
"""A pod that nobody deleted ends this long after the longest life of an environment: it may have been started ahead."""
MANAGER = "app.kubernetes.io/managed-by"
LABELS = {MANAGER: "rollart", "app.kubernetes.io/component": "environment"}
MAX_SENT_BYTES = 64 * MIB
BEGIN = Path(__file__).with_name("begin.py").read_text()
RUN = 'ulimit -f "$BLOCKS"; kubectl "$@"; ended=$?; [ $ended = 0 ] || $ASK -o jsonpath="$WHY" >&2; exit $ended'
"""What became of a pod that did not end well is written behind what `kubectl` said of it. The log is bounded."""
BLOCK_BYTES = 512
"""What a shell counts files in."""
WHY = (
    "{.status.reason} {.status.message} {.status.containerStatuses[*].state.waiting.reason} "
    "{.status.containerStatuses[*].state.waiting.message} {.status.containerStatuses[*].state.terminated.reason} "
    '{.status.containerStatuses[*].state.terminated.message} {.status.conditions[?(@.status=="False")].message}'
)
ENDED = "{.status.reason} {.status.containerStatuses[*].state.terminated.reason}"
RIGHTS = (("create", "pods/attach"), ("get", "pods"), ("watch", "pods"), ("delete", "pods"))
"""What is needed beside making pods, which is tried."""


@dataclass(slots=True, kw_only=True)
class Pod:
    """The box of one process."""

    settings: SandboxSettings
    container: ContainerSettings
    code: Sequence[Path] = ()
    """Files and packages of this machine that can be imported inside."""
    read: Sequence[Path] = ()
    """Files and folders of this machine that can be read inside, under the same names."""
    name: str = field(default_factory=lambda: f"rollart-{secrets.token_hex(8)}")
    opening: bytes = field(default=b"", init=False)
    pass_fds: tuple[int, ...] = field(default=(), init=False)

    @property
    def output_bytes(self) -> int:
        return self.settings.output_mb * MIB

    @property
    def ends_with_command(self) -> bool:
        return False

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """`words`: a command of this machine's Python, which becomes one of the image's."""
        limits = self.settings
        code = [Path(rollart.__file__).parent, *self.code]
        bounds = {
            "CORE": 0,
            "CPU": max(1, round(limits.cpu_s)),
            "FSIZE": limits.output_mb * MIB,
            "NPROC": limits.processes,
            "NOFILE": OPEN_FILES,
        }
        head = json.dumps(
            {"words": words[1:], "environment": environment_inside(environment, code), "bounds": bounds}
        ).encode()
        body = packed(tuple(self._places))
        self.opening = len(head).to_bytes(8, "big") + head + len(body).to_bytes(8, "big") + body
        run = [*self._scope, "run", self.name, "--image", self.container.image, "--restart", "Never", "--stdin"]
        run += ["--quiet", "--pod-running-timeout", f"{START_S:g}s", "--overrides", json.dumps(self.manifest())]
        here = {
            **os.environ,
            **clients_environment(shlex.join(self._removing)),
            "ASK": " ".join(self._asking),
            "WHY": WHY,
        }
        here["BLOCKS"] = str(self.output_bytes // BLOCK_BYTES)
        self.pass_fds = (int(here["LIFE"]),)
        return [*KEPT, "sh", "-c", RUN, "sh", *run], here

    def over(self) -> str:
        """Blocks: the cluster is asked."""
        words = [*self._asking, "--output", f"jsonpath={ENDED}"]
        said = _said(words).split()
        if "OOMKilled" in said:
            return f"it went over sandbox.memory_mb {self.settings.memory_mb}"
        if "DeadlineExceeded" in said:
            return f"it went over sandbox.wall_s {self.settings.wall_s:g}"
        return ""

    def remove(self) -> None:
        _said(self._removing)

    def manifest(self) -> JsonObject:
        limits = self.settings
        most: JsonObject = {"cpu": f"{math.ceil(1000 * limits.cpus)}m", "memory": f"{limits.memory_mb}Mi"}
        user = FIRST_USER + secrets.randbelow(FIRST_USER - 1)
        points = [OWN_TMP, *mount_points(self._places)]
        memory: JsonObject = {"medium": "Memory", "sizeLimit": f"{limits.tmp_mb}Mi"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "labels": dict(LABELS)},
            "spec": {
                **self.container.pod,
                "restartPolicy": "Never",
                "activeDeadlineSeconds": math.ceil(limits.wall_s) + SPARE_S,
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": user,
                    "runAsGroup": user,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "volumes": [{"name": f"place-{number}", "emptyDir": memory} for number in range(len(points))],
                "containers": [
                    {
                        "name": "environment",
                        "image": self.container.image,
                        "command": [self.container.python, "-c", BEGIN],
                        "workingDir": OWN_TMP,
                        "stdin": True,
                        "stdinOnce": True,
                        "resources": {"requests": most, "limits": most},
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "volumeMounts": [
                            {"name": f"place-{number}", "mountPath": point} for number, point in enumerate(points)
                        ],
                    }
                ],
            },
        }

    @property
    def _places(self) -> list[Path]:
        return list(dict.fromkeys([Path(rollart.__file__).parent, *self.code, *self.read]))

    @property
    def _scope(self) -> list[str]:
        return ["--namespace", self.container.namespace] if self.container.namespace else []

    @property
    def _asking(self) -> list[str]:
        return ["kubectl", *self._scope, "get", "pod", self.name, "--ignore-not-found"]

    @property
    def _removing(self) -> list[str]:
        return ["kubectl", *self._scope, "delete", "pod", self.name, "--ignore-not-found", "--now", "--wait=false"]

    def unusable(self) -> str:
        """The key of `container`, and why no such pod can be made, with the fix; nothing where the cluster would take
        it. Removes what others left that has ended."""
        if shutil.which("kubectl") is None:
            return (
                "runtime: kubectl is not on this machine; install it (kubernetes.io/docs/tasks/tools), or give another"
            )
        size = sum(file.stat().st_size for place in self._places for file in files_of(place))
        if size > MAX_SENT_BYTES:
            return (
                f"image: {size / MIB:.0f} MiB of code and sandbox.read would be sent to each pod, at most "
                f"{MAX_SENT_BYTES // MIB} are; put them into the image"
            )
        if "/" in mount_points(self._places):
            return "image: a file in / cannot be put into a pod; keep the task's files in a folder"
        tried = ["kubectl", *self._scope, "create", "--dry-run=server", "--filename", "-"]
        try:
            _asked(tried, json.dumps(self.manifest()))
            for verb, what in RIGHTS:
                _asked(["kubectl", *self._scope, "auth", "can-i", verb, what])
        except _Refused as refused:
            return (
                f"runtime: the cluster takes no such pod ({refused}); see `kubectl config current-context`, and what "
                "deploy/environment-pods.yaml allows"
            )
        ended = "status.phase!=Pending,status.phase!=Running"
        left = ["--selector", f"{MANAGER}={LABELS[MANAGER]}", "--field-selector", ended]
        _said(["kubectl", *self._scope, "delete", "pods", *left, "--wait=false"])
        return ""


class _Refused(Exception):
    """With what `kubectl` said."""


def _asked(words: Sequence[str], given: str = "") -> str:
    """What `kubectl` answers. Raises _Refused."""
    try:
        done = subprocess.run(
            words, input=given.encode(), env=os.environ, capture_output=True, timeout=REMOVE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _Refused(f"no answer in {REMOVE_S:g} s to {' '.join(words)}") from error
    if done.returncode:
        said = " ".join((done.stderr + b" " + done.stdout).decode(errors="replace").split())
        raise _Refused(f"{' '.join(words[:-2]) if given else ' '.join(words)}: {said[-400:]}")
    return done.stdout.decode(errors="replace")


def _said(words: Sequence[str]) -> str:
    """The same, or nothing."""
    try:
        return _asked(words)
    except _Refused:
        return ""


def mount_points(places: Sequence[Path]) -> list[str]:
    """Folders that a pod needs for these, outermost only, /tmp left out: it has one."""
    wanted = sorted({str(place if place.is_dir() else place.parent) for place in places})
    found: list[str] = [OWN_TMP]
    for place in wanted:
        if not any(place == other or place.startswith(f"{other}/") for other in found):
            found.append(place)
    return found[1:]


def files_of(place: Path) -> list[Path]:
    """What of a place is sent: files, not what was compiled from them."""
    found = sorted(place.rglob("*")) if place.is_dir() else [place]
    return [file for file in found if file.is_file() and "__pycache__" not in file.parts]


@functools.cache
def packed(places: tuple[Path, ...]) -> bytes:
    """As they are when first asked for: all environments of a job play the same code."""
    kept = io.BytesIO()
    with tarfile.open(fileobj=kept, mode="w:gz", compresslevel=6, dereference=True) as tar:
        for file in dict.fromkeys(file for place in places for file in files_of(place)):
            tar.add(file, recursive=False)
    return kept.getvalue()

"""A stand-in for `kubectl` and a cluster of one machine: it runs the very pod that it is given, by podman.

For tests where no cluster is at hand. Of a pod it does what podman can: user, command, limits, memory-backed places,
a root that is read-only, no network. What the cluster itself adds is not here: admission, policies, a scheduler.
"""

import itertools
import json
import os
import subprocess
import sys
from typing import Any

STANDS_FOR = "ROLLART_TEST_PLACES"
"""Places of this machine that stand for what an image has."""


def ran(name: str, pod: dict[str, Any]) -> int:
    spec = pod["spec"]
    (container,) = spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    user, limits = spec["securityContext"], container["resources"]["limits"]
    assert container["stdin"]
    assert container["stdinOnce"]
    assert spec["automountServiceAccountToken"] is False
    words = ["podman", "run", "--interactive", "--name", name, "--network", "none", "--log-driver", "none"]
    words += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--workdir", container["workingDir"]]
    words += ["--memory", limits["memory"].replace("Mi", "m"), "--cpus", str(int(limits["cpu"][:-1]) / 1000)]
    words += ["--memory-swap", limits["memory"].replace("Mi", "m"), "--ulimit", "nofile=1024", "--ulimit", "nproc=4096"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    words += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    for volume in spec["volumes"]:
        size = volume["emptyDir"]["sizeLimit"].replace("Mi", "m")
        words += ["--tmpfs", f"{mounts[volume['name']]}:rw,mode=1777,size={size}"]
    for place in os.environ[STANDS_FOR].split(os.pathsep):
        words += ["--volume", f"{place}:{place}:ro"]
    return subprocess.run([*words, container["image"], *container["command"]], check=False).returncode


def state(name: str) -> str:
    words = ["podman", "inspect", name, "--format", "{{.State.OOMKilled}} {{.State.ExitCode}}"]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    return "OOMKilled" if said[:1] == ["true"] else ""


def main(words: list[str]) -> int:
    match words:
        case ["run", name, *options]:
            given = dict(itertools.pairwise(options))
            return ran(name, json.loads(given["--overrides"]))
        case ["create", *_]:
            json.load(sys.stdin)
            return 0
        case ["auth", *_]:
            return 0
        case ["get", "pod", name, *_]:
            sys.stdout.write(state(name))
            return 0
        case ["delete", "pod", name, *_]:
            return subprocess.run(["podman", "rm", "--force", "--time", "0", name], check=False).returncode
        case ["delete", "pods", *_]:
            return 0
        case ["get", "pods", *_]:
            return subprocess.run(["podman", "ps", "--all", "--quiet"], check=False).returncode
    sys.exit(f"not known here: {words}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The logic of `rollart reward build`: a folder that deploys reward functions to a platform of functions.

The folder holds the functions, the few modules of ours that they need, the pinned packages that these need, and the
platform's own description. What is in it was found by importing the functions in a process of its own. No secret is
written: the token is one of the platform's variables.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollart.errors import JobError
from rollart.rewards.function import FUNCTION_VARIABLE, TOKEN_VARIABLE, parse_functions
from rollart.tasks.load import load_reward

SERVER = "functions-framework"
ROOT = Path(__file__).resolve().parents[2]
LOADED = """
import json, sys
from rollart.rewards.function import load_reward
for name in json.loads(sys.argv[1]):
    load_reward(name)
print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}))
"""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
"""What the wheels may be built for; Lambda and Function Compute have a C library of 2.28 or newer."""
MEMORY_MB, TIMEOUT_S, PORT = 512, 60, 9000


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What a folder is made from."""

    out: Path
    functions: str
    """As the platform's variable says it: files by their place in the folder."""
    requirements: tuple[str, ...]
    python: str
    """Version, such as 3.12."""


def build(target: str, functions: str, out: Path, *, python: str = "", install: bool = True) -> list[str]:
    """Make the folder. Returns the commands that come next. `install`: also fetch the packages that go into it."""
    if out.exists():
        raise JobError(f"--out: {out} exists; give a folder that does not, or remove it")
    names = parse_functions(functions)
    for name in names.values():
        load_reward(name)  # a wrong name is told now
    modules = _modules(list(names.values()))
    out.mkdir(parents=True)
    try:
        return _filled(target, names, modules, out, python, install=install)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _filled(
    target: str, names: Mapping[str, str], modules: Mapping[str, str], out: Path, python: str, *, install: bool
) -> list[str]:
    for path in sorted(Path(file) for name, file in modules.items() if name.partition(".")[0] == "rollart"):
        _copy(path, out / path.relative_to(ROOT))
    here = {domain: _placed(name, out) for domain, name in names.items()}
    package = Package(
        out=out,
        functions=",".join(f"{domain}={name}" if domain else name for domain, name in here.items()),
        requirements=_requirements(modules),
        python=python or f"{sys.version_info.major}.{sys.version_info.minor}",
    )
    (out / "requirements.txt").write_text("".join(f"{line}\n" for line in package.requirements))
    return TARGETS[target](package, install)


def _modules(names: list[str]) -> Mapping[str, str]:
    """The files that were imported to have the functions."""
    command = [sys.executable, "-c", LOADED, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(f"reward build: the functions cannot be imported by themselves: {done.stderr.strip()[-500:]}")
    found: Mapping[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _requirements(modules: Mapping[str, str]) -> tuple[str, ...]:
    """The distributions that the imported modules belong to, at the versions they have here."""
    owners = importlib.metadata.packages_distributions()
    found = {
        dist
        for name in modules
        for dist in owners.get(name.partition(".")[0], [])
        if dist.lower() not in ("rollart", "setuptools", "pip")
    }
    return tuple(f"{dist}=={importlib.metadata.version(dist)}" for dist in sorted(found, key=str.lower))


def _placed(name: str, out: Path) -> str:
    """A function of a file: the file goes along. One of a module comes with its package."""
    module, _, function = name.rpartition(":")
    if not module.endswith(".py"):
        return name
    place = Path("functions") / Path(module).name
    if (out / place).exists():
        raise JobError(f"reward build: two files are called {place.name}; rename one of them")
    _copy(Path(module), out / place)
    return f"{place}:{function}"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _container(package: Package, install: bool) -> list[str]:
    """An image for Knative, Cloud Run or any other platform that runs containers which listen on $PORT."""
    (package.out / "Dockerfile").write_text(
        f"""FROM python:{package.python}-slim
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt {SERVER}
COPY . .
ENV {FUNCTION_VARIABLE}="{package.functions}" PYTHONPATH=/app PORT=8080
USER nobody
CMD exec {SERVER} --source rollart/rewards/function.py --target handle --host 0.0.0.0 --port $PORT
"""
    )
    (package.out / "service.yaml").write_text(
        f"""apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: rollart-reward}}
spec:
  template:
    metadata:
      annotations: {{autoscaling.knative.dev/min-scale: "0", autoscaling.knative.dev/max-scale: "100"}}
    spec:
      containerConcurrency: 4
      timeoutSeconds: {TIMEOUT_S}
      containers:
        - image: IMAGE
          env:
            - name: {TOKEN_VARIABLE}
              valueFrom: {{secretKeyRef: {{name: rollart-reward, key: token}}}}
"""
    )
    return [
        f"docker build -t IMAGE {package.out} && docker push IMAGE",
        "kubectl create secret generic rollart-reward --from-literal=token=$ROLLART_REWARD_TOKEN",
        f"sed -i s#IMAGE#your-image# {package.out}/service.yaml && kubectl apply -f {package.out}/service.yaml",
    ]


def _lambda(package: Package, install: bool) -> list[str]:
    if install:
        _fetch(package, package.out)
    archive = package.out / "function.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for path in sorted(package.out.rglob("*")):
            if path.is_file() and path != archive and "__pycache__" not in path.parts:
                opened.write(path, path.relative_to(package.out))
    variables = json.dumps({"Variables": {FUNCTION_VARIABLE: package.functions}})
    create = (
        f"aws lambda create-function --function-name rollart-reward --runtime python{package.python} "
        f"--handler rollart.rewards.function.lambda_handler --memory-size {MEMORY_MB} --timeout {TIMEOUT_S} "
        f"--zip-file fileb://{archive} --role YOUR_ROLE_ARN "
        f"--environment '{variables}'"
    )
    return [create, "rollart train JOB rewards.type=http rewards.url=lambda://rollart-reward"]


def _function_compute(package: Package, install: bool) -> list[str]:
    """Alibaba's Function Compute, custom runtime: a program called bootstrap that listens on a port."""
    package = Package(
        out=package.out,
        functions=package.functions,
        requirements=(*package.requirements, SERVER),
        python=package.python,
    )
    (package.out / "requirements.txt").write_text("".join(f"{line}\n" for line in package.requirements))
    if install:
        _fetch(package, package.out / "python")
    bootstrap = package.out / "bootstrap"
    bootstrap.write_text(
        f"""#!/bin/sh
cd "$(dirname "$0")"
export PYTHONPATH=python:. {FUNCTION_VARIABLE}="{package.functions}"
exec python3 -m functions_framework --source rollart/rewards/function.py --target handle --host 0.0.0.0 --port {PORT}
"""
    )
    bootstrap.chmod(0o755)
    (package.out / "s.yaml").write_text(
        f"""edition: 3.0.0
name: rollart-reward
resources:
  reward:
    component: fc3
    props:
      region: cn-hangzhou
      functionName: rollart-reward
      runtime: custom.debian10
      code: .
      memorySize: {MEMORY_MB}
      timeout: {TIMEOUT_S}
      instanceConcurrency: 4
      customRuntimeConfig: {{command: [./bootstrap], port: {PORT}}}
      environmentVariables: {{{TOKEN_VARIABLE}: "${{env('{TOKEN_VARIABLE}')}}"}}
      triggers:
        - triggerName: http
          triggerType: http
          triggerConfig: {{authType: anonymous, methods: [POST, HEAD]}}
"""
    )
    return [
        f"cd {package.out} && s deploy",
        "rollart train JOB rewards.type=http rewards.url=fc://ADDRESS   # of the trigger, which s deploy prints",
    ]


def _fetch(package: Package, into: Path) -> None:
    """The packages, built for the platform's Linux and Python."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(into)]
    command += ["--only-binary=:all:", "--python-version", package.python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    done = subprocess.run([*command, *package.requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(
            f"reward build: pip could not fetch {', '.join(package.requirements)}: {done.stderr.strip()[-500:]}; "
            "or leave that to you with --no-install"
        )


TARGETS: dict[str, Callable[[Package, bool], list[str]]] = {
    "container": _container,
    "lambda": _lambda,
    "fc": _function_compute,
}

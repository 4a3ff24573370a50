"""A package as a small project: its files without its tests, written somewhere, and its tests run on it.

Files come from where the package is installed. Compiled files go along, with the times they were compiled at: a first
import then compiles what was changed, and no more.
"""

import contextlib
import functools
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rollart.config.settings import SandboxSettings
from rollart.errors import JobError
from rollart.workers.sandbox import INSIDE, Sandbox, missing
from rollart.workers.variables import for_children

RUN_S = 20.0
"""Longest run of tests; those of the catalogue take two seconds at most. Below what a job gives a reward function by
default: a model's endless loop earns 0, and is no failure of the function."""
HIDDEN_LIMITS = SandboxSettings(memory_mb=1024, processes=32, cpu_s=RUN_S, tmp_mb=64, output_mb=4)
MAX_SAID = 2**20
"""Bytes at the end of what a run said, which is on disk, and bounded by its sandbox."""
REPORT = "rollart.tasks.repair_report"
"""The plugin that says which tests passed, after a word that it is given."""
PYTEST = (
    "-q",
    "-x",
    "--tb=short",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "-c",
    os.devnull,
    "--import-mode=importlib",
)


class File(NamedTuple):
    """One file of a package."""

    data: bytes
    time_ns: int


class Ran(NamedTuple):
    """A run of tests."""

    well: bool
    """It ended by itself, and none failed."""
    passed: frozenset[str]
    """By their names in the file. Those that were skipped are not among them."""
    said: str


@functools.cache
def site_of(package: str) -> Path:
    """The folder that the package is installed in. Raises JobError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise JobError(f"code_repair plays with {package}, which is not installed: pip install 'rollart[repair]'")
    return Path(spec.submodule_search_locations[0]).absolute().parent


@functools.cache
def package_files(package: str) -> Mapping[str, File]:
    """By path, such as `toolz/itertoolz.py`: what of it is no test, with its data, what was compiled, and modules that
    tests import from one another."""
    site = site_of(package)
    found = {}
    for path in sorted((site / package).rglob("*")):
        tested = "tests" in path.relative_to(site).parts
        if path.is_file() and not (tested and path.suffix != ".py") and not path.name.startswith(("test_", "conftest")):
            found[str(PurePosixPath(path.relative_to(site)))] = File(path.read_bytes(), path.stat().st_mtime_ns)
    return found


def write_project(folder: Path, package: str, changed: Mapping[str, str]) -> None:
    """The package below this folder, with these files as they are now."""
    for name, file in package_files(package).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in changed:
            path.write_text(changed[name])
        else:
            path.write_bytes(file.data)
            os.utime(path, ns=(file.time_ns, file.time_ns))


def test_file(package: str, name: str) -> str:
    return (site_of(package) / name).read_text()


def run_tests(project: Path, tests: Path, only: str = "", *, package: str = "") -> Ran:
    """These tests, on the package in this folder. Inside a sandbox as they are; elsewhere in a new one, where the
    package is found nowhere else."""
    words = [sys.executable, "-m", "pytest", *PYTEST, "-p", REPORT]
    words += [f"{tests}::{only}" if only else str(tests)]
    paths = os.pathsep.join([str(project), *(path or os.getcwd() for path in sys.path)])
    environment = {**for_children(os.environ, ()), "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if INSIDE in os.environ:
        return _run(words, {**environment, "PYTHONDONTWRITEBYTECODE": ""}, project)
    if why := missing():
        raise JobError(f"code_repair runs what a model wrote in a sandbox, which {why}")
    box = Sandbox(settings=HIDDEN_LIMITS, read=[project, tests], hide=[site_of(package) / package])
    words, environment = box.command(words, environment)
    try:
        return _run(words, environment, None)
    finally:
        box.remove()


def _run(words: list[str], environment: Mapping[str, str], folder: Path | None) -> Ran:
    word = secrets.token_hex(16)
    late = ""
    with tempfile.TemporaryFile() as out:
        with subprocess.Popen(
            words,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as run:
            try:
                run.communicate(word.encode(), timeout=RUN_S)
            except subprocess.TimeoutExpired:
                late = f"the tests did not end within {RUN_S:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(run.pid, signal.SIGKILL)
        out.seek(max(0, out.seek(0, os.SEEK_END) - MAX_SAID))
        passed, said = _report(out.read().decode(errors="replace"), word)
    return Ran(run.returncode == 0 and bool(passed), frozenset(passed), late or said)


def _report(said: str, word: str) -> tuple[list[str], str]:
    """The tests that passed, and what was said before."""
    before, found, line = said.rpartition(f"\n{word} ")
    return (json.loads(line.partition("\n")[0]), before) if found else ([], said)

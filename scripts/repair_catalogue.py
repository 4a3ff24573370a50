"""Finds the mutations that a package's own tests notice: `python -m scripts.repair_catalogue [--per-file N]`.

For each file that has a test file, mutations are put into the running package one at a time, in a child process that
then runs those tests; what fails fast is kept. The catalogue (`rollart/tasks/code_repair.json`) holds places and names
of tests only, no line of anybody's code: whoever plays has the package installed, and the same files by their hash.
"""

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import signal
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollart.tasks.repair_mutations import mutations
from rollart.tasks.repair_project import PYTEST, site_of

PACKAGES = ("toolz", "mpmath", "networkx")
BY_HAND = {
    "mpmath/matrices/matrices.py": "mpmath/tests/test_matrices.py",
    "mpmath/matrices/linalg.py": "mpmath/tests/test_linalg.py",
    "mpmath/matrices/eigen_symmetric.py": "mpmath/tests/test_eigen_symmetric.py",
    "mpmath/calculus/differentiation.py": "mpmath/tests/test_diff.py",
    "mpmath/calculus/polynomials.py": "mpmath/tests/test_calculus.py",
    "mpmath/identification.py": "mpmath/tests/test_identify.py",
}
"""Test files that are not called as the file is."""
LEFT_OUT = ("toolz/sandbox/parallel.py",)
"""Starts processes of its own."""
LONGEST_S = 2.0
"""Of a test file, well or with a mutation: an episode runs it several times."""
OUT = Path(__file__).parents[1] / "rollart" / "tasks" / "code_repair.json"


class Seen:
    """Notes which test failed first, and how many passed."""

    def __init__(self) -> None:
        self.failed = ""
        self.passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
        self.passed += report.passed and report.when == "call"


def put_in(functions: list[types.FunctionType], new: types.CodeType) -> None:
    """Every function that was made from the file's code gets the new code, wherever it is known."""
    codes: dict[tuple[str, int], types.CodeType] = {}

    def collect(code: types.CodeType) -> None:
        codes[code.co_qualname, code.co_firstlineno] = code
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                collect(inner)

    collect(new)
    for function in functions:
        code = codes.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if code is not None and len(code.co_freevars) == len(function.__code__.co_freevars):
            function.__code__ = code


def functions_of(path: Path) -> list[types.FunctionType]:
    return [
        found
        for found in gc.get_objects()
        if isinstance(found, types.FunctionType) and found.__code__.co_filename == str(path)
    ]


def tried(path: Path, functions: list[types.FunctionType], tests: Path, source: str | None) -> tuple[str, int] | None:
    """In a child: the first test that fails (empty: none), and how many passed; None where it took too long."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        signal.alarm(int(LONGEST_S) + 1)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        seen = Seen()
        began_s = time.monotonic()
        with contextlib.suppress(BaseException):
            if source is not None:
                put_in(functions, compile(source, str(path), "exec"))
            pytest.main([*PYTEST, str(tests)], plugins=[seen])
            if time.monotonic() - began_s < LONGEST_S:
                os.write(writable, json.dumps([seen.failed, seen.passed]).encode())
        os._exit(0)
    os.close(writable)
    with open(readable, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return tuple(json.loads(said)) if said else None


def names_it(tests: str, test: str, function: str) -> bool:
    """Whether the test's own text names the function."""
    wanted = test.partition("[")[0].split("::")[-1]
    word = function.split(".")[-1]
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.FunctionDef) and node.name == wanted:
            return word in ast.unparse(node)
    return False


def level_of(lines: int, *, named: bool) -> int:
    """1 (a short file, and the test says where) to 4 (a long one, and it does not)."""
    return (1 if named else 3) + (lines > 300)


def of_file(name: str, tests_name: str, per_file: int, folder: Path) -> dict[str, Any] | None:
    site = site_of(name.partition("/")[0])
    path, source = site / name, (site / name).read_text()
    tests = folder / Path(tests_name).name
    tests.write_text((site / tests_name).read_text())
    functions = functions_of(path)
    well = tried(path, functions, tests, None)
    if well is None or well[0] or not well[1]:
        return None
    found = mutations(source)
    lines = source.splitlines()
    rows = []
    for number in sorted(random.Random(name).sample(range(len(found)), min(per_file, len(found)))):
        mutation = found[number]
        changed = "\n".join([*lines[: mutation.line - 1], mutation.new, *lines[mutation.line :]]) + "\n"
        result = tried(path, functions, tests, changed)
        if result is not None and result[0]:
            test = result[0].partition("::")[2]
            named = names_it(tests.read_text(), test, mutation.function)
            if test:
                rows.append([number, test, level_of(len(lines), named=named)])
    sha = hashlib.sha256(path.read_bytes() + (site / tests_name).read_bytes()).hexdigest()[:16]
    return {"tests": tests_name, "sha256": sha, "mutations": rows} if rows else None


def files_of(package: str) -> list[tuple[str, str]]:
    site = site_of(package)
    pairs = []
    for path in sorted((site / package).rglob("*.py")):
        name = str(path.relative_to(site))
        beside = path.parent / "tests" / f"test_{path.name}"
        tests = BY_HAND.get(name) or (str(beside.relative_to(site)) if beside.exists() else "")
        if tests and "tests" not in path.parts and name not in LEFT_OUT:
            pairs.append((name, tests))
    return pairs


def write(out: Path, packages: Sequence[str], files: dict[str, Any]) -> None:
    versions = {package: importlib.metadata.version(package) for package in packages}
    text = json.dumps({"packages": versions, "files": files}, separators=(",", ":"))
    out.write_text(text.replace(']]},"', ']]},\n"') + "\n")  # a file a line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--per-file", type=int, default=40, help="mutations that are tried of each file")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    asked = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    files: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rollart-repair-") as folder:
        for package in asked.packages:
            importlib.import_module(package)
            for name, tests in files_of(package):
                began_s = time.monotonic()
                found = of_file(name, tests, asked.per_file, Path(folder))
                if found is not None:
                    files[name] = found
                write(asked.out, asked.packages, files)
                count = 0 if found is None else len(found["mutations"])
                sys.stderr.write(f"{name}: {count} ({time.monotonic() - began_s:.0f} s)\n")
    total = sum(len(found["mutations"]) for found in files.values())
    sys.stderr.write(f"{total} tasks in {len(files)} files -> {asked.out}\n")


if __name__ == "__main__":
    main()

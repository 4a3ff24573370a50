"""Small mistakes put into the code, one at a time: does the fast suite notice?

    python scripts/mutants.py --count 150 --workers 2 --json

Draws mistakes from a seed, over the folders below: a comparison turned round, `and` for `or`, a number off by
one, `min` for `max`, a condition negated, a call or an assignment left out. The tests of those folders are run once as
they are, to see that all pass and which of them run which line. Then each mistake is put into a copy of the tree: the
tests that run its line, the quick ones first, and where none of them notices all tests of its folder, until one fails.
`rollart/cluster/ray.py` and `rollart/train/fsdp2.py`, which only slow tests run, are left out. What nobody noticed is
listed with file, line and change; whether it is a mistake at all or only another way to write the same thing is for a
person to judge.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    *("rollart", "tests", "docs", "jobs", "deploy", "examples", "benchmarks", "scripts"),
    *("pyproject.toml", "Makefile", "README.md", "CONTRIBUTING.md"),
)
SLOW = ("rollart/cluster/ray.py", "rollart/train/fsdp2.py")
"""Only slow tests run these."""
TESTS: dict[str, tuple[str, ...]] = {
    "policy": ("tests/policy", "tests/control", "tests/sim"),
    "control": ("tests/control", "tests/sim", "tests/test_training.py"),
    "train": ("tests/train", "tests/contracts", "tests/test_training.py"),
    "engines": ("tests/engines", "tests/contracts"),
    "envs": ("tests/envs", "tests/contracts", "tests/tasks"),
    "rewards": ("tests/rewards", "tests/contracts"),
    "store": ("tests/store", "tests/contracts"),
    "cluster": ("tests/cluster", "tests/contracts", "tests/test_training.py"),
    "tasks": ("tests/tasks", "tests/envs", "tests/rewards"),
    "gateway": ("tests/gateway", "tests/control/test_programs.py"),
    "launch": (
        "tests/real/test_checks.py",
        "tests/sim/test_plan.py",
        "tests/test_driver.py",
        "tests/test_resources.py",
    ),
    "workers": ("tests/cluster", "tests/envs", "tests/tasks", "tests/test_wire.py"),
}
"""Folder of the package -> its fast tests."""
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
NEAREST = 40
"""Tests that run a mistake's line which are tried before all tests of its folder."""
LIMIT_S = 420
"""For the tests of one mistake: one that makes them hang is noticed too."""


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    before: str
    after: str
    start: int
    """Byte range of `before` in the file."""
    end: int
    number: int = 0
    """Of the draw, from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before!r} -> {self.after!r}"


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    noticed_by: str
    """The test that failed; empty where none did."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=1, help="number of the mistake to begin with; those before it come last"
    )
    parser.add_argument("--folders", nargs="*", default=list(TESTS), choices=list(TESTS))
    parser.add_argument("--files", nargs="*", default=[], help="only these, as store/tcp.py")
    parser.add_argument(
        "--skip", type=Path, help="file of tests, or test files, that fail anyway on this machine, one a line"
    )
    parser.add_argument("--list", action="store_true", help="only show what would be put in")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    mutants = draw(args.folders, args.count, args.seed, args.files)
    mutants = mutants[args.first - 1 :] + mutants[: args.first - 1]
    if args.list:
        for mutant in mutants:
            print(f"{mutant.number}: {mutant}")
        return 0
    skipped = args.skip.read_text().splitlines() if args.skip else []
    with tempfile.TemporaryDirectory(prefix="rollart-mutants-") as folder:
        tried = Tried.of({mutant.file.split("/")[1] for mutant in mutants}, Path(folder), skipped)
        verdicts = run(mutants, args.workers, skipped, tried, Path(folder))
    unnoticed = [verdict.mutant for verdict in verdicts if not verdict.noticed_by]
    if args.json:
        rows = [{**asdict(verdict.mutant), "noticed_by": verdict.noticed_by} for verdict in verdicts]
        print(json.dumps({"mutants": len(verdicts), "noticed": len(verdicts) - len(unnoticed), "rows": rows}, indent=1))
    else:
        for mutant in unnoticed:
            print(f"unnoticed: {mutant.number}: {mutant}")
        print(f"{len(verdicts) - len(unnoticed)} of {len(verdicts)} noticed")
    return 0


def draw(folders: list[str], count: int, seed: int, files: list[str]) -> list[Mutant]:
    """`count` mistakes, in the order they were drawn: any first part of them is a fair draw too."""
    rng = random.Random(seed)
    found = [
        mutant
        for folder in folders
        for path in sorted((ROOT / "rollart" / folder).rglob("*.py"))
        for mutant in of(path)
    ]
    wanted = {f"rollart/{name}" for name in files}
    found = [mutant for mutant in found if mutant.file not in SLOW and (not wanted or mutant.file in wanted)]
    drawn = rng.sample(found, min(count, len(found)))
    return [replace(mutant, number=number) for number, mutant in enumerate(drawn, start=1)]


def of(path: Path) -> list[Mutant]:
    """Every mistake that can be put into a file, the same places once."""
    text = path.read_bytes()
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], Mutant] = {}
    for node, after in _changes(tree, text.decode()):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = text[start:end].decode()
        if before != after:
            name = str(path.relative_to(ROOT))
            found[start, end, after] = Mutant(name, node.lineno, before, after, start, end)
    return list(found.values())


def _changes(tree: ast.Module, text: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.expr | ast.stmt):
                    yield from _change(node, text)


def _change(node: ast.expr | ast.stmt, text: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield node, f"{_source(left, text)} {COMPARISONS[type(op)]} {_source(right, text)}"
        case ast.BoolOp(op=op, values=[first, second]):
            yield node, f"{_source(first, text)} {'or' if isinstance(op, ast.And) else 'and'} {_source(second, text)}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({_source(operand, text)})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right) if not _is_text(left, right):
            yield node, f"({_source(left, text)} {'-' if isinstance(op, ast.Add) else '+'} {_source(right, text)})"
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=right) if not _is_text(left, right):
            yield node, f"({_source(left, text)} {'/' if isinstance(op, ast.Mult) else '*'} {_source(right, text)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() as value) if value in (0, 1, 2):
            yield node, str(value + 1)
        case ast.Call(func=ast.Name(id="min" | "max" as name) as func):
            yield func, "max" if name == "min" else "min"
        case ast.If(test=test):
            yield test, f"not ({_source(test, text)})"
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield node, "pass"
        case ast.Break() | ast.Continue():
            yield node, "pass"


def _source(node: ast.expr, text: str) -> str:
    return f"({ast.get_source_segment(text, node)})"


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )


@dataclass(frozen=True)
class Tried:
    """The tests, run once without a mistake."""

    lines: dict[str, dict[int, list[str]]]
    """File -> line -> the tests that run it, the quickest first."""

    @classmethod
    def of(cls, folders: set[str], place: Path, skipped: list[str]) -> "Tried":
        """Raises SystemExit where one fails: it would be taken to notice every mistake."""
        copy = _copy(place / "tried")
        tests = sorted({test for folder in folders for test in TESTS[folder] if (copy / test).exists()})
        say(f"running {' '.join(tests)} once, without a mistake")
        more = ["--cov=rollart", "--cov-context=test", "--cov-report=", "--cov-fail-under=0", "--durations=0", "-vv"]
        done = _pytest([*more, *tests], copy, skipped, limit_s=3600)
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            raise SystemExit(f"these fail without any mistake; mend them, or name them in --skip: {failed}")
        seconds = {test: float(took) for took, test in re.findall(r"^([\d.]+)s call +(\S+)", done.stdout, re.MULTILINE)}
        return cls(_lines(copy, seconds))

    def nearest(self, mutant: Mutant) -> list[str]:
        return self.lines.get(mutant.file, {}).get(mutant.line, [])[:NEAREST]


def _lines(copy: Path, seconds: dict[str, float]) -> dict[str, dict[int, list[str]]]:
    """Read from coverage's own file."""
    from coverage.numbits import numbits_to_nums

    found: dict[str, dict[int, list[str]]] = {}
    with sqlite3.connect(copy / ".coverage") as database:
        rows = database.execute(
            "select file.path, context.context, numbits from line_bits "
            "join file on file.id = file_id join context on context.id = context_id"
        )
        for path, context, numbits in rows:
            test = context.partition("|")[0]
            if test:
                lines = found.setdefault(str(Path(path).relative_to(copy)), {})
                for line in numbits_to_nums(numbits):
                    lines.setdefault(line, []).append(test)
    for lines in found.values():
        for tests in lines.values():
            tests[:] = sorted(set(tests), key=lambda test: (seconds.get(test, 0.0), test))
    return found


def run(mutants: list[Mutant], workers: int, skipped: list[str], tried: Tried, place: Path) -> list[Verdict]:
    copies: Queue[Path] = Queue()
    for number in range(workers):
        copies.put(_copy(place / str(number)))

    def judge(mutant: Mutant) -> Verdict:
        copy = copies.get()
        try:
            verdict = Verdict(mutant, _noticed_by(mutant, copy, skipped, tried.nearest(mutant)))
        finally:
            copies.put(copy)
        say(f"{mutant.number}: {mutant}: {verdict.noticed_by or 'UNNOTICED'}")
        return verdict

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(judge, mutants))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _copy(to: Path) -> Path:
    to.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, to / name)
    return to


def _noticed_by(mutant: Mutant, copy: Path, skipped: list[str], nearest: list[str]) -> str:
    path = copy / mutant.file
    whole = path.read_bytes()
    path.write_bytes(whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :])
    folder = mutant.file.split("/")[1]
    try:
        noticed = _first_failure(nearest, copy, skipped) if nearest else ""
        return noticed or _first_failure([test for test in TESTS[folder] if (copy / test).exists()], copy, skipped)
    finally:
        path.write_bytes(whole)


def _first_failure(tests: list[str], copy: Path, skipped: list[str]) -> str:
    try:
        done = _pytest(["-x", "-q", *tests], copy, skipped, limit_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "the tests ran into the time limit"
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].partition(" ")[2] if failed else f"exit code {done.returncode}"


def _pytest(words: list[str], copy: Path, skipped: list[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", *words]
    command += [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in skipped]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit_s)


if __name__ == "__main__":
    sys.exit(main())

"""Small mistakes put into the code, one at a time: does the fast suite notice?

    python scripts/mutants.py --count 150 --workers 2 --json

Draws mistakes from a seed, over the folders below: a comparison turned round, `and` for `or`, a number off by
one, `min` for `max`, a condition negated, a call or an assignment left out. Each is put into a copy of the tree, and
the tests of that folder run until one fails. What nobody noticed is listed with file, line and change; whether it is a
mistake at all or only another way to write the same thing is for a person to judge.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
    "weights": ("tests/weights", "tests/contracts"),
    "cluster": ("tests/cluster", "tests/contracts", "tests/test_training.py"),
    "tasks": ("tests/tasks", "tests/envs", "tests/rewards"),
}
"""Folder of the package -> its fast tests."""
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
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
    parser.add_argument("--folders", nargs="*", default=list(TESTS), choices=list(TESTS))
    parser.add_argument(
        "--skip", type=Path, help="file of tests, or test files, that fail anyway on this machine, one a line"
    )
    parser.add_argument("--list", action="store_true", help="only show what would be put in")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    mutants = draw(args.folders, args.count, args.seed)
    if args.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}: {mutant.before!r} -> {mutant.after!r}")
        return 0
    skipped = args.skip.read_text().splitlines() if args.skip else []
    failing = _failing_anyway({mutant.file.split("/")[1] for mutant in mutants}, skipped)
    if failing:
        print(f"these fail without any mistake; mend them, or name them in --skip: {failing}", file=sys.stderr)
        return 2
    verdicts = run(mutants, args.workers, skipped)
    unnoticed = [verdict.mutant for verdict in verdicts if not verdict.noticed_by]
    if args.json:
        rows = [{**asdict(verdict.mutant), "noticed_by": verdict.noticed_by} for verdict in verdicts]
        print(json.dumps({"mutants": len(verdicts), "noticed": len(verdicts) - len(unnoticed), "rows": rows}, indent=1))
    else:
        for mutant in unnoticed:
            print(f"unnoticed: {mutant.file}:{mutant.line}: {mutant.before!r} -> {mutant.after!r}")
        print(f"{len(verdicts) - len(unnoticed)} of {len(verdicts)} noticed")
    return 0


def draw(folders: list[str], count: int, seed: int) -> list[Mutant]:
    """So many mistakes, in the order they were drawn: any first part of them is a fair draw too."""
    rng = random.Random(seed)
    found = [
        mutant
        for folder in folders
        for path in sorted((ROOT / "rollart" / folder).rglob("*.py"))
        for mutant in of(path)
    ]
    found = [mutant for mutant in found if mutant.file not in SLOW]
    return rng.sample(found, min(count, len(found)))


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


def run(mutants: list[Mutant], workers: int, skipped: list[str]) -> list[Verdict]:
    with tempfile.TemporaryDirectory(prefix="rollart-mutants-") as folder, ThreadPoolExecutor(workers) as pool:
        copies: Queue[Path] = Queue()
        for number in range(workers):
            copies.put(_copy(Path(folder) / str(number)))

        def judge(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                verdict = Verdict(mutant, _noticed_by(mutant, copy, skipped))
            finally:
                copies.put(copy)
            print(f"{mutant.file}:{mutant.line}: {verdict.noticed_by or 'UNNOTICED'}", file=sys.stderr, flush=True)
            return verdict

        return list(pool.map(judge, mutants))


def _copy(to: Path) -> Path:
    to.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, to / name)
    return to


def _failing_anyway(folders: set[str], skipped: list[str]) -> str:
    """A test that would notice every mistake, since it fails without one."""
    with tempfile.TemporaryDirectory(prefix="rollart-mutants-") as place:
        copy = _copy(Path(place) / "tree")
        return next(filter(None, (_first_failure(folder, copy, skipped) for folder in sorted(folders))), "")


def _noticed_by(mutant: Mutant, copy: Path, skipped: list[str]) -> str:
    path = copy / mutant.file
    whole = path.read_bytes()
    path.write_bytes(whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :])
    try:
        return _first_failure(mutant.file.split("/")[1], copy, skipped)
    finally:
        path.write_bytes(whole)


def _first_failure(folder: str, copy: Path, skipped: list[str]) -> str:
    """Of the fast tests of a folder of the package."""
    tests = [test for test in TESTS[folder] if (copy / test).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    command += [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in skipped]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "the tests ran into the time limit"
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].partition(" ")[2] if failed else f"exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())

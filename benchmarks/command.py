"""What every benchmark's command line has: `python -m benchmarks.NAME [--json]`, run from the repository."""

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson


def main(measure: Callable[..., dict[str, Any]]) -> int:
    """Print what `measure` finds, as a table or as JSON. Those of its arguments that are named here are options."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    takes = inspect.signature(measure).parameters
    if "workers" in takes:
        parser.add_argument("--workers", type=int, default=1, help="processes; the figures are the same (default: 1)")
    if "only" in takes:
        parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these experiments (default: all)")
    if "rounds" in takes:
        rounds = takes["rounds"].default
        parser.add_argument("--rounds", type=int, default=rounds, help=f"of each side, interleaved (default: {rounds})")
    if "bounds" in takes:
        parser.add_argument("--bounds", type=int, nargs="+", default=(), help="these bounds too (default: none)")
    if "job" in takes:
        parser.add_argument("--job", type=Path, default=takes["job"].default, help="another job file")
    if "skip" in takes:
        skip = takes["skip"].default
        parser.add_argument("--skip", type=int, default=skip, help=f"steps of each run that are left out ({skip})")
    if "steps" in takes:
        parser.add_argument(
            "--steps", nargs="+", default=(), metavar="MODE=N", help="of these modes, instead of the job's"
        )
    if "read" in takes:
        parser.add_argument("--read", action="store_true", help="run nothing: take what --out has")
    if "seconds" in takes:
        parser.add_argument("--seconds", type=float, help="begin no further run after this long (default: run all)")
    if "out" in takes:
        parser.add_argument("--out", type=Path, help="where run directories are kept (default: below runs/)")
    arguments = vars(parser.parse_args())
    as_json = arguments.pop("json")
    figures = measure(**arguments)
    if as_json:
        sys.stdout.buffer.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        for name, value in figures.items():
            print(f"{name:>24}  {value}")
    return 0

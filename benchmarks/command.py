"""What every benchmark's command line has: `python -m benchmarks.NAME [--json]`, run from the repository."""

import argparse
import inspect
import sys
from collections.abc import Callable
from typing import Any

import orjson


def main(measure: Callable[..., dict[str, Any]]) -> int:
    """Print what `measure` finds, as a table or as JSON. Its `workers` and `only`, where it has them, are options."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    takes = inspect.signature(measure).parameters
    if "workers" in takes:
        parser.add_argument("--workers", type=int, default=1, help="processes; the figures are the same (default: 1)")
    if "only" in takes:
        parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these experiments (default: all)")
    arguments = parser.parse_args()
    figures = measure(**{name: getattr(arguments, name) for name in ("workers", "only") if name in takes})
    if arguments.json:
        sys.stdout.buffer.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        for name, value in figures.items():
            print(f"{name:>24}  {value}")
    return 0

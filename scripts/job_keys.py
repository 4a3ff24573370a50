"""Every key that a job file may have, one a line; or, beside another checkout, those that are lost and new since.

python scripts/job_keys.py
git worktree add /tmp/before COMMIT && python scripts/job_keys.py --before /tmp/before
"""

import argparse
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from rollart.config.job import Job


def keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{above}{name}"
        yield key
        for inner, between in _models(field.annotation, "."):
            yield from keys(inner, key + between)


def _models(annotation: Any, between: str) -> Iterator[tuple[type[BaseModel], str]]:
    """The settings classes in an annotation, and what stands between their keys and the key that holds them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, between
        return
    origin = get_origin(annotation)
    inside = between if origin in (Union, types.UnionType) else ".N."
    for argument in get_args(annotation):
        yield from _models(argument, inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="CHECKOUT", help="a checkout of an earlier version")
    before = parser.parse_args().before
    here = set(keys(Job))
    if before is None:
        print("\n".join(sorted(here)))
        return
    command = [sys.executable, os.path.abspath(__file__)]
    there = set(
        subprocess.check_output(
            command, cwd=before, env={**os.environ, "PYTHONPATH": os.path.abspath(before)}, text=True
        ).split()
    )
    print(f"{len(there)} keys before, {len(here)} now")
    for sign, names in (("lost", there - here), ("new", here - there)):
        print("\n".join(f"{sign} {name}" for name in sorted(names)))


if __name__ == "__main__":
    main()

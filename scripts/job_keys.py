"""Prints every key that a job file may have, one a line, to compare two versions, each run in its own checkout:

diff <(cd BEFORE && python scripts/job_keys.py) <(python scripts/job_keys.py)
"""

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
    print("\n".join(sorted(set(keys(Job)))))


if __name__ == "__main__":
    main()

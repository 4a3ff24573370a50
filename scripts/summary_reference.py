"""Writes docs/summary.md, the reference of `summary.json`, from the structs in rollart/report/summary.py.

The meaning of a field is the docstring below it, its unit is in its type, and the docstring of a struct introduces the
table of its fields. Run by `make docs`; `tests/test_docs.py` fails when the page is out of date.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from rollart.report import summary
from scripts.job_reference import field_meanings, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "summary.md"

INTRO = """\
# summary.json

Made from `rollart/report/summary.py` by `make docs`; do not edit it here.

What a run came to. It is worked out from the events alone, live or afterwards; `rollart sim --json` prints it. In a
simulated run (`clock` is `virtual`) all seconds are virtual. In Python: `rollart.report.summary.Summary`.

`<task>`, `<pool>`, `<how>` and the like stand for names.
"""


def unit_of(annotation: Any) -> str:
    """The first `Meta(title=...)` inside an annotation, wherever it is."""
    if get_origin(annotation) is Annotated:
        return next(str(meta.title) for meta in get_args(annotation) if isinstance(meta, msgspec.Meta))
    return next((unit for part in get_args(annotation) if (unit := unit_of(part))), "")


def below(path: str, annotation: Any) -> tuple[str, Any]:
    """The path to what a field holds, through mappings by name: `waste` is `waste.<how>`, each a `Waste`."""
    while get_origin(annotation) is dict:
        key, annotation = get_args(annotation)
        path = f"{path}.{unit_of(key)}"
    return path, annotation


def struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((found for part in get_args(annotation) if (found := struct_in(part))), None)


def sections(struct: type[msgspec.Struct], path: str = "") -> Iterator[str]:
    """The fields of this struct as a table, then those of the structs that it holds."""
    meanings, fields = field_meanings(summary), get_type_hints(struct, include_extras=True)
    rows, inside = [], []
    for name, annotation in fields.items():
        at, held = below(f"{path}.{name}" if path else name, annotation)
        inner = struct_in(held)
        if inner is None:
            owner = next(base for base in struct.__mro__ if name in base.__annotations__)
            rows.append([f"`{at}`", unit_of(held), meanings.get((owner.__name__, name), "")])
        elif inner is struct:  # `greedy` has what its own struct has, but itself
            rows += [[f"`{at}.{key}`", unit_of(kind), ""] for key, kind in fields.items() if key != name]
        else:
            inside.append((at, inner))
    about = inspect.cleandoc(struct.__doc__) if path and struct.__doc__ else ""
    yield (f"## `{path}`\n" if path else "## The run\n") + (f"\n{about}\n" if about else "")
    yield table(["field", "unit", "meaning"], rows)
    for at, inner in inside:
        yield from sections(inner, at)


def render() -> str:
    return "\n".join([INTRO, *sections(summary.Summary)])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

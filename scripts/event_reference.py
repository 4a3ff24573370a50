"""Writes docs/events.md, the event reference, from the structs in rollart/events/schema.py.

What an event means is the docstring of its struct, what a field holds the docstring below the field, and a heading the
comment above a part of the file. Run by `make docs`; `tests/test_docs.py` fails when the page is out of date.
"""

import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from rollart.events import schema
from scripts.job_reference import field_meanings, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "events.md"

INTRO = """\
# Events

Made from `rollart/events/schema.py` by `make docs`; do not edit it here.

A run writes `events.jsonl`: one JSON object per line, append only. Every decision and every outcome is one event. The
summary and the audit read nothing else.

An example, one generate call (simulated):

```
{"e":"send","n":292,"t":32.1,"cause":44,"id":"g1.0.0/0","engine":"bandwidth-0","pool":"bandwidth","want":"bandwidth",\
"version":0,"why":"least_loaded","prompt":306}
{"e":"said","n":2717,"t":65.389318,"cause":44,"id":"g1.0.0/0","engine":"bandwidth-0","tokens":3199,"spans":[[0,3199]],\
"prefill":306,"cached":0,"busy_s":1.34714,"finish":"stop"}
```

Ids: a group is `g7` (`g7r1` when admitted after the first restart), an attempt `g7.3.0`, a generate call `g7.3.0/2`
(turn 2), an engine `<pool>-<number>`. Attempts of the second life of a coordinator begin at 100, of the third at 200.

In Python, `rollart.events.log.read_events` gives the structs: `schema.Send` for a line whose `e` is `send`, and
`schema.EngineUp` for `engine.up`. A line of a kind that this version does not know, or without a field that it needs,
is an error that names the line.
"""

NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", object: "any value"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the docstring of a struct says."""

    meaning: str
    writers: list[str]
    """Modules below `rollart/`."""
    cause: str


def read_docstring(struct: type[msgspec.Struct]) -> Kind:
    """`By:` and `Cause:` begin a line each, which may go on in the next."""
    parts = re.split(r"\n(By|Cause): ", "\n" + inspect.cleandoc(struct.__doc__ or ""))
    named = {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}
    writers = [name.strip() for name in named.get("By", "").split(",") if name]
    return Kind(meaning=" ".join(parts[0].split()), writers=writers, cause=named.get("Cause", ""))


def sections() -> Iterator[tuple[str, list[type[msgspec.Struct]]]]:
    """Heading and structs, as they stand in the file."""
    parts = re.split(r"^# --- (.+?) -+$", inspect.getsource(schema), flags=re.MULTILINE)
    for title, source in zip(parts[1::2], parts[2::2], strict=True):
        yield title, [getattr(schema, name) for name in re.findall(r"^class (\w+)\(", source, flags=re.MULTILINE)]


def type_text(annotation: Any) -> str:
    """An annotation in words."""
    inner, origin = get_args(annotation), get_origin(annotation)
    if isinstance(annotation, types.UnionType):
        return " or ".join("null" if part is types.NoneType else type_text(part) for part in inner)
    if origin is list:
        return f"list of {type_text(inner[0])}"
    if origin is tuple:
        return "pair of " + " and ".join(map(type_text, inner))
    if origin in (dict, Mapping):
        return f"mapping from name to {type_text(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        title = title_of(annotation)
        return f"[{title}](#{title.lower().replace('.', '')})"
    return NAMES[annotation]


def title_of(struct: type[msgspec.Struct]) -> str:
    tag = struct.__struct_config__.tag
    return struct.__name__ if tag is None else str(tag)


def fields_of(struct: type[msgspec.Struct], meanings: dict[tuple[str, str], str]) -> str:
    """The table of the fields that are its own."""
    common = () if struct is schema.Event else schema.Event.__struct_fields__
    rows = []
    for field in msgspec.structs.fields(struct):
        if field.name not in common:
            left_out = "" if field.required or struct is schema.Event else f"; not there where {default_text(field)}"
            kind = type_text(field.type) + left_out
            rows.append([f"`{field.name}`", kind, meanings[struct.__name__, field.name]])
    return table(["field", "type", "meaning"], rows) if rows else ""


def default_text(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    match value:
        case "" | {}:
            return "empty"
        case None:
            return "null"
    return f"`{str(value).lower()}`"


def struct_text(struct: type[msgspec.Struct], meanings: dict[tuple[str, str], str]) -> str:
    said = read_docstring(struct)
    notes = [said.meaning]
    if said.writers:
        notes.append("Written by " + ", ".join(f"`{name}`" for name in said.writers) + ".")
    if said.cause:
        notes.append(f"Cause: {said.cause}.")
    fields = fields_of(struct, meanings)
    return f"### `{title_of(struct)}`\n\n{' '.join(notes)}\n" + (f"\n{fields}" if fields else "")


def render() -> str:
    """The whole page: what every event has, the events by section, then the values inside them."""
    meanings = field_meanings(schema)
    found = dict(sections())
    inside = "Values inside events"
    found[inside] = found.pop(inside)
    header = "## Every event\n\n`e` is the kind.\n\n" + fields_of(schema.Event, meanings)
    parts = [INTRO, header]
    for title, structs in found.items():
        parts += [f"## {title}\n", *(struct_text(struct, meanings) for struct in structs)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

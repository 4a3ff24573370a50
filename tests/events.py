"""Events for tests that care about a few of their fields."""

import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_origin

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

BLANKS: dict[Any, Any] = {str: "", int: 0, float: 0.0, bool: False, list: [], dict: {}, Mapping: {}}


def some(kind: type[S], /, **fields: Any) -> S:
    """One with these fields; the others are zero, empty, or null where they may be."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    assert set(fields) <= set(known), f"{kind.__name__} has no {set(fields) - set(known)}"
    blank = {name: _blank(field.type) for name, field in known.items() if field.required}
    return kind(**{**blank, **fields})


def _blank(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return None
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return some(kind)
    return BLANKS[get_origin(kind) or kind]

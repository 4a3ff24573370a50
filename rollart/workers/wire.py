"""Our own values as msgpack and back: what crosses between our processes, and what the journal holds.

A closed set of types: the dataclasses, named tuples and enums of `rollart.types`, numpy arrays, and plain values.
Nothing that is read can name anything else, so reading is safe whatever the bytes are. Never pickle.

Whatever msgpack has no type for is a map of one entry whose key is a single byte: {kind: content}. So one pass of
msgpack's own code packs a whole tree, and our mappings must not have bytes as keys. Records are lists of their fields'
values in order; `SCHEMA` changes when a record's fields do.
"""

import dataclasses
import enum
import re
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

import rollart.types as types

_RECORD, _TUPLE, _ENUM, _ARRAY = b"r", b"t", b"e", b"a"
_DTYPE = re.compile(r"[<>|][biuf][1248]")
"""Booleans, integers and floats: what our arrays hold, and nothing that numpy would have to interpret."""

_RECORDS: dict[str, Callable[..., Any]] = {
    name: kind
    for name, kind in vars(types).items()
    if isinstance(kind, type)
    and kind.__module__ == types.__name__
    and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))
}
_ENUMS: dict[str, type[enum.Enum]] = {
    name: kind for name, kind in vars(types).items() if isinstance(kind, type) and issubclass(kind, enum.Enum)
}
_FIELDS: dict[Any, tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    if dataclasses.is_dataclass(kind)
    else tuple(getattr(kind, "_fields"))  # noqa: B009 - a named tuple's own
    for kind in _RECORDS.values()
}
SCHEMA = zlib.crc32(repr(sorted((kind.__name__, fields) for kind, fields in _FIELDS.items())).encode())
"""Of all records: what one version of the code wrote, another with other fields must not read."""


def pack(value: Any) -> bytes:
    """Raises TypeError for a value of a type that may not cross."""
    body: bytes = msgpack.packb(value, default=_encode, strict_types=True)
    return body


def unpack(body: bytes | memoryview) -> Any:
    """Raises ValueError for anything that `pack` did not make."""
    try:
        return msgpack.unpackb(body, object_hook=_decode, ext_hook=_refuse, strict_map_key=False)
    except (msgpack.UnpackException, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not one of our messages: {error}") from error


def _encode(value: Any) -> Any:
    kind = type(value)
    fields = _FIELDS.get(kind)
    if fields is not None:
        return {_RECORD: [kind.__name__, *[getattr(value, name) for name in fields]]}
    if kind is tuple:
        return {_TUPLE: list(value)}
    if kind is np.ndarray:
        dtype = value.dtype.str
        if not _DTYPE.fullmatch(dtype):
            raise TypeError(f"an array of {value.dtype} may not cross between processes")
        return {_ARRAY: [dtype, list(value.shape), value.tobytes()]}
    if isinstance(value, enum.Enum):
        return {_ENUM: [kind.__name__, value.value]}
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "items"):
        return dict(value.items())
    raise TypeError(f"a {kind.__name__} may not cross between processes")


def _refuse(code: int, data: bytes) -> Any:
    raise ValueError(f"extension {code} is not ours")


def _decode(found: dict[Any, Any]) -> Any:
    if len(found) != 1:
        return found
    [(kind, content)] = found.items()
    if type(kind) is not bytes:
        return found
    if type(content) is not list:
        raise ValueError("a value of ours is not written so")
    if kind == _RECORD:
        record = _RECORDS[content[0]] if content else None
        if record is None or len(content) - 1 != len(_FIELDS[record]):
            raise ValueError("a record of other fields")
        return record(**dict(zip(_FIELDS[record], content[1:], strict=True)))
    if kind == _TUPLE:
        return tuple(content)
    if kind == _ARRAY:
        dtype, shape, raw = content
        if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
            raise ValueError(f"an array of {dtype!r}")
        return np.frombuffer(raw, dtype=dtype).reshape(shape)
    if kind == _ENUM:
        name, value = content
        return _ENUMS[name](value)
    raise ValueError(f"unknown kind {kind!r}")

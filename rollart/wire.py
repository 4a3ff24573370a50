"""Our own values as msgpack and back: what crosses between our processes, and what the journal holds.

A closed set of types: the dataclasses, named tuples and enums of `rollart.types`, numpy arrays, and plain values.
Nothing that is read can name anything else, so reading is safe whatever the bytes are. Never pickle.
"""

import dataclasses
import enum
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
import numpy as np

import rollart.types as types

_RECORD, _TUPLE, _ENUM, _ARRAY = 1, 2, 3, 4
MOST_DEPTH = 64
"""Values within values; ours have a dozen."""
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
_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in _RECORDS.values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


def pack(value: Any) -> bytes:
    """Raises TypeError for a value of a type that may not cross."""
    body: bytes = msgpack.packb(value, default=_encode, strict_types=True)
    return body


def unpack(body: bytes | memoryview) -> Any:
    """Raises ValueError for anything that `pack` did not make."""
    return _unpack(body, 0)


def _unpack(body: bytes | memoryview, depth: int) -> Any:
    if depth > MOST_DEPTH:  # each level is a frame of msgpack's C code: too many of them end the process
        raise ValueError("not one of our messages: nested too deep")
    try:
        return msgpack.unpackb(
            body, ext_hook=partial(_decode, depth), strict_map_key=False, max_ext_len=2**31 - 1, max_bin_len=2**31 - 1
        )
    except (msgpack.UnpackException, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not one of our messages: {error}") from error


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if isinstance(value, np.ndarray):
        if not _DTYPE.fullmatch(value.dtype.str):
            raise TypeError(f"an array of {value.dtype} may not cross between processes")
        array = np.ascontiguousarray(value)
        return msgpack.ExtType(_ARRAY, pack([array.dtype.str, list(value.shape), array.tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, enum.Enum):
        return msgpack.ExtType(_ENUM, pack([kind.__name__, value.value]))
    fields = _FIELDS.get(kind)
    if fields is not None:
        return msgpack.ExtType(_RECORD, pack([kind.__name__, {name: getattr(value, name) for name in fields}]))
    if isinstance(value, tuple) and kind.__name__ in _RECORDS:
        return msgpack.ExtType(_RECORD, pack([kind.__name__, dict(zip(value._fields, value, strict=True))]))  # type: ignore[attr-defined]
    if hasattr(value, "items"):
        return dict(value.items())
    raise TypeError(f"a {kind.__name__} may not cross between processes")


def _decode(depth: int, code: int, data: bytes) -> Any:
    content = _unpack(data, depth + 1)
    match code:
        case 1:
            name, fields = content
            return _RECORDS[name](**fields)
        case 2:
            return tuple(content)
        case 3:
            name, value = content
            return _ENUMS[name](value)
        case 4:
            dtype, shape, raw = content
            if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
                raise ValueError(f"an array of {dtype!r}")
            return np.frombuffer(raw, dtype=dtype).reshape(shape)
    raise ValueError(f"unknown extension {code}")

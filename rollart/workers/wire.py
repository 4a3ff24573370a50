"""Our own values as msgpack and back: what crosses between our processes, and what the journal holds.

A closed set of types: the structs, named tuples and enums of `rollart.types` and those that a module allows by
name, numpy arrays, and plain values. Nothing that is read can name anything else, so reading is safe whatever the bytes
are. Never pickle. What user code says is still to be checked: a record's fields may hold anything.

Whatever msgpack has no type for is a map of one entry whose key is a single byte: {kind: content}. So one pass of
msgpack's own code packs a whole tree, and our mappings must not have bytes as keys. Records are lists of their fields'
values in order; `SCHEMA` changes when a record's fields do.
"""

import dataclasses
import enum
import struct
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

import rollart.types as types

_RECORD, _TUPLE, _ENUM, _ARRAY = b"r", b"t", b"e", b"a"
LENGTH = struct.Struct(">Q")
"""What a frame begins with. Eight bytes: that text looks like a length is next to impossible."""
MAX_BYTES = 2**31 - 1
"""Of one message; a longer one is noise."""
MAX_PARTS = 100_000
"""Lists and maps of one message of who is not trusted, and values of one of them."""
_PLAIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__, list: list}
"""How a value of a subclass, such as an enum of user code, becomes a plain one."""
_DTYPES: dict[str, "np.dtype[Any]"] = {
    dtype.str: dtype
    for kind in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
    for dtype in (np.dtype(f"<{kind}"), np.dtype(f">{kind}"))
}
"""Booleans, integers and floats: what our arrays hold, and nothing that numpy would have to interpret."""
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

RECORDS: dict[str, Callable[..., Any]] = {}
FIELDS: dict[Any, tuple[str, ...]] = {}
_VALUES: dict[Any, Callable[[Any], Iterable[Any]]] = {}
"""All fields of a record, in order: of several, with one call of C."""
ENUMS: dict[str, type[enum.Enum]] = {
    name: kind for name, kind in vars(types).items() if isinstance(kind, type) and issubclass(kind, enum.Enum)
}


def _fields(kind: Any) -> tuple[str, ...]:
    """Of a struct, a dataclass or a named tuple; none of anything else."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    found: tuple[str, ...] = getattr(kind, "__struct_fields__", ()) or getattr(kind, "_fields", ())
    return found


def _each(fields: tuple[str, ...], value: Any) -> list[Any]:
    return [getattr(value, name) for name in fields]


def allow(*kinds: Callable[..., Any]) -> None:
    """Let these structs, dataclasses or named tuples cross."""
    for kind in kinds:
        RECORDS[kind.__name__] = kind
        FIELDS[kind] = fields = _fields(kind)
        _VALUES[kind] = attrgetter(*fields) if len(fields) > 1 else partial(_each, fields)


allow(
    *(
        kind
        for kind in vars(types).values()
        if isinstance(kind, type) and kind.__module__ == types.__name__ and _fields(kind)
    )
)
SCHEMA = zlib.crc32(repr(sorted((kind.__name__, fields) for kind, fields in FIELDS.items())).encode())
"""Of all records of `rollart.types`: what one version of the code wrote, another with other fields must not read."""


def pack(value: Any) -> bytes:
    """Raises TypeError for a value of a type that may not cross."""
    try:
        body: bytes = msgpack.packb(value, default=_encode, strict_types=True)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"this may not cross between processes: {error}") from error
    return body


def frame(message: Any) -> bytes:
    """A message with its length before it. Raises TypeError as `pack`."""
    body = pack(message)
    if len(body) > MAX_BYTES:
        raise TypeError(f"a message of {len(body)} bytes may not cross between processes")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | memoryview) -> Any:
    """Raises ValueError for anything that `pack` did not make."""
    return _unpacked(body, _decode, None, -1)


def unpack_untrusted(body: bytes | memoryview) -> Any:
    """The same of a few parts only: millions of empty ones in a message of some megabytes would take seconds and
    gigabytes."""
    left = MAX_PARTS

    def counted(part: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {MAX_PARTS:,} parts")
        return part

    return _unpacked(body, lambda found: _decode(counted(found)), counted, MAX_PARTS)


def _unpacked(body: bytes | memoryview, as_map: Any, as_list: Any, longest: int) -> Any:
    try:
        return msgpack.unpackb(
            body,
            object_hook=as_map,
            list_hook=as_list,
            ext_hook=_refuse,
            strict_map_key=False,
            max_array_len=longest,
            max_map_len=longest,
        )
    except (msgpack.UnpackException, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not one of our messages: {error}") from error


def _encode(value: Any) -> Any:
    kind = type(value)
    values = _VALUES.get(kind)
    if values is not None:
        return {_RECORD: [kind.__name__, *values(value)]}
    if isinstance(value, tuple):
        return {_TUPLE: list(value)}
    if kind is np.ndarray:
        dtype = _DTYPE_NAMES.get(value.dtype)
        if dtype is None:
            raise TypeError(f"an array of {value.dtype} may not cross between processes")
        return {_ARRAY: [dtype, list(value.shape), value.tobytes()]}
    if ENUMS.get(kind.__name__) is kind:
        return {_ENUM: [kind.__name__, value.value]}
    if hasattr(value, "tolist"):  # numpy's scalars, torch's tensors: user code likes to return them
        return value.tolist()
    if hasattr(value, "items"):
        return dict(value.items())
    for plain, as_plain in _PLAIN.items():
        if isinstance(value, plain):
            return as_plain(value)
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
        record = RECORDS[content[0]] if content else None
        if record is None or len(content) - 1 != len(FIELDS[record]):
            raise ValueError("a record of other fields")
        if hasattr(record, "_fields"):  # a named tuple takes them as they are
            return record(*content[1:])
        return record(**dict(zip(FIELDS[record], content[1:], strict=True)))
    if kind == _TUPLE:
        return tuple(content)
    if kind == _ARRAY:
        name, shape, raw = content
        flat = np.frombuffer(raw, _DTYPES[name])
        return flat if shape == [len(flat)] else flat.reshape(shape)
    if kind == _ENUM:
        name, value = content
        return ENUMS[name](value)
    raise ValueError(f"unknown kind {kind!r}")

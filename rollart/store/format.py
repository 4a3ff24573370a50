"""The files that weights are kept in: safetensors, laid out by us so that they can be written and read in place.

The library's writer wants all tensors beside a whole copy of them, and its reader opens files by itself, out of sight
of our locks. The format is a small one: eight bytes that say how long a JSON header is, the header, the bytes of all
tensors without a gap. Whatever reads safetensors reads these. Invariant: every tensor begins at a multiple of its
item's size.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Protocol, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.store.digests import CHUNK_BYTES
from rollart.types import Json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH = struct.Struct("<Q")
ALIGNED = 64
"""The tensors' bytes begin at a multiple of this."""

Bytes = npt.NDArray[np.uint8]
"""One dimension."""


class Parted(Protocol):
    """A tensor that is not in one place: its bytes are brought here a part at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    part_bytes: int
    """The most that may be read at once."""

    @property
    def read(self) -> Callable[[int, int], Tensor]:
        """Bytes from here to there. They are good until any other tensor's, or other ones, are read."""


Weight = Tensor | Parted


class _Entry(TypedDict):
    """A tensor, in the header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def laid_out(tensors: Mapping[str, Weight]) -> tuple[bytes, list[Weight]]:
    """What a file of these tensors begins with, and the tensors in the order in which their bytes follow."""
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # as safetensors does: then all are aligned
    entries: dict[str, Json] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name}: weights of {tensor.dtype} cannot be written as safetensors")
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-(LENGTH.size + len(header)) % ALIGNED)
    return LENGTH.pack(len(header)) + header, [tensors[name] for name in order]


def sliced(
    head: bytes, tensors: Sequence[Weight], bucket_bytes: int
) -> Iterator[tuple[int, Iterator[tuple[int, Bytes]]]]:
    """The bytes of a file, bucket by bucket: where each begins, and its bytes in pieces that a processor's cache can
    hold, each with its place in the file. A file is one bucket unless its tensors are larger than that. A piece is good
    until the next one is asked for."""
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    limit = bucket_bytes if num_bytes > bucket_bytes else len(head) + num_bytes
    for number, parts in groupby(_pieces(head, tensors, limit), lambda part: part[0] // limit):
        yield number * limit, parts


def _pieces(head: bytes, tensors: Sequence[Weight], limit: int) -> Iterator[tuple[int, Bytes]]:
    """None crosses a multiple of `limit`."""
    at = 0
    for raw in chain((np.frombuffer(bytearray(head), dtype=np.uint8),), *map(_parts, tensors)):
        done = 0
        while done < len(raw):
            size = min(CHUNK_BYTES - at % CHUNK_BYTES, len(raw) - done, limit - at % limit)
            yield at, raw[done : done + size]
            at, done = at + size, done + size


def _parts(weight: Weight) -> Iterator[Bytes]:
    """Its bytes: all at once where they are here."""
    if isinstance(weight, Tensor):
        yield weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return
    for at in range(0, weight.nbytes, weight.part_bytes):
        yield weight.read(at, min(at + weight.part_bytes, weight.nbytes)).numpy()


def tensors_of(whole: Tensor) -> dict[str, Tensor]:
    """The tensors of a file, as views of its bytes, on whatever device. Raises ValueError for another kind of file."""

    def text(begin: int, end: int) -> bytes:
        return whole[begin:end].cpu().numpy().tobytes()

    if len(whole) < LENGTH.size:
        raise ValueError("it ends before its header")
    start = LENGTH.size + LENGTH.unpack(text(0, LENGTH.size))[0]
    if start > len(whole):
        raise ValueError("it ends within its header")
    entries: dict[str, _Entry] = json.loads(text(LENGTH.size, start))
    entries.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        found[name] = whole[start + begin : start + end].view(dtype).view(entry["shape"])
    return found

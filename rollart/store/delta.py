"""What changed between two versions of a bucket, bit by bit. No torch.

Under a small learning rate few bfloat16 weights change in a step: most updates are smaller than the last bit. So a
bucket can be sent as the 16-bit words that differ from those of a version that the receiver has. The words are compared
as they are, whatever they mean, so the result is the new bucket bit for bit; its digest is checked as any other's.
The format, for each block of words: a byte that says how, the number of words that changed, then

    SAME    nothing                      LIST   their places (4 bytes each) and their values
    MAP     a bit for each word, and     WHOLE  all words of the block
            the values of those that changed

and at the end, where the bucket has an odd number of bytes, the last one. Whichever is smallest is taken: 6 bytes for a
changed word while few change, 2 and a sixteenth of the block when more do. Nothing is encoded where a sample of the
words says that it would not pay (`PAYS`).
"""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollart.store.media import Bytes

Words = npt.NDArray[np.uint16]
BLOCK_WORDS = 1 << 22
"""8 MB at a time: what encoding and applying need of memory beside the bucket."""
PAYS = 0.5
"""A delta larger than this part of the bucket is not made: the time to encode and apply it is worth something too."""
DENSITY = "X-Rollart-Density"
"""The header of an answer that says the part of a bucket's words that changed."""
SAMPLES = 64
SAMPLE_WORDS = 1 << 12
HEAD = struct.Struct("<BI")
SAME, LIST, MAP, WHOLE = range(4)


class Delta(NamedTuple):
    """`data` is None where it does not pay."""

    density: float
    """The part of the words that changed: of all, or of a sample where nothing was encoded."""
    data: bytes | None


def encode(old: Bytes, new: Bytes) -> Delta:
    """What makes `new` of `old`, which is as long."""
    before, after = _words(old), _words(new)
    sampled = _sampled_density(before, after)
    if _part(sampled) > PAYS:
        return Delta(sampled, None)
    parts, changed, size = list[bytes](), 0, 0
    for at in range(0, len(after), BLOCK_WORDS):
        block = after[at : at + BLOCK_WORDS]
        differs = before[at : at + BLOCK_WORDS] != block
        count = int(np.count_nonzero(differs))
        parts.append(_encoded(block, differs, count))
        changed, size = changed + count, size + len(parts[-1])
        if size > PAYS * len(new):
            return Delta(changed / min(at + BLOCK_WORDS, len(after)), None)
    parts.append(new[2 * len(after) :].tobytes())
    return Delta(changed / max(1, len(after)), b"".join(parts))


def apply(old: Bytes, data: bytes, into: Bytes) -> None:
    """Write the new bucket. Raises ValueError where this is not a delta of such a bucket."""
    before, after = _words(old), _words(into)
    place = 0
    for at in range(0, len(after), BLOCK_WORDS):
        block = after[at : at + BLOCK_WORDS]
        if place + HEAD.size > len(data):
            raise ValueError("a delta that ends too soon")
        how, count = HEAD.unpack_from(data, place)
        place += HEAD.size
        if how != WHOLE:
            block[:] = before[at : at + BLOCK_WORDS]
        if how == LIST:
            block[np.frombuffer(data, "<u4", count, place)] = np.frombuffer(data, "<u2", count, place + 4 * count)
            place += 6 * count
        elif how == MAP:
            bits = -(-len(block) // 8)
            differs = np.unpackbits(np.frombuffer(data, np.uint8, bits, place), count=len(block)).view(bool)
            block[differs] = np.frombuffer(data, "<u2", count, place + bits)
            place += bits + 2 * count
        elif how == WHOLE:
            block[:] = np.frombuffer(data, "<u2", len(block), place)
            place += 2 * len(block)
        elif how != SAME:
            raise ValueError("not one of our deltas")
    into[2 * len(after) :] = np.frombuffer(data, np.uint8, len(into) - 2 * len(after), place)


def _words(raw: Bytes) -> Words:
    return raw[: len(raw) // 2 * 2].view("<u2")


def _part(density: float) -> float:
    """Of the bucket's size, that a delta of this density takes."""
    return min(3 * density, 1 / 16 + density, 1.0)


def _sampled_density(before: Words, after: Words) -> float:
    step = max(SAMPLE_WORDS, len(after) // SAMPLES)
    looked = [slice(at, at + SAMPLE_WORDS) for at in range(0, len(after), step)]
    total = sum(len(after[part]) for part in looked)
    return sum(int(np.count_nonzero(before[part] != after[part])) for part in looked) / max(1, total)


def _encoded(block: Words, differs: npt.NDArray[np.bool_], count: int) -> bytes:
    if not count:
        return HEAD.pack(SAME, 0)
    as_list, as_map, whole = 6 * count, -(-len(block) // 8) + 2 * count, 2 * len(block)
    if min(as_list, as_map) >= whole:
        return HEAD.pack(WHOLE, count) + block.tobytes()
    if as_list <= as_map:
        places = np.flatnonzero(differs)
        return HEAD.pack(LIST, count) + places.astype("<u4").tobytes() + block[places].tobytes()
    return HEAD.pack(MAP, count) + np.packbits(differs).tobytes() + block[differs].tobytes()

"""The gzip of request bodies, on both sides of a reward call.

A server that takes it says so in its answers, `Accept-Encoding: gzip` (RFC 7694); clients send plain bodies until then.
What arrives is inflated up to a bound: a small body may stand for more than a machine has memory.
"""

import gzip
import zlib

SMALLEST_BYTES = 4096
"""Smaller bodies stay plain: they fit into few packets as they are."""
LARGEST_BYTES = 32 << 20
"""Inflated. Clients send what is larger plain, and servers refuse it compressed."""
FASTEST = 1
"""Of gzip's levels: the text of an episode repeats itself from turn to turn, so this one gains nearly as much."""
ACCEPTS = {"Accept-Encoding": "gzip"}
"""What the answers of a server say that takes it."""
GZIP = frozenset({"gzip", "x-gzip"})


class UnknownCoding(ValueError):
    """The body is coded in a way that is not known here."""


class TooLarge(ValueError):
    """The body would be more than LARGEST_BYTES."""


def is_worth_it(body: bytes) -> bool:
    return SMALLEST_BYTES <= len(body) <= LARGEST_BYTES


def deflate(body: bytes) -> bytes:
    return gzip.compress(body, FASTEST, mtime=0)


def is_accepted(accepts: str) -> bool:
    """By a server whose answer says this in `Accept-Encoding`."""
    return any(coding.partition(";")[0].strip().lower() in GZIP for coding in accepts.split(","))


def decoded(body: bytes, coding: str) -> bytes:
    """A body that came with this `Content-Encoding`. Raises ValueError."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in GZIP:
        raise UnknownCoding(f"Content-Encoding: {coding[:40]} is not known here; send gzip, or a plain body")
    inflating = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16: with gzip's header
    try:
        text = inflating.decompress(body, LARGEST_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"the body is not the gzip that its Content-Encoding says: {error}") from None
    if len(text) > LARGEST_BYTES:
        raise TooLarge(f"the body is more than {LARGEST_BYTES} bytes inflated; send it plain")
    if not inflating.eof or inflating.unused_data:
        raise ValueError("the body is not one whole gzip stream, as its Content-Encoding says")
    return text

"""The order of an epoch: a seeded permutation that is computed, not kept. Any position of any epoch costs the same.

A Feistel network over the next power of four, walked until it lands inside. Pure Python and SHA-256: the order of a run
that goes on elsewhere, under other versions of everything, is the same.
"""

import hashlib

ROUNDS = 4
"""Of a Feistel network with a strong round function, enough to look random."""


def shuffled(position: int, count: int, key: str) -> int:
    """Which of `count` things stands at this position, in the order that belongs to `key`."""
    assert 0 <= position < count
    half_bits = ((count - 1).bit_length() + 1) // 2
    while True:
        position = _permuted(position, half_bits, key)
        if position < count:
            return position


def _permuted(value: int, half_bits: int, key: str) -> int:
    """One-to-one on numbers of `2 * half_bits` bits."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(ROUNDS):
        mixed = hashlib.sha256(f"{key}/{turn}/{right}".encode()).digest()
        left, right = right, left ^ (int.from_bytes(mixed[:8], "big") & mask)
    return left << half_bits | right

"""Weights in the memory of a device: a file of a version that lies there, and what tells that its bytes are right.

The digest is computed where the bytes are: words of 4 bytes in rows, each row summed up modulo 2^64 with an odd factor
for each place in it, and XXH3 over the sums, which alone leave the device. Integers, so that a GPU and a CPU agree. A
word that changed always changes its row's sum.
"""

import functools

import torch
from torch import Tensor

from rollart.store.buckets import MappedFile
from rollart.store.digests import name_of, new_digest
from rollart.store.format import tensors_of
from rollart.types import Bucket

ROW_BYTES = 16 * 1024
CHUNK_BYTES = 1024 * ROW_BYTES
"""Summed up at a time: takes four times as much memory for a moment."""


def digest_on_device(raw: Tensor) -> str:
    """Of bytes, wherever they are."""
    digest = new_digest()
    digest.update(len(raw).to_bytes(8, "little"))
    for chunk in raw.split(CHUNK_BYTES):
        rows = -(-len(chunk) // ROW_BYTES)
        if len(chunk) != rows * ROW_BYTES or chunk.storage_offset() % 4:
            padded = chunk.new_zeros(rows * ROW_BYTES)
            padded[: len(chunk)] = chunk
            chunk = padded
        words = chunk.view(torch.int32).view(rows, ROW_BYTES // 4).long()
        digest.update((words * _factors(raw.device)).sum(1).cpu().numpy())
    return name_of(digest).replace(":", "-rows:")


@functools.cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (ROW_BYTES // 4,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)


class DeviceFile(MappedFile):
    """One file of a version, on a device."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self._seen = {}

    @property
    def num_bytes(self) -> int:
        return len(self._whole)

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self._whole)

    def _digest_at(self, bucket: Bucket) -> str:
        return digest_on_device(self._whole[bucket.start : bucket.start + bucket.num_bytes])

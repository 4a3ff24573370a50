"""Whole tensors out of shards, and shards out of whole tensors: how a sharded model is published, saved and loaded.

Rank 0 leads: it asks for bytes of a tensor, and the ranks that have them send them to where it wants them. The others
`follow`, until it says that it has enough. A checkpoint asks for whole tensors, each held by nobody but the asker; a
push for one part after another (`Gathered.in_parts`), so that it takes no memory of a tensor's size. No rank ever holds
the whole model, and whoever writes it decides order and pace. `spread` is the way back: rank 0 has a whole tensor, and
each rank gets its rows.
Invariant: all ranks have the same names with the same shapes; one group serves one gathering at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollart.train.offload import HostMemory
from rollart.types import Probe, WeightManifest, WeightVersion

ENOUGH = -1
PART_BYTES = 16_000_000
"""The most that a push asks for at once: large enough that asking costs nothing beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of a tensor: rows of the first dimension, cut as `torch.chunk` does."""

    local: Tensor
    shape: tuple[int, ...]
    """Of the whole."""
    whole: bool = False
    """Not cut at all: every rank holds the same."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Shard":
        """Without a copy."""
        if isinstance(tensor, DTensor):
            return cls(local=tensor.to_local().detach(), shape=tuple(tensor.shape))
        return cls(local=tensor.detach(), shape=tuple(tensor.shape), whole=True)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return torch.Size(self.shape).numel() * self.local.element_size()


def copied(shards: Mapping[str, Shard], memory: HostMemory, dtype: torch.dtype | None = None) -> dict[str, Shard]:
    """A copy on the CPU; of another type where one is given."""
    locals_ = memory.like({name: (shard.local.shape, dtype or shard.dtype) for name, shard in shards.items()})
    return {name: replace(shard, local=locals_[name].copy_(shard.local)) for name, shard in shards.items()}


def own_rows(rows: int, rank: int, ranks: int) -> slice:
    """The rows of the first dimension that a rank holds."""
    most = -(-rows // ranks)
    return slice(min(rank * most, rows), min((rank + 1) * most, rows))


class Gathered(Mapping[str, Tensor]):
    """Rank 0's side. Ask in any order; `close` lets the others go, and must be called."""

    def __init__(self, shards: Mapping[str, Shard], group: dist.ProcessGroup) -> None:
        self._shards = shards
        self._group = group
        self._places = {name: place for place, name in enumerate(shards)}
        self._part = torch.empty(0, dtype=torch.uint8)

    def __getitem__(self, name: str) -> Tensor:
        shard = self._shards[name]
        if shard.whole:
            return shard.local.cpu()
        whole = torch.empty(shard.nbytes, dtype=torch.uint8)
        self._bring(name, 0, whole)
        return whole.view(shard.dtype).view(shard.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def num_bytes(self, name: str) -> int:
        """Of a tensor, without gathering it."""
        return self._shards[name].nbytes

    def in_parts(self) -> dict[str, "Parts"]:
        """The tensors, to be read a part at a time: all of them use the same piece of memory."""
        self._part = torch.empty(min(PART_BYTES, max(map(self.num_bytes, self), default=0)), dtype=torch.uint8)
        return {name: Parts(shard, partial(self._read, name)) for name, shard in self._shards.items()}

    def close(self) -> None:
        _say((ENOUGH, 0, 0), self._group)

    def _read(self, name: str, begin: int, end: int) -> Tensor:
        shard = self._shards[name]
        if shard.whole:
            return bytes_of(shard.local)[begin:end]
        into = self._part[: end - begin]
        self._bring(name, begin, into)
        return into

    def _bring(self, name: str, begin: int, into: Tensor) -> None:
        place, end = self._places[name], begin + len(into)
        _say((place, begin, end), self._group)
        for rank, own in _owners(self._shards[name], begin, end, dist.get_world_size(self._group)):
            there = into[own.start - begin : own.stop - begin]
            if rank == 0:
                there.copy_(_own_bytes(self._shards[name], own, 0, self._group))
            else:
                dist.recv(there, group=self._group, group_src=rank)


class Parts:
    """A tensor of a sharded model: `rollart.store.format.Parted`."""

    def __init__(self, shard: Shard, read: Callable[[int, int], Tensor]) -> None:
        self.dtype = shard.dtype
        self.shape = shard.shape
        self.itemsize = shard.dtype.itemsize
        self.nbytes = shard.nbytes
        self.part_bytes = PART_BYTES
        self.read = read
        """Bytes from here to there, at most `part_bytes`. They are good until the next ones are read."""


class PartTarget(Protocol):
    """What a sharded trainer needs of a weight store."""

    def push(
        self, version: WeightVersion, tensors: Mapping[str, Parts], probe: Probe | None = None
    ) -> WeightManifest: ...


def follow(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> None:
    """Every other rank's side."""
    names = list(shards)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    while (asked := _hear(group))[0] != ENOUGH:
        shard = shards[names[asked[0]]]
        for owner, own in _owners(shard, *asked[1:], ranks):
            if owner == rank:
                dist.send(_own_bytes(shard, own, rank, group), group=group, group_dst=0)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def spread(whole: Tensor | None, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, on the CPU, of a tensor that rank 0 has (`whole`; None elsewhere). `like` says how it is cut: a
    sharded tensor by rows, any other not at all."""
    if not isinstance(like, DTensor):
        copy = torch.empty(like.shape, dtype=like.dtype) if whole is None else whole.to(like.dtype).contiguous()
        dist.broadcast(copy, src=0, group=group)
        return copy
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    most = -(-like.shape[0] // ranks)
    own = torch.empty((most, *like.shape[1:]), dtype=torch.float32)
    pieces: list[Tensor] | None = None
    if rank == 0:
        assert whole is not None
        padded = torch.zeros((ranks * most, *like.shape[1:]), dtype=torch.float32)
        padded[: like.shape[0]] = whole
        pieces = list(torch.split(padded, most))
    dist.scatter(own, pieces, src=0, group=group)
    rows = own_rows(like.shape[0], rank, ranks)
    return own[: rows.stop - rows.start]


def _say(asked: tuple[int, int, int], group: dist.ProcessGroup) -> None:
    dist.broadcast(torch.tensor(asked), src=0, group=group)


def _hear(group: dist.ProcessGroup) -> tuple[int, int, int]:
    """The tensor's place, and which of its bytes."""
    asked = torch.empty(3, dtype=torch.int64)
    dist.broadcast(asked, src=0, group=group)
    place, begin, end = asked.tolist()
    return place, begin, end


def _owners(shard: Shard, begin: int, end: int, ranks: int) -> Iterator[tuple[int, slice]]:
    """Who has these bytes of the whole, in order: ranks, and the bytes of each."""
    row_bytes = shard.nbytes // max(1, shard.shape[0])
    for rank in range(ranks):
        rows = own_rows(shard.shape[0], rank, ranks)
        own = slice(max(begin, rows.start * row_bytes), min(end, rows.stop * row_bytes))
        if own.start < own.stop:
            yield rank, own


def _own_bytes(shard: Shard, wanted: slice, rank: int, group: dist.ProcessGroup) -> Tensor:
    """Bytes of the whole that this rank has."""
    first = own_rows(shard.shape[0], rank, dist.get_world_size(group)).start * (shard.nbytes // shard.shape[0])
    return bytes_of(shard.local)[wanted.start - first : wanted.stop - first]

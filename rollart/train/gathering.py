"""Whole tensors out of shards, and shards out of whole tensors, one at a time: how a sharded model is published, saved
and loaded.

Rank 0 leads: its `Gathered` is a mapping from names to whole tensors on the CPU, each put together when it is asked
for and held by nobody but the asker. The other ranks `follow`: they hand over the shard that rank 0 names, until it
says that it has enough. So no rank ever holds the whole model, and whoever writes it decides order and pace. `spread`
is the way back: rank 0 has a whole tensor, and each rank gets its rows.
Invariant: all ranks have the same names with the same shapes; one group serves one gathering at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

ENOUGH = -1


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

    def copied(self, dtype: torch.dtype | None = None) -> "Shard":
        """A copy on the CPU; of another type where one is given."""
        local = self.local.to(device="cpu", dtype=dtype or self.local.dtype, copy=True)
        return Shard(local=local, shape=self.shape, whole=self.whole)


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

    def __getitem__(self, name: str) -> Tensor:
        shard = self._shards[name]
        if shard.whole:
            return shard.local.cpu()
        _say(self._places[name], self._group)
        return _gather(shard, self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def num_bytes(self, name: str) -> int:
        """Of a tensor, without gathering it."""
        shard = self._shards[name]
        return torch.Size(shard.shape).numel() * shard.local.element_size()

    def close(self) -> None:
        _say(ENOUGH, self._group)


def follow(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> None:
    """Every other rank's side."""
    names = list(shards)
    while (place := _hear(group)) != ENOUGH:
        _gather(shards[names[place]], group)


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


def _say(place: int, group: dist.ProcessGroup) -> None:
    dist.broadcast(torch.tensor(place), src=0, group=group)


def _hear(group: dist.ProcessGroup) -> int:
    place = torch.tensor(ENOUGH)
    dist.broadcast(place, src=0, group=group)
    return int(place)


def _gather(shard: Shard, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor on rank 0; nothing of use elsewhere. All must be of one size: a shard that is shorter than the
    others is padded, the others are sent as they lie."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    most = -(-shard.shape[0] // ranks)
    padded = shard.local.cpu().contiguous()
    if len(padded) < most:
        padded = torch.zeros((most, *shard.shape[1:]), dtype=shard.local.dtype)
        padded[: shard.local.shape[0]] = shard.local
    if rank != 0:
        dist.gather(padded, None, dst=0, group=group)
        return padded
    whole = torch.empty((ranks * most, *shard.shape[1:]), dtype=shard.local.dtype)
    dist.gather(padded, list(torch.split(whole, most)), dst=0, group=group)
    return whole[: shard.shape[0]]

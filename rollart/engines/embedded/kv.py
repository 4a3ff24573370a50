"""Where keys and values live: slabs for sequences in flight, exact copies for idle sessions, one bound for both.

A slab is a block of equal slots, (layers, 2, slots, KV heads, capacity, head size). The sequences in flight fill its
first slots without a hole, so a decode step reads them as one batch, without gathering: on a CPU that is most of what
attention costs. Capacities are powers of two, so at most half of what a step reads is padding; a sequence that fills
its slot moves to a larger one.

An idle session is parked as a tensor of exactly its length, and evicted, the least recently used first, when the room
is needed. Slabs and parked sessions together never hold more than `kv_tokens` tokens.

A sequence that has nothing in the cache copies what another session, in flight or idle, has of the same beginning.
Called by the scheduler (who may run), the engine (what to keep) and the attention (what to read).
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollart.engines.embedded.prefixes import Prefixes
from rollart.engines.embedded.sequence import Sequence
from rollart.types import Tokens

MIN_SLOT_TOKENS = 128
"""Capacity of the smallest slot."""
MIN_SLOTS = 8
"""Slots of a class's first slab; later ones double the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token's keys and values look like."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device


class Slab:
    """Equal slots; those in flight come first, `seqs[slot]` names them."""

    def __init__(self, shape: KvShape, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.slots = slots
        self.seqs: list[Sequence] = []
        # Zeros, not whatever was in memory: masked positions are multiplied by 0, and 0 x NaN is NaN.
        self.store = torch.zeros(
            (shape.layers, 2, slots, shape.heads, capacity, shape.head_size), dtype=shape.dtype, device=shape.device
        )
        self.keys = [layer[0] for layer in self.store]
        self.values = [layer[1] for layer in self.store]
        self.key_rows = [keys.view(-1, shape.head_size) for keys in self.keys]
        """The same by row: row (slot * heads + head) * capacity + position."""
        self.value_rows = [values.view(-1, shape.head_size) for values in self.values]

    @property
    def num_tokens(self) -> int:
        return self.slots * self.capacity

    @property
    def full(self) -> bool:
        return len(self.seqs) == self.slots

    def slot(self, index: int, length: int) -> Tensor:
        """The first `length` tokens of one slot: (layers, 2, heads, length, head size)."""
        return self.store[:, :, index, :, :length]

    def append(self, seq: Sequence) -> None:
        seq.placed, seq.slab, seq.slot, seq.capacity = True, self, len(self.seqs), self.capacity
        self.seqs.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Free a slot; the last sequence moves into the hole."""
        last = self.seqs.pop()
        if last is not seq:
            self.slot(seq.slot, last.length).copy_(self.slot(last.slot, last.length))
            self.seqs[seq.slot] = last
            last.slot = seq.slot
        seq.placed, seq.slab, seq.slot, seq.capacity = False, None, -1, 0


@dataclass(frozen=True, slots=True)
class Parked:
    """The cache of an idle session."""

    tokens: Tokens
    """What the cached keys and values are of."""
    store: Tensor = field(repr=False)
    """(layers, 2, heads, length, head size)."""
    shares: bool
    """Whether others may copy it."""


class KvCache:
    """All keys and values of one engine, within `kv_tokens`."""

    def __init__(self, shape: KvShape, kv_tokens: int, max_context: int) -> None:
        assert max_context <= kv_tokens
        self._shape = shape
        self._kv_tokens = kv_tokens
        self._max_context = max_context
        self.slabs: list[Slab] = []
        self._parked: OrderedDict[str, Parked] = OrderedDict()
        """By session, the least recently used first."""
        self._parked_tokens = 0
        self._placed: dict[str, Sequence] = {}
        """Sequences in flight that have a slot, by session."""
        self._prefixes = Prefixes(lambda session: session in self._placed or session in self._parked)

    @property
    def used_tokens(self) -> int:
        """Tokens' worth of memory held now."""
        return sum(slab.num_tokens for slab in self.slabs) + self._parked_tokens

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def clear(self) -> None:
        """Forget idle sessions and every key and value in flight; sequences keep their slots."""
        self._parked.clear()
        self._parked_tokens = 0
        for slab in self.slabs:
            slab.store.zero_()

    def drop_parked(self) -> None:
        self._parked.clear()
        self._parked_tokens = 0

    # --- sequences in flight

    def place(self, seq: Sequence, num_tokens: int, followers: int) -> bool:
        """Give a sequence a slot for at least `num_tokens`, and whatever its session has in the cache.

        False, and nothing changed, where slots in flight fill the memory. `followers` is how many more are about to
        be placed: a new slab is made large enough for them too, where that costs no idle session its cache.
        """
        slab = self._find(num_tokens, followers, keep=seq.session)
        if slab is None:
            return False
        slab.append(seq)
        self._placed[seq.session] = seq
        parked = self._unpark(seq.session)
        if parked is not None and seq.length == 0:
            # The last prompt token is computed in any case: its logits are needed.
            shared = min(common_prefix(parked.tokens, seq.buffer[: seq.total]), seq.total - 1)
            slab.slot(seq.slot, shared).copy_(parked.store[:, :, :, :shared])
            seq.length = seq.cached = shared
            seq.shares = parked.shares
        return True

    def borrow(self, seq: Sequence) -> bool:
        """Copy what another session has of this one's beginning. False: wait, an older sequence is computing it now."""
        assert seq.slab is not None
        seq.shares = True
        for session in self._prefixes.holders(seq):
            placed, parked = self._placed.get(session), self._parked.get(session)
            if placed is not None and placed.slab is not None and placed.shares:
                tokens: np.ndarray = placed.buffer[: placed.total]
                ready, store = placed.length, placed.slab.slot(placed.slot, placed.length)
            elif parked is not None and parked.shares:
                tokens, ready, store = parked.tokens, len(parked.tokens), parked.store
            else:
                continue
            shared = min(common_prefix(tokens, seq.buffer[: seq.total]), seq.total - 1)
            prefilling = placed is not None and placed.pending > 1 and placed.arrival < seq.arrival
            if shared > ready and prefilling:
                return False
            shared = min(shared, ready)
            if shared > 0:
                seq.slab.slot(seq.slot, shared).copy_(store[:, :, :, :shared])
                seq.length = seq.cached = shared
                self._prefixes.note(seq, beyond=shared)
                return True
        self._prefixes.note(seq)
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Move a sequence to a slot for at least `num_tokens`. False where there is none."""
        old, index = seq.slab, seq.slot
        assert old is not None
        # Its neighbours are about as long, and will follow.
        slab = self._find(num_tokens, len(old.seqs) - 1, keep=None)
        if slab is None:
            return False
        slab.slot(len(slab.seqs), seq.length).copy_(old.slot(index, seq.length))
        self._vacate(seq)
        slab.append(seq)
        return True

    def short_of(self, running: Collection[Sequence]) -> bool:
        """Nothing is under way when a step is planned here, so whoever has to give way may."""
        return False

    def release(self, seq: Sequence) -> None:
        """Take a sequence's slot away."""
        self._vacate(seq)
        if self._placed.get(seq.session) is seq:
            del self._placed[seq.session]

    def _vacate(self, seq: Sequence) -> None:
        """An empty slab stays, for those who come next, until its room is needed: fresh memory is slow to touch."""
        if seq.slab is not None:
            seq.slab.remove(seq)

    def park(self, seq: Sequence) -> None:
        """Keep the cache of a finished sequence for its session's next turn, if there is room, and free its slot."""
        slab, length = seq.slab, seq.length
        assert slab is not None
        self._unpark(seq.session)
        store = slab.slot(seq.slot, length)
        if len(slab.seqs) == 1:
            # Its slab may go, and make the room; the tensor itself lives until the copy below is made.
            self.release(seq)
        if length and self._make_room(length, keep=None):
            self._parked[seq.session] = Parked(seq.buffer[:length].astype(np.int32), store.clone(), seq.shares)
            self._parked_tokens += length
        self.release(seq)

    # --- memory

    def _find(self, num_tokens: int, followers: int, keep: str | None) -> Slab | None:
        """A slab with a free slot for `num_tokens`: of the right class, else a new one, else any large enough."""
        capacity = MIN_SLOT_TOKENS
        while capacity < num_tokens:
            capacity *= 2
        capacity = min(capacity, self._max_context)
        fitting = [slab for slab in self.slabs if slab.capacity == capacity and not slab.full]
        if fitting:
            # The largest: small early slabs then empty, and may go.
            return max(fitting, key=lambda slab: slab.slots)
        self._drop_empty()
        if slots := self._new_slots(capacity, followers, keep):
            slab = Slab(self._shape, slots, capacity)
            self.slabs.append(slab)
            return slab
        larger = [slab for slab in self.slabs if slab.capacity > capacity and not slab.full]
        return min(larger, key=lambda slab: slab.capacity) if larger else None

    def _new_slots(self, capacity: int, followers: int, keep: str | None) -> int:
        """How many slots a new slab may have; makes room for one, by eviction, before it takes more."""
        if not self._make_room(capacity, keep):
            return 0
        in_class = sum(len(slab.seqs) for slab in self.slabs if slab.capacity == capacity)
        wanted = max(MIN_SLOTS, in_class, followers + 1)
        return max(1, min(wanted, (self._kv_tokens - self.used_tokens) // (2 * capacity)))

    def _make_room(self, num_tokens: int, keep: str | None) -> bool:
        """Drop empty slabs, then evict idle sessions, until `num_tokens` are free, `keep` last of all."""
        if self._kv_tokens - self.used_tokens >= num_tokens:
            return True
        self._drop_empty()
        free = self._kv_tokens - self.used_tokens
        if free >= num_tokens:
            return True
        if free + self._parked_tokens < num_tokens:
            return False
        for session in self._eviction_order(keep):
            free += len(self._parked[session].tokens)
            self._unpark(session)
            if free >= num_tokens:
                break
        return True

    def _drop_empty(self) -> None:
        self.slabs = [slab for slab in self.slabs if slab.seqs]

    def _eviction_order(self, keep: str | None) -> Iterator[str]:
        yield from [session for session in self._parked if session != keep]
        if keep is not None and keep in self._parked:
            yield keep

    def _unpark(self, session: str) -> Parked | None:
        parked = self._parked.pop(session, None)
        if parked is not None:
            self._parked_tokens -= len(parked.tokens)
        return parked


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading tokens two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length

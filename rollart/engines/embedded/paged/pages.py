"""The paged cache: fixed pages, given out one by one, shared by reference, copied when one of several wants to write.

Every sequence in flight has a lane: a row of the page tables that live on the device, and the place of its newest
token there. An idle session keeps its pages and no lane. Sessions that begin alike share the whole pages of that
beginning; the page on which they part is copied. Page 0 and the last lane belong to nobody: rows that fill up a batch
write there.

Where prefill is apart (`handover.py`), one such cache lends the pages of prompts, and another copies them.

Owns the page counts and the host's copy of the tables; `take_changes` hands over what the device has yet to be told.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence as Row
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.engines.embedded.kv import KvShape, common_prefix
from rollart.engines.embedded.paged.ops import Cache
from rollart.engines.embedded.prefixes import Prefixes
from rollart.engines.embedded.sequence import Sequence
from rollart.model.mapped import Lending, MemoryPlace, mapped
from rollart.types import Tokens


@dataclass(slots=True)
class _Idle:
    """What is kept of an idle session."""

    tokens: Tokens
    pages: list[int]
    shares: bool


class PagedMemory:
    """All pages of one engine. `kv_tokens` is rounded down to whole pages."""

    def __init__(
        self,
        shape: KvShape,
        *,
        kv_tokens: int,
        max_context: int,
        page_tokens: int,
        lanes: int,
        lends: bool = False,
    ) -> None:
        """`lends`: where another process can map them."""
        assert max_context <= kv_tokens
        self.page_tokens = page_tokens
        self._num_pages = max(1, kv_tokens // page_tokens)
        self.idle_lane = lanes
        self._width = -(-max_context // page_tokens)
        # Page 0 is nobody's. Not cleared: no kernel reads what was not written.
        size = (shape.layers, 2, self._num_pages + 1, shape.heads, page_tokens, shape.head_size)
        self._shape = shape
        self.lending = Lending(math.prod(size) * shape.dtype.itemsize, shape.device, "a cache") if lends else None
        make = torch.empty if shape.device.type == "cuda" else torch.zeros
        self._store = (
            make(size, dtype=shape.dtype, device=shape.device)
            if self.lending is None
            else self.lending.raw.view(shape.dtype).view(size)
        )
        self.tables_LN = torch.zeros((lanes + 1, self._width), dtype=torch.int32, device=shape.device)
        self.layers = [
            Cache(keys_PHSD=layer[0], values_PHSD=layer[1], tables_LN=self.tables_LN) for layer in self._store
        ]
        self._changed: list[tuple[int, int]] = []
        """Entries of the tables that the device has not been told: flat index, page."""
        self._free = list(range(self._num_pages, 0, -1))
        self._holders = [0] * (self._num_pages + 1)
        """Of each page: sequences in flight and idle sessions."""
        self._pins = [0] * (self._num_pages + 1)
        """Of each page: sequences in flight."""
        self._num_pinned = 0
        self._lanes = list(range(lanes - 1, -1, -1))
        self._idle: OrderedDict[str, _Idle] = OrderedDict()
        """By session, the least recently used first."""
        self._placed: dict[str, Sequence] = {}
        self._prefixes = Prefixes(lambda session: session in self._placed or session in self._idle)

    @property
    def used_tokens(self) -> int:
        return (self._num_pages - len(self._free)) * self.page_tokens

    @property
    def num_parked(self) -> int:
        return len(self._idle)

    def take_changes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """What changed in the tables since the last call: flat indices, and pages. Later entries win."""
        changed, self._changed = dict(self._changed), []
        return np.array(list(changed), dtype=np.int64), np.array(list(changed.values()), dtype=np.int32)

    # --- sequences in flight

    def place(self, seq: Sequence, num_tokens: int, followers: int) -> bool:
        idle = self._idle.pop(seq.session, None)
        pages: list[int] = []
        if idle is not None:
            common = common_prefix(idle.tokens, seq.buffer[: seq.total]) if seq.length == 0 else 0
            # The last prompt token is computed in any case: its logits are needed.
            known = min(common, seq.total - 1)
            if self._pages_for(num_tokens) == self._num_pages and self._copies_last(idle.pages, known):
                known -= known % self.page_tokens  # for the copy there would never be room
            idle.tokens = idle.tokens[:known]
            pages = idle.pages = self._cut(idle.pages, len(idle.tokens))
            self._pin(pages)
        copies = self._copies_last(pages, 0 if idle is None else len(idle.tokens))
        if not self._make_room(self._pages_for(num_tokens) - len(pages) + copies):
            self._unpin(pages)
            if idle is not None and pages:
                self._idle[seq.session] = idle
                self._idle.move_to_end(seq.session, last=False)
            return False
        if idle is not None:
            seq.length = seq.cached = len(idle.tokens)
            seq.shares = idle.shares
        seq.placed, seq.lane, seq.pages = True, self._lanes.pop(), []
        self._placed[seq.session] = seq
        self._extend(seq, pages)
        if copies:
            self._own_last(seq)
        self._add(seq, num_tokens)
        return True

    def _copies_last(self, pages: Row[int], length: int) -> bool:
        """Whether who goes on after `length` tokens would write on a page that others have too."""
        index, rest = divmod(length, self.page_tokens)
        return bool(rest) and self._holders[pages[index]] > 1

    def borrow(self, seq: Sequence) -> bool:
        seq.shares = True
        for session in self._prefixes.holders(seq):
            placed, idle = self._placed.get(session), self._idle.get(session)
            if placed is not None and placed.shares:
                tokens: npt.NDArray[np.int64] | Tokens = placed.buffer[: placed.total - placed.in_flight]
                ready, pages = placed.length, placed.pages
            elif idle is not None and idle.shares:
                tokens, ready, pages = idle.tokens, len(idle.tokens), idle.pages
            else:
                continue
            shared = min(common_prefix(tokens, seq.buffer[: seq.total]), seq.total - 1)
            if shared > ready and placed is not None and placed.pending > 1 and placed.arrival < seq.arrival:
                return False
            if shared := min(shared, ready):
                self._share(seq, pages, shared)
                self._prefixes.note(seq, beyond=shared)
                return True
        self._prefixes.note(seq)
        return True

    def _share(self, seq: Sequence, pages: Row[int], shared: int) -> None:
        """Begin with the first `shared` tokens of these pages: whole ones by reference, the rest copied."""
        whole, rest = divmod(shared, self.page_tokens)
        for index in range(whole):
            self._holders[pages[index]] += 1
            self._pin(pages[index : index + 1])
            self._replace(seq, index, pages[index])
        if rest:
            self._copy(pages[whole], seq.pages[whole])
        seq.length = seq.cached = shared

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        if not self._make_room(self._pages_for(num_tokens) - len(seq.pages)):
            return False
        self._add(seq, num_tokens)
        return True

    def short_of(self, running: Row[Sequence]) -> bool:
        growing = sum(seq.total > seq.capacity for seq in running)
        return growing > len(self._free) and growing > self._num_pages - self._num_pinned

    def release(self, seq: Sequence) -> None:
        if self._placed.get(seq.session) is seq:
            del self._placed[seq.session]
        if seq.placed:
            self._unpin(seq.pages)
            self._let_go(seq.pages)
            self._lanes.append(seq.lane)
            seq.placed, seq.pages, seq.lane, seq.capacity = False, [], -1, 0

    def park(self, seq: Sequence) -> None:
        before = self._idle.pop(seq.session, None)
        if before is not None:
            self._let_go(before.pages)
        if kept := seq.pages[: self._pages_for(seq.length)]:
            for page in kept:
                self._holders[page] += 1
            self._idle[seq.session] = _Idle(seq.buffer[: seq.length].astype(np.int32), kept, seq.shares)
        self.release(seq)

    def clear(self) -> None:
        self.drop_parked()
        for seq in self._placed.values():  # what was shared is computed once more by one of them, and shared again
            self._unpin(seq.pages)
            self._let_go(seq.pages)
            seq.pages, seq.capacity = [], 0

    def drop_parked(self) -> None:
        for idle in self._idle.values():
            self._let_go(idle.pages)
        self._idle.clear()

    # --- prompts that another cache copies

    def lend(self, session: str, tokens: npt.NDArray[np.int64]) -> list[int]:
        """The pages of an idle session that hold these tokens, which stay as they are until they are taken back. None
        where it has not all of them."""
        idle = self._idle.get(session)
        if idle is None or common_prefix(idle.tokens, tokens) < len(tokens):
            return []
        pages = idle.pages[: self._pages_for(len(tokens))]
        for page in pages:
            self._holders[page] += 1
        self._pin(pages)
        return pages

    def take_back(self, pages: Row[int]) -> None:
        self._unpin(pages)
        self._let_go(pages)

    def forget(self, session: str) -> None:
        """No further turn of it will come."""
        idle = self._idle.pop(session, None)
        if idle is not None:
            self._let_go(idle.pages)

    # --- prompts from another cache

    def opened(self, place: MemoryPlace) -> Tensor:
        """The pages of another cache, which lends them. Raises EngineError."""
        raw = mapped(place, self._shape.device).view(self._shape.dtype)
        _, _, _, heads, page_tokens, head_size = self._store.shape
        return raw.view(self._shape.layers, 2, -1, heads, page_tokens, head_size)

    @property
    def page_bytes(self) -> int:
        return self._store[:, :, 0].nbytes

    def take_over(self, seq: Sequence, theirs: Tensor, pages: Row[int]) -> int:
        """Keep for a sequence that waits, as if its session were idle, all of its prompt but the last token, which
        these pages of another cache hold. Whole pages that are here already are not copied. Returns how many were;
        where there is no room for them, the sequence computes what is not here."""
        tokens = seq.buffer[: seq.prompt_tokens - 1]
        own = self._whole_pages(seq, tokens)
        missing = pages[len(own) :]
        self._pin(own)
        if not self._make_room(len(missing)):
            missing = []
        self._unpin(own)
        new = [self._free.pop() for _ in missing]
        for page in new:
            self._holders[page] = 1
        if new:
            self._copy_from(theirs, missing, new)
        if kept := [*own, *new]:
            held = tokens[: len(kept) * self.page_tokens]
            self._idle[seq.session] = _Idle(held.astype(np.int32), kept, True)
            self._prefixes.note(seq)
        seq.given = len(kept) == len(pages)
        return len(new)

    def _whole_pages(self, seq: Sequence, tokens: npt.NDArray[np.int64]) -> list[int]:
        """Those at the beginning that this cache has of these tokens, counted for the sequence's session: its own, or
        those of another that begins alike."""
        idle = self._idle.pop(seq.session, None)
        if idle is not None:
            whole = common_prefix(idle.tokens, tokens) // self.page_tokens
            self._let_go(idle.pages[whole:])
            if whole:
                return idle.pages[:whole]
        for session in self._prefixes.holders(seq):
            placed, other = self._placed.get(session), self._idle.get(session)
            if placed is not None and placed.shares:
                held: npt.NDArray[np.int64] | Tokens = placed.buffer[: placed.length]
                pages = placed.pages
            elif other is not None and other.shares:
                held, pages = other.tokens, other.pages
            else:
                continue
            if shared := pages[: common_prefix(held, tokens) // self.page_tokens]:
                for page in shared:
                    self._holders[page] += 1
                return shared
        return []

    def _copy_from(self, theirs: Tensor, sources: Row[int], targets: Row[int]) -> None:
        """Layer by layer: what is on its way in between takes memory, too."""
        both = torch.tensor([sources, targets], dtype=torch.int64)
        if self._store.is_cuda:
            both = both.pin_memory().to(self._store.device, non_blocking=True)  # nobody waits for the step under way
        for layer, other in zip(_words(self._store), _words(theirs), strict=True):
            layer.index_copy_(1, both[1], other.index_select(1, both[0]))

    # --- pages

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def _new(self) -> int:
        """A page for a sequence in flight."""
        page = self._free.pop()
        self._holders[page] = self._pins[page] = 1
        self._num_pinned += 1
        return page

    def _pin(self, pages: Row[int]) -> None:
        for page in pages:
            self._num_pinned += not self._pins[page]
            self._pins[page] += 1

    def _unpin(self, pages: Row[int]) -> None:
        for page in pages:
            self._pins[page] -= 1
            self._num_pinned -= not self._pins[page]

    def _let_go(self, pages: Row[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _cut(self, pages: list[int], num_tokens: int) -> list[int]:
        """The pages of the first `num_tokens` tokens; the others are let go."""
        kept = self._pages_for(num_tokens)
        self._let_go(pages[kept:])
        return pages[:kept]

    def _replace(self, seq: Sequence, index: int, page: int) -> None:
        """Give a sequence another page, which is counted already, for one of its own."""
        self._unpin(seq.pages[index : index + 1])
        self._let_go(seq.pages[index : index + 1])
        seq.pages[index] = page
        self._changed.append((seq.lane * self._width + index, page))

    def _extend(self, seq: Sequence, pages: Row[int]) -> None:
        first = len(seq.pages)
        seq.pages.extend(pages)
        base = seq.lane * self._width
        self._changed.extend((base + first + index, page) for index, page in enumerate(pages))
        seq.capacity = len(seq.pages) * self.page_tokens

    def _add(self, seq: Sequence, num_tokens: int) -> None:
        self._extend(seq, [self._new() for _ in range(self._pages_for(num_tokens) - len(seq.pages))])

    def _own_last(self, seq: Sequence) -> None:
        """A copy of the page behind whose last cached token it will write."""
        index, own = seq.length // self.page_tokens, self._new()
        self._copy(seq.pages[index], own)
        self._replace(seq, index, own)

    def _copy(self, source: int, target: int) -> None:
        self._store[:, :, target].copy_(self._store[:, :, source])

    def _make_room(self, count: int) -> bool:
        """Evict idle sessions until `count` pages are free. False, and nothing evicted, where that is not enough."""
        if self._num_pages - self._num_pinned < count:
            return False
        while len(self._free) < count:
            _, idle = self._idle.popitem(last=False)
            self._let_go(idle.pages)
        return True


def _words(store: Tensor) -> Tensor:
    """Whole pages, as wide as they can be copied: (layers, 2, pages, words)."""
    return store.flatten(3).view(torch.int64)

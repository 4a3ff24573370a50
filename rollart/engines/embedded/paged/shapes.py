"""Which shape a step is padded to, so that a CUDA graph captured for that shape can run it. Pure.

A step has single tokens (of those who decode) first, then chunks of prompts. A graph is made for fixed numbers of both;
rows of nobody fill it up. Graphs save the time in which the host starts kernels one by one. Where the device has more
to do than that, padding would cost more than it saves: such steps have no shape.
"""

from typing import NamedTuple

from rollart.engines.embedded.paged.ops import CHUNK_ROWS

LONG_CONTEXT = 2048
"""A context beyond this is cut into parts that are read side by side."""
PROGRAMS = 1024
"""Attention programs that fill a device several times over."""
MAX_SPLITS = 32
CHUNK_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Prompt tokens of a graph."""
LEAST_CHUNK = 8
"""Tokens of a chunk, on average, that a graph is made for; a step with more and shorter ones takes a larger graph."""
LEAST_SINGLES = 16
GRAPHED_FLOP = 4e12
"""A step with more work in its products keeps a device busy for longer than its host takes to start the kernels."""


class StepShape(NamedTuple):
    singles: int
    """Rows that take one token."""
    chunk_tokens: int
    """Tokens of prompts; 0: a step in which everyone decodes."""
    splits: int
    """Parts into which the context of a single token is cut."""
    max_batch: int
    """No step has more sequences."""

    @property
    def tokens(self) -> int:
        return self.singles + self.chunk_tokens

    @property
    def chunks(self) -> int:
        return min(self.chunk_tokens // LEAST_CHUNK, self.max_batch)

    @property
    def blocks(self) -> int:
        """Pieces of at most CHUNK_ROWS tokens, however the tokens are divided among the chunks."""
        return self.chunks + self.chunk_tokens // CHUNK_ROWS

    @property
    def sampled(self) -> int:
        """Rows from which a token is drawn."""
        return min(self.singles + self.chunks, self.max_batch)


class StepShapes:
    """Those of one engine."""

    def __init__(self, *, max_batch: int, step_tokens: int, max_context: int, kv_heads: int, weights: int) -> None:
        """`weights`: that each token is multiplied with."""
        self._max_batch, self._kv_heads = max_batch, kv_heads
        self._decoding = batch_sizes(max_batch)
        self._mixed = mixed_sizes(max_batch)
        self._chunks = [size for size in CHUNK_SIZES if size <= most_chunked(step_tokens, weights)]
        self._longest = (1, max_context) if max_context > LONG_CONTEXT else (1,)

    def all(self) -> list[StepShape]:
        """Every shape, those with the most tokens first: their memory serves the others."""
        sizes = [(size, 0) for size in self._decoding]
        sizes += [(size, tokens) for size in self._mixed for tokens in self._chunks]
        shapes = {self._shape(singles, tokens, longest) for singles, tokens in sizes for longest in self._longest}
        return sorted(shapes, key=lambda shape: (-shape.tokens, shape))

    def of(self, *, singles: int, longest: int, chunks: int, chunk_tokens: int) -> StepShape | None:
        """The least shape that has room for a step. `longest`: context of a single token."""
        if not chunks:
            return self._shape(next(size for size in self._decoding if size >= singles), 0, longest)
        own = next(size for size in self._mixed if size >= singles)
        for tokens in self._chunks:
            shape = self._shape(own, tokens, longest)
            if chunk_tokens <= tokens and chunks <= shape.chunks:
                return shape
        return None

    def _shape(self, singles: int, chunk_tokens: int, longest: int) -> StepShape:
        return StepShape(singles, chunk_tokens, splits_for(singles, self._kv_heads, longest), self._max_batch)


def most_chunked(step_tokens: int, weights: int) -> int:
    """Prompt tokens of the largest graph."""
    return max(CHUNK_SIZES[0], min(step_tokens, CHUNK_SIZES[-1], int(GRAPHED_FLOP / (2 * weights))))


def batch_sizes(max_batch: int) -> list[int]:
    """Where everyone decodes: from 32 on steps of at most a quarter, so little is padded."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_batch:
        sizes.append(sizes[-1] + (8 if sizes[-1] < 64 else 16 if sizes[-1] < 128 else 32))
    return [size for size in sizes if size < max_batch] + [max_batch]


def mixed_sizes(max_batch: int) -> list[int]:
    """Beside prompts: each twice the one before."""
    sizes = [LEAST_SINGLES]
    while sizes[-1] < max_batch:
        sizes.append(2 * sizes[-1])
    return [size for size in sizes if size < max_batch] + [max_batch]


def splits_for(rows: int, kv_heads: int, longest: int) -> int:
    """Parts into which each context is cut."""
    wanted = PROGRAMS if longest > LONG_CONTEXT else PROGRAMS // 4
    splits = 4 if longest > LONG_CONTEXT else 1
    while splits < MAX_SPLITS and splits * rows * kv_heads < wanted:
        splits *= 2
    return splits

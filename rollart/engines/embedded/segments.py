"""The parts of a completion that a server samples, and the request they belong to.

A segment is sampled under one version; the call puts segments together. Plain bookkeeping: no waiting, no server.
"""

import asyncio
import math
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from rollart.types import Completion, Finish, GenerateRequest, Sampling, Span, WeightVersion

ROUNDING = 1e-3
"""A log-probability may be so much above 0: a certain token, as the server rounded it."""


class Piece(NamedTuple):
    """What a server streams: new tokens, one log-probability each, and in the last one how it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the server's cache, where it says."""


def wrong_in(piece: Piece, vocab_size: int) -> str:
    """What a server sent that cannot be: JSON may say null, or anything, where a number belongs. Empty: all is well."""
    if len(piece.tokens) != len(piece.logprobs):
        return f"{len(piece.tokens)} tokens with {len(piece.logprobs)} log-probabilities"
    for token in piece.tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            return f"token {token!r}, where the model knows 0 to {vocab_size - 1}"
    for logprob in piece.logprobs:
        if not isinstance(logprob, float | int) or not math.isfinite(logprob) or logprob > ROUNDING:
            return f"a log-probability of {logprob!r}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What a server is asked for: a stretch of one completion, under one version."""

    id: str
    prompt: list[int]
    """With what earlier segments sampled."""
    max_tokens: int
    sampling: Sampling
    """Its `max_tokens`, `seed` and `stop` are not for the server."""
    seed: int | None
    eos: tuple[int, ...]
    version: WeightVersion


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """One request, over all its segments."""

    request: GenerateRequest
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    task: "asyncio.Task[Finish | None] | None" = None
    segment_id: str = ""
    segment_start: int = 0
    """Tokens before the segment under way."""
    turns: list[tuple[int, WeightVersion]] = field(default_factory=list)
    """Where in the segment under way a swap fell that it went on over: tokens from here on are of this version."""
    num_segments: int = 0
    aborted: bool = False
    cut: bool = False
    """A swap ends the segment under way."""
    cached_tokens: int = 0
    prefill_tokens: int = 0
    busy_s: float = 0.0

    def next_id(self) -> str:
        """The first segment has the request's own id, so that its seed alone decides what it draws."""
        self.segment_id = self.request.id + (f"+{self.num_segments}" if self.num_segments else "")
        self.segment_start = len(self.tokens)
        self.num_segments += 1
        return self.segment_id

    @property
    def unspanned(self) -> int:
        """Tokens of the segment under way."""
        return len(self.tokens) - sum(span.length for span in self.spans)

    def turn_at(self, sampled: int, version: WeightVersion) -> None:
        """The segment under way goes on under this version: all its tokens but the first `sampled` are of it."""
        self.turns.append((self.segment_start + sampled, version))

    def close_span(self, version: WeightVersion) -> None:
        """The segment, which began under `version`, is over."""
        for turn, following in [*self.turns, (len(self.tokens), version)]:
            done = len(self.tokens) - self.unspanned
            length = min(turn, len(self.tokens)) - done
            if length > 0 and self.spans and self.spans[-1].version == version:
                self.spans[-1] = Span(version, self.spans[-1].length + length)
            elif length > 0:
                self.spans.append(Span(version, length))
            version = following
        self.turns.clear()

    def take_back(self, version: WeightVersion) -> None:
        """What was sampled under this version, the last one, was not: that version did not hold what it should."""
        if self.spans and self.spans[-1].version == version:
            kept = len(self.tokens) - self.spans.pop().length
            del self.tokens[kept:], self.logprobs[kept:]

    def completion(self, finish: Finish, engine: str) -> Completion:
        return Completion(
            tokens=np.array(self.tokens, dtype=np.int32),
            # The server's own rounding may put a certain token a hair above 0.
            logprobs=np.minimum(np.array(self.logprobs, dtype=np.float32), 0.0),
            spans=tuple(self.spans),
            finish=finish,
            engine=engine,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            busy_s=self.busy_s,
        )


class EngineSeconds:
    """Engine seconds of each segment: wall time divided among those in flight at each moment."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0
        self._at = time.perf_counter()

    def enter(self) -> float:
        self._advance()
        self._count += 1
        return self._seconds

    def leave(self, entered: float) -> float:
        self._advance()
        self._count -= 1
        return self._seconds - entered

    def _advance(self) -> None:
        now = time.perf_counter()
        if self._count:
            self._seconds += (now - self._at) / self._count
        self._at = now


def segment_seed(seed: int, segment_id: str) -> int:
    """Each segment has random numbers of its own: those of the members of a group must differ."""
    return int.from_bytes(blake2b(f"{seed}/{segment_id}".encode(), digest_size=8).digest(), "big") >> 1

"""One request while an engine works on it: its tokens, how many of them are in the cache, what was sampled.

Invariant: `length` tokens of `buffer[:total]` are in the cache. A sequence that is decoding has all but its last token
there; one whose cache was lost (a swap, a preemption) simply has fewer, and is prefilled again by the same rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollart.types import Completion, EngineWork, Finish, GenerateRequest, Span, WeightVersion

if TYPE_CHECKING:
    from rollart.engines.embedded.kv import Slab

UNIFORMS_PER_DRAW = 64
"""Random numbers drawn at once; a request's n-th token always uses its n-th number."""


class Sequence:
    """A request in flight. The scheduler writes `take`, the cache `slab`/`slot`/`length`, the engine the rest."""

    __slots__ = (
        "_rng",
        "_span_starts",
        "_uniforms",
        "arrival",
        "buffer",
        "busy_s",
        "cached",
        "capacity",
        "context",
        "draft",
        "given",
        "in_flight",
        "lane",
        "last_token",
        "length",
        "limit",
        "logprobs",
        "pages",
        "placed",
        "prefilled",
        "prefix_keys",
        "prompt_tokens",
        "request",
        "sampling",
        "seed",
        "session",
        "shares",
        "slab",
        "slot",
        "take",
        "total",
    )

    def __init__(
        self, request: GenerateRequest, *, arrival: int, max_context: int, version: WeightVersion, seed: int
    ) -> None:
        prompt = request.tokens()
        self.request = request
        self.session = request.session
        self.sampling = request.sampling
        self.arrival = arrival
        self.prompt_tokens = len(prompt)
        self.limit = min(len(prompt) + request.sampling.max_tokens, max_context)
        """Total tokens at which it ends, whatever it says."""
        self.buffer: npt.NDArray[np.int64] = np.empty(self.limit, dtype=np.int64)
        self.buffer[: len(prompt)] = prompt
        self.total = len(prompt)
        self.last_token = int(prompt[-1])
        self.logprobs: list[float] = []
        self.length = 0
        self.take = 0
        """Tokens it runs in the coming step."""
        self.draft = 0
        """How many of them, the last ones, are guesses: they stand in `buffer` after `total`."""
        self.context: tuple[str | int, ...] = (request.domain,)
        """From which `drafts` guesses."""
        self.in_flight = 0
        """Tokens at the end of `total` that a step under way samples: their values are not known yet."""
        self.placed = False
        """Whether it has room in the cache: `capacity` tokens of it."""
        self.capacity = 0
        self.slab: Slab | None = None
        self.slot = -1
        self.lane = -1
        self.pages: list[int] = []
        self.cached = 0
        self.prefix_keys: list[int] | None = None
        """Filled in by `prefixes` when they are first needed."""
        self.shares = True
        """Whether others may copy its cache: not where some of it was kept over a swap."""
        self.given = False
        """Its prompt, but for the last token, was computed elsewhere: that one it decodes."""
        self.prefilled = 0
        self.busy_s = 0.0
        self._span_starts: list[tuple[WeightVersion, int]] = [(version, 0)]
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self._uniforms: list[float] = []

    @property
    def pending(self) -> int:
        """Known tokens that are not in the cache; one means it decodes."""
        return self.total - self.length

    @property
    def full(self) -> bool:
        """What it may say is sampled, or under way."""
        return self.in_flight > 0 and self.total >= self.limit

    def uniform(self, ahead: int = 0) -> float:
        """The random number in [0, 1) of the token to be sampled next, or this many later: a function of seed and
        position alone."""
        index = len(self.logprobs) + ahead
        while index >= len(self._uniforms):  # none was drawn while the whole batch was greedy
            self._uniforms.extend(self._rng.random(UNIFORMS_PER_DRAW).tolist())
        return self._uniforms[index]

    def expect(self) -> None:
        """One more token is being sampled."""
        self.total += 1
        self.in_flight += 1

    def append(self, token: int, logprob: float) -> None:
        """The token that was expected for longest."""
        self.buffer[self.total - self.in_flight] = token
        self.in_flight -= 1
        self.last_token = token
        self.logprobs.append(logprob)

    def cut_short(self) -> None:
        """Forget the tokens that are still expected: it ended before them."""
        self.total -= self.in_flight
        self.in_flight = 0
        self.length = min(self.length, self.total - 1)

    def sampled(self) -> npt.NDArray[np.int64]:
        return self.buffer[self.prompt_tokens : self.total - self.in_flight]

    def turn_to(self, version: WeightVersion) -> None:
        """Tokens from here on are of this version."""
        if self._span_starts[-1][1] == len(self.logprobs):
            self._span_starts.pop()
        self._span_starts.append((version, len(self.logprobs)))

    def completion(self, finish: Finish, engine: str, work: EngineWork | None = None) -> Completion:
        ends = [start for _, start in self._span_starts[1:]] + [len(self.logprobs)]
        spans = [Span(version, end - start) for (version, start), end in zip(self._span_starts, ends, strict=True)]
        return Completion(
            tokens=self.sampled().astype(np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            spans=tuple(span for span in spans if span[1] > 0),
            finish=finish,
            engine=engine,
            prefill_tokens=self.prefilled,
            cached_tokens=self.cached,
            busy_s=self.busy_s,
            work=work,
        )

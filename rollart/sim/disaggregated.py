"""A simulated engine of several workers: some prefill, the cache travels over a link, the others decode.

Prefill and decode do not wait for each other: that is the point. The price is the link, and that a prefill worker has
no cache of what the decode workers said: it computes the last answer again with the next turn. Requests are spread
evenly. All workers load new weights at the same time, and fail as one.
"""

import heapq
import math
from collections.abc import Callable

from rollart.sim.engine import ALMOST, EngineWorld, SimEngine, SimSequence, seconds_of, steps_in
from rollart.types import EngineSpec, WeightVersion


class SimDisaggregated(SimEngine):
    __slots__ = (
        "_decoders",
        "_lacking",
        "_links_free_s",
        "_moving",
        "_prefill_costs",
        "_prefill_workers",
        "_prompts",
        "_prompts_kv",
        "_room",
        "_token_link_s",
    )

    def __init__(self, spec: EngineSpec, world: EngineWorld, died: Callable[[str], object]) -> None:
        super().__init__(spec, world, died)
        apart = world.disaggregated[spec.pool]
        self._decoders = apart.decoders
        gpus = spec.gpus // apart.decoders
        self._costs = world.costs(spec.pool, self._hardware, gpus, spec.type)
        self._prefill_costs = world.costs(spec.pool, apart.hardware, apart.gpus, spec.type)
        self._longest = self._costs.kv_tokens
        self._capacity = apart.decoders * self._longest
        self._max_batch *= apart.decoders
        self._prefill_workers = apart.workers
        self._loading_gpus = min(gpus, apart.gpus)
        """All workers load at the same time; the smallest is done last."""
        self._token_link_s = world.model_of(spec.pool).kv_bytes_per_token / apart.link_bytes_per_s
        self._room = apart.workers * self._prefill_costs.kv_tokens
        self._prompts: dict[str, int] = {}
        """Prompt tokens of sessions in the prefill workers' caches, least recently used first."""
        self._prompts_kv = 0
        self._lacking: dict[str, int] = {}
        """Call -> tokens whose KV the decode workers do not have."""
        self._moving: list[tuple[float, int, SimSequence]] = []
        """On the links: when each arrives; a heap."""
        self._links_free_s = [0.0] * apart.workers
        """When the link of each prefill worker is free; a heap."""

    def _progress(self, passed_s: float) -> None:
        for pack in self._packs:
            steps = passed_s / pack.step_s
            pack.left -= steps
            pack.busy_s += passed_s
            self._computed += steps * pack.chunk
            if not self._world.counts_work:
                continue
            prompts = len(pack.sequences) * pack.chunk / pack.tokens
            self._work.add(passed_s, steps, prompts=prompts, tokens=pack.chunk, pairs=pack.chunk * pack.seen)
        if self._step_s:
            steps = steps_in(passed_s, self._step_s, self._growth_s)
            if self._world.counts_work:
                batch = max(1.0, self._num_decoding / self._decoders)
                cached = (self._shift / self._num_decoding + self._steps + 0.5 * (1.0 + steps)) * batch
                self._work.add(passed_s, steps, sequences=batch, cached=cached)
            self._steps += steps
            self._computed += steps
            self._share_s += passed_s / self._num_decoding

    def _form_packs(self) -> None:
        """Each worker has a pack of its own; prompts that wait are spread over those that are free."""
        while self._prefilling and len(self._packs) < self._prefill_workers:
            free = self._prefill_workers - len(self._packs)
            waiting = sum(sequence.prefill for sequence in self._prefilling)
            budget = min(float(self._world.settings.chunk_tokens), max(1.0, waiting / free))
            self._packs.append(self._pack(budget, self._prefill_costs))

    def _planned_s(self) -> float:
        when_s = self._moving[0][0] if self._moving else math.inf
        for pack in self._packs:
            when_s = min(when_s, self._at_s + pack.left * pack.step_s)
        if self._num_decoding:
            batch = max(1.0, self._num_decoding / self._decoders)
            cached = (self._shift / self._num_decoding + self._steps + 0.5) * batch
            self._step_s = self._costs.step_s(batch, cached)
            self._growth_s = batch * self._costs.kv_token_s
            steps = self._decoding[0][0] - self._steps
            when_s = min(when_s, self._at_s + seconds_of(steps, self._step_s, self._growth_s))
        return when_s

    def _book_prefill(self, sequence: SimSequence, seconds: float) -> None:
        sequence.prefill_busy_s += seconds

    @property
    def _in_batch(self) -> int:
        return super()._in_batch + len(self._moving)

    def _queue_prefill(self, sequence: SimSequence, tokens: int) -> None:
        """`tokens` is what the decode workers lack. The prefill workers compute what their own cache does not hold."""
        request = sequence.request
        context = request.prompt_tokens + sequence.said
        known = self._prompts.pop(request.session, 0)
        self._prompts_kv -= known
        known = min(known, context)
        if not sequence.prefilled:
            sequence.cached = min(known, request.prompt_tokens)
        self._lacking[request.id] = tokens
        sequence.prefilled += context - known
        sequence.prefill = max(1, context - known)
        self._num_prefilling += 1
        self._prefilling.append(sequence)

    def _prefilled(self, sequence: SimSequence) -> None:
        """Keep the prompt here for the next turn, and send on what the decode workers lack."""
        request = sequence.request
        if not request.last:
            self._prompts[request.session] = request.prompt_tokens
            self._prompts_kv += request.prompt_tokens
            while self._prompts_kv > self._room and self._prompts:
                self._prompts_kv -= self._prompts.pop(next(iter(self._prompts)))
        begin_s = max(self._loop.time(), self._links_free_s[0])
        arrives_s = begin_s + self._lacking.pop(request.id) * self._token_link_s
        heapq.heapreplace(self._links_free_s, arrives_s)
        self._numbers += 1
        heapq.heappush(self._moving, (arrives_s, self._numbers, sequence))

    def _plan(self) -> None:
        if not (self.hung or self.dead or self._paused or self._held):
            while self._moving and self._moving[0][0] <= self._loop.time() + ALMOST * 1e-3:
                self._begin_decode(heapq.heappop(self._moving)[2])
        super()._plan()

    def _drop(self, sequence: SimSequence) -> None:
        self._lacking.pop(sequence.request.id, None)
        kept = [entry for entry in self._moving if entry[2] is not sequence]
        if len(kept) < len(self._moving):
            self._moving = kept  # its bytes still pass: the link stays taken
            heapq.heapify(self._moving)
        else:
            super()._drop(sequence)

    def _restart_all(self, version: WeightVersion) -> int:
        """What was on a link is of the old weights: it is computed and sent again, like everything in flight."""
        self._prefilling.extend(entry[2] for entry in sorted(self._moving))
        self._num_prefilling += len(self._moving)
        self._moving.clear()
        self._lacking.clear()
        self._prompts.clear()
        self._prompts_kv = 0
        self._links_free_s = [self._loop.time()] * len(self._links_free_s)
        return super()._restart_all(version)

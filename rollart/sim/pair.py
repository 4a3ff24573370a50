"""A simulated engine in two halves: one prefills, the KV travels over a link, the other decodes. It fails as one.

Neither half waits for the other's work: that is the point of the split. The price is the link, and that the half that
prefills has no cache of what the other said: it computes the last answer again with the next turn.
"""

import math
from collections import deque
from collections.abc import Callable

from rollart.hardware import kv_capacity_tokens, prefill_s_per_token
from rollart.sim.engine import ALMOST, EngineWorld, SimEngine, SimSequence
from rollart.types import EngineSpec, WeightVersion


class SimPair(SimEngine):
    def __init__(self, spec: EngineSpec, world: EngineWorld, died: Callable[[str], object]) -> None:
        super().__init__(spec, world, died)
        pair = world.pairs[spec.pool]
        self._prefill_s = prefill_s_per_token(world.model, pair.hardware, pair.gpus)
        self._overhead_tokens = world.settings.overhead_s / self._prefill_s
        self._loading_gpus = min(spec.gpus, pair.gpus)
        """Both halves load at the same time; the smaller one is done last."""
        self._token_link_s = world.model.kv_bytes_per_token / pair.link_bytes_per_s
        self._room = kv_capacity_tokens(world.model, pair.hardware, pair.gpus)
        self._prompts: dict[str, int] = {}
        """Prompt tokens of sessions in the prefill half's cache, least recently used first."""
        self._prompts_kv = 0
        self._lacking: dict[str, int] = {}
        """Call -> tokens whose KV the decode half does not have."""
        self._moving: deque[tuple[float, SimSequence]] = deque()
        """On the link, in order: when each has arrived."""
        self._link_free_s = 0.0

    def _cycles(self, decode_s: float, chunk_s: float) -> tuple[float, float]:
        return decode_s, chunk_s

    @property
    def _in_batch(self) -> int:
        return super()._in_batch + len(self._moving)

    def _queue_prefill(self, sequence: SimSequence, tokens: int) -> None:
        """`tokens` is what the decode half lacks. The prefill half computes what its own cache does not hold."""
        request = sequence.request
        context = request.prompt_tokens + sequence.said
        known = self._prompts.pop(request.session, 0)
        self._prompts_kv -= known
        known = min(known, context)
        if not sequence.prefilled:
            sequence.cached = min(known, request.prompt_tokens)
        self._lacking[request.id] = tokens
        sequence.prefilled += context - known
        sequence.prefill = context - known + self._overhead_tokens
        sequence.prefill_busy_s += sequence.prefill * self._prefill_s
        self._prefilling.append(sequence)

    def _prefilled(self, sequence: SimSequence) -> None:
        """Keep the prompt here for the next turn, and send on what the decode half lacks."""
        request = sequence.request
        if not request.last:
            self._prompts[request.session] = request.prompt_tokens
            self._prompts_kv += request.prompt_tokens
            while self._prompts_kv > self._room and self._prompts:
                self._prompts_kv -= self._prompts.pop(next(iter(self._prompts)))
        begin_s = max(self._loop.time(), self._link_free_s)
        self._link_free_s = begin_s + self._lacking.pop(request.id) * self._token_link_s
        self._moving.append((self._link_free_s, sequence))

    def _moved_s(self) -> float:
        return self._moving[0][0] if self._moving else math.inf

    def _plan(self) -> None:
        if not (self.hung or self.dead or self._paused):
            while self._moving and self._moving[0][0] <= self._loop.time() + ALMOST * 1e-3:
                self._begin_decode(self._moving.popleft()[1])
        super()._plan()

    def _drop(self, sequence: SimSequence) -> None:
        self._lacking.pop(sequence.request.id, None)
        kept = [entry for entry in self._moving if entry[1] is not sequence]
        if len(kept) < len(self._moving):
            self._moving = deque(kept)  # its bytes still pass: the link stays taken
        else:
            super()._drop(sequence)

    def _restart_all(self, version: WeightVersion) -> int:
        """What was on the link is of the old weights: it is computed and sent again, like everything in flight."""
        self._prefilling.extend(sequence for _, sequence in self._moving)
        self._moving.clear()
        self._lacking.clear()
        self._prompts.clear()
        self._prompts_kv = 0
        self._link_free_s = self._loop.time()
        return super()._restart_all(version)

"""The embedded engine: continuous batching over a transformers model on the CPU or one CUDA device.

`EmbeddedEngine` is synchronous and knows no asyncio: whoever owns it calls `add`, `abort` and `swap` between steps, and
`step` in a loop while it is `busy`. One step = schedule, one flat forward pass, sample, finish. It owns the model, the
cache and all requests in flight.

Weights change only between steps. What was sampled before keeps its version (the completion's spans say where they
changed); the cache of requests in flight is computed again under the new weights, or kept (`keep_kv`); that of idle
sessions is dropped.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.attention import StepPlan
from rollart.engines.embedded.dense import dense_forward
from rollart.engines.embedded.drafts import Drafts
from rollart.engines.embedded.kv import KvCache
from rollart.engines.embedded.sampler import sample
from rollart.engines.embedded.scheduler import Scheduler
from rollart.engines.embedded.sequence import Sequence
from rollart.engines.embedded.steps import kept_by, prove_steps, prove_steps_architecture
from rollart.engines.stops import Decode, StopFinder
from rollart.errors import EngineError, RequestError
from rollart.model.agreement import LENGTHS
from rollart.model.network import AttentionPlan, device_named, forward_hidden, load_model, load_weights_, project
from rollart.types import Completion, Finish, GenerateRequest, SwapReport, WeightVersion

GUESSED_LOGITS = 2**26
"""Bound of the logits that guesses add to a step: with a large vocabulary they are the most memory it takes."""

DEFAULTS = EngineSettings()


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the start."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    step_s: float = 0.0


class EmbeddedEngine:
    """Continuous batching with a cache per session. Not thread-safe: one owner calls everything."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSettings = DEFAULTS,
        *,
        engine_id: str = "embedded",
        seed: int = 0,
        max_context: int | None = None,
        version: WeightVersion = 0,
        eos: frozenset[int] | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`model` comes from `rollart.model.network`. `decode` (token ids to text) is needed for stop strings only;
        `seed` is of requests that bring none; `max_context` bounds prompt and answer, if model and cache do not."""
        config = model.config.get_text_config()
        self._model = model
        self._shape, self._num_query_heads = kept_by(model)
        self._vocab_size: int = config.vocab_size
        self._id = engine_id
        self._settings = settings
        self._keep_kv = settings.keep_kv
        self.version = version
        self._eos = eos_ids(model) if eos is None else eos
        self._stops = None if decode is None else StopFinder(decode)
        positions = getattr(config, "max_position_embeddings", None) or 1 << 62
        self._max_context = min(settings.kv_tokens, positions, max_context or 1 << 62)
        self.kv = KvCache(self._shape, settings.kv_tokens, self._max_context)
        self._dense = dense_forward(model, max(self._max_context, *LENGTHS))  # the proof's sequences fit in any case
        """None where only transformers' own code will do."""
        self._drafts = Drafts()
        self._scheduler = Scheduler(
            self.kv,
            self._drafts,
            max_batch=settings.max_batch,
            step_tokens=settings.step_tokens,
            draft_tokens=settings.draft_tokens,
            guesses=GUESSED_LOGITS // model.config.vocab_size,
        )
        self._live: dict[str, Sequence] = {}
        self._ended: list[tuple[str, Completion]] = []
        """Completions that came about between steps; the next step hands them out."""
        self._arrivals = 0
        self._seeds = np.random.default_rng(seed)
        self.stats = EngineStats()

    @classmethod
    def from_directory(
        cls,
        path: str,
        settings: EngineSettings = DEFAULTS,
        *,
        engine_id: str = "embedded",
        seed: int = 0,
        max_context: int | None = None,
        version: WeightVersion = 0,
        stop_tokens: Iterable[int] = (),
    ) -> "EmbeddedEngine":
        """An engine for a Hugging Face directory with its tokenizer. `stop_tokens` end an answer too.

        JobError for a model that would be computed wrongly: see `rollart.engines.embedded.steps`.
        """
        prove_steps_architecture(AutoConfig.from_pretrained(path))
        tokenizer = AutoTokenizer.from_pretrained(path)

        def decode(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

        model = load_model(path, getattr(torch, settings.dtype), device_named(settings.device))
        named = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
        eos = eos_ids(model) | named | set(stop_tokens)
        engine = cls(
            model,
            settings,
            engine_id=engine_id,
            seed=seed,
            max_context=max_context,
            version=version,
            eos=eos,
            decode=decode,
        )
        prove_steps(model, engine._shape, engine._num_query_heads, engine._hidden, engine._project)
        return engine

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live or self._ended)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_preempted(self) -> int:
        return self._scheduler.num_preempted

    # --- between steps

    def add(self, request: GenerateRequest) -> None:
        """Take a request. Raises RequestError for one that no engine like this can serve."""
        self._check(request)
        seed = request.sampling.seed
        seq = Sequence(
            request,
            arrival=self._arrivals,
            max_context=self._max_context,
            version=self.version,
            seed=int(self._seeds.integers(1 << 63)) if seed is None else _stream(seed, request.id),
        )
        self._arrivals += 1
        self._live[request.id] = seq
        self._scheduler.waiting.append(seq)

    def _check(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        if request.id in self._live:
            raise EngineError(f"{self._id}: request {request.id} is already in flight")
        if self.version < request.min_version:
            raise EngineError(
                f"{self._id}: request {request.id} needs weights of version {request.min_version} or newer, "
                f"this engine serves {self.version}"
            )
        if not 0 < request.prompt_tokens < self._max_context:
            raise RequestError(
                f"{self._id}: a prompt of {request.prompt_tokens} tokens cannot fit: prompt and answer together have "
                f"{self._max_context} tokens (the least of kv_tokens, the model's positions and model.context_tokens)"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0.0 or not 0.0 < sampling.top_p <= 1.0:
            raise RequestError(f"{self._id}: request {request.id} cannot be sampled with {sampling}")
        if sampling.stop and self._stops is None:
            raise RequestError(f"{self._id}: stop strings need a tokenizer, this engine has none")
        tokens = request.tokens()
        if len(tokens) != request.prompt_tokens or tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise RequestError(f"{self._id}: the prompt of {request.id} is not {request.prompt_tokens} valid token ids")

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """End a request now, with what it has; its slot is free at once. Unknown ids are ignored."""
        seq = self._live.get(request_id)
        if seq is not None:
            self._scheduler.remove(seq)
            self.kv.release(seq)
            self._end(seq, Finish.ABORT, self._ended)

    @torch.inference_mode()
    def swap(self, version: WeightVersion, weights: Mapping[str, Tensor]) -> SwapReport:
        """Serve these weights from the next step on. Raises WeightError, with the old ones still in place."""
        started = time.perf_counter()
        load_weights_(self._model, weights)
        if self._dense is not None:
            self._dense.refresh()
        self.version = version
        rebuilt = 0
        for seq in self._live.values():
            seq.turn_to(version)
            if self._keep_kv:
                seq.shares = False
            else:
                rebuilt += seq.length
                seq.length = 0
        if self._keep_kv:
            self.kv.drop_parked()
        else:
            self.kv.clear()
        return SwapReport(version=version, exposed_s=time.perf_counter() - started, rebuilt_tokens=rebuilt)

    # --- one step

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Completion]]:
        """Run one batch; returns what ended since the last step."""
        ended, self._ended = self._ended, []
        started = time.perf_counter()
        num_tokens = self._scheduler.schedule()
        if num_tokens == 0:
            return ended
        plan = StepPlan(self.kv.slabs, self._shape, self._num_query_heads)
        hidden_TH = self._hidden(plan.tokens_T, plan.positions_T, plan)
        asked: list[tuple[Sequence, int]] = []
        rows: list[int] = []
        end = 0
        for seq in plan.seqs:
            end += seq.take
            known = seq.take - seq.draft
            seq.length += known
            if seq.length == seq.total:
                asked += [(seq, ahead) for ahead in range(seq.draft + 1)]
                rows += range(end - seq.draft - 1, end)
            if known > 1 or not seq.logprobs:
                seq.prefilled += known
        finished = self._draw(hidden_TH, asked, rows) if asked else []
        step_s = time.perf_counter() - started
        token_s = step_s / num_tokens
        for seq in plan.seqs:
            seq.busy_s += seq.take * token_s
        self.stats.steps += 1
        self.stats.computed_tokens += num_tokens
        self.stats.step_s += step_s
        for seq, finish in finished:
            self._scheduler.remove(seq)
            if seq.request.last:
                self.kv.release(seq)
            else:
                self.kv.park(seq)
            self._end(seq, finish, ended)
        return ended

    def _hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        if self._dense is not None:
            return self._dense(tokens_T, positions_T, plan)
        return forward_hidden(self._model, tokens_T, positions_T, plan)

    def _project(self, hidden_TH: Tensor) -> Tensor:
        return project(self._model, hidden_TH) if self._dense is None else self._dense.project(hidden_TH)

    def _draw(
        self, hidden_TH: Tensor, asked: list[tuple[Sequence, int]], rows: list[int]
    ) -> list[tuple[Sequence, Finish]]:
        """Sample for these sequences, from these rows; keep guesses as far as they came out. Returns who is done."""
        if len(rows) < len(hidden_TH):
            hidden_TH = hidden_TH.index_select(0, torch.tensor(rows, device=hidden_TH.device))
        tokens, logprobs = sample(self._project(hidden_TH), asked)
        finished: list[tuple[Sequence, Finish]] = []
        first = 0
        while first < len(asked):
            seq, last = asked[first][0], first + asked[first][0].draft
            for row in range(first, last + 1):
                came_out = row < last and tokens[row] == seq.buffer[seq.total]
                seq.append(tokens[row], logprobs[row])
                finish = self._finish(seq)
                if finish is not None:
                    finished.append((seq, finish))
                if finish is not None or not came_out:
                    break
            seq.length = seq.total - 1
            self.stats.sampled_tokens += row + 1 - first
            if self._settings.draft_tokens:
                self._drafts.learn(seq, tokens[first : row + 1])
            first = last + 1
        return finished

    def _finish(self, seq: Sequence) -> Finish | None:
        """Whether its newest token was its last, and why."""
        stops = seq.sampling.stop
        if seq.last_token in self._eos:
            return Finish.STOP
        if stops and self._stops is not None and self._stops.ends(seq.sampled(), stops):
            return Finish.STOP
        return Finish.LENGTH if seq.total >= seq.limit else None

    def _end(self, seq: Sequence, finish: Finish, ended: list[tuple[str, Completion]]) -> None:
        del self._live[seq.request.id]
        ended.append((seq.request.id, seq.completion(finish, self._id)))


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The end-of-sequence tokens a model's own files name."""
    found: set[int] = set()
    for source in (model.generation_config, model.config):
        value = getattr(source, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def _stream(seed: int, request_id: str) -> int:
    """Each request has random numbers of its own: those of the members of a group must differ."""
    return int.from_bytes(blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest(), "big")

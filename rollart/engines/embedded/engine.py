"""The embedded engine: continuous batching over a transformers model on the CPU or one CUDA device.

`EmbeddedEngine` is synchronous and knows no asyncio: whoever owns it calls `add`, `abort` and `swap` between steps, and
`step` in a loop while it is `busy`. One step = schedule, one flat forward pass, sample, finish; where the back end
overlaps them, a step is launched before the results of the one before it are taken, so a request that ended is computed
for one token too many, which is dropped. Swaps and aborts first take the results of the step under way. The engine owns
the model, the cache and all requests in flight.

Weights change only between steps. What was sampled before keeps its version (the completion's spans say where they
changed); the cache of requests in flight is computed again under the new weights, or kept (`keep_kv`); that of idle
sessions is dropped.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.backend import Backend, Launched, Ready
from rollart.engines.embedded.drafts import Drafts
from rollart.engines.embedded.kv import KvShape
from rollart.engines.embedded.paged.pages import PagedMemory
from rollart.engines.embedded.paged.runner import PagedBackend
from rollart.engines.embedded.paged.shapes import most_chunked
from rollart.engines.embedded.scheduler import Scheduler
from rollart.engines.embedded.sequence import Sequence
from rollart.engines.embedded.slabs import SlabBackend
from rollart.engines.embedded.steps import kept_by, prove_steps, prove_steps_architecture, refuse_windows
from rollart.engines.stops import Decode, StopFinder
from rollart.errors import EngineError, JobError, RequestError
from rollart.model.network import device_named, load_model, named_weights, stay_on
from rollart.types import Completion, Finish, GenerateRequest, StepSums, SwapReport, WeightVersion, WorkMeter

GUESSED_LOGITS = 2**26
"""Bound of the logits that guesses add to a step: with a large vocabulary they are the most memory it takes."""

WORKSPACE = 1 << 30
"""Bytes for captured graphs and what the matrix library keeps."""

DEFAULTS = EngineSettings()
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the start."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    step_s: float = 0.0


class _Step(NamedTuple):
    """A step that was begun."""

    launched: Launched
    has: StepSums
    """What is in it; its seconds are not known yet."""


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
        paged: bool | None = None,
        lends: bool = False,
    ) -> None:
        """`model` comes from `rollart.model.network`. `decode` (token ids to text) is needed for stop strings only;
        `seed` is of requests that bring none; `max_context` bounds prompt and answer, if model and cache do not.
        `paged` chooses the back end; by default pages on CUDA, slabs elsewhere. `lends`: another engine copies prompts
        from its pages (`handover.py`)."""
        self.model = model
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self.engine_id = engine_id
        self._keep_kv = settings.keep_kv
        self.version = version
        self.eos = eos_ids(model) if eos is None else eos
        self._stops = None if decode is None else StopFinder(decode)
        self.backend = make_backend(model, settings, max_context, paged, lends=lends)
        self.max_context = self.backend.max_context
        self.kv = self.backend.memory
        self._draft_tokens = 0 if self.backend.overlaps else settings.most_draft_tokens
        self._drafts = Drafts()
        self.scheduler = Scheduler(
            self.kv,
            self._drafts,
            max_batch=settings.max_batch,
            step_tokens=settings.step_tokens,
            draft_tokens=self._draft_tokens,
            guesses=GUESSED_LOGITS // self._vocab_size,
        )
        self._lender = self.kv if lends and isinstance(self.kv, PagedMemory) else None
        self.lent: dict[str, list[int]] = {}
        """Of requests that ended, where another engine copies them: the pages of all but the last token of the prompt.
        Who takes them out gives them back."""
        self._under_way: _Step | None = None
        """The step whose results were not taken yet."""
        self.stalled = False
        """The last step had nothing to compute, whoever is in flight: pages that are lent have yet to come back."""
        self._began = 0.0
        """When the device was free for the step under way."""
        self.live: dict[str, Sequence] = {}
        self._ended: list[tuple[str, Completion]] = []
        """Completions that came about between steps; the next step hands them out."""
        self._work = WorkMeter()
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
        paged: bool | None = None,
        lends: bool = False,
    ) -> "EmbeddedEngine":
        """An engine for a Hugging Face directory with its tokenizer. `stop_tokens` end an answer too.

        JobError for a model that would be computed wrongly: see `rollart.engines.embedded.steps`.
        """
        stay_on(device := device_named(settings.device))
        prove_steps_architecture(AutoConfig.from_pretrained(path))
        tokenizer = AutoTokenizer.from_pretrained(path)

        def decode(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

        model = load_model(path, getattr(torch, settings.dtype), device)
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
            paged=paged,
            lends=lends,
        )
        prove_steps(model, engine.backend)
        return engine

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.live or self._ended)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_preempted(self) -> int:
        return self.scheduler.num_preempted

    # --- between steps

    def add(self, request: GenerateRequest) -> None:
        """Take a request. Raises RequestError for one that no engine like this can serve."""
        self._check(request)
        seed = request.sampling.seed
        seq = Sequence(
            request,
            arrival=self._arrivals,
            max_context=self.max_context,
            version=self.version,
            seed=int(self._seeds.integers(1 << 63)) if seed is None else _stream(seed, request.id),
        )
        self._arrivals += 1
        self.live[request.id] = seq
        self.scheduler.waiting.append(seq)

    def _check(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        if request.id in self.live:
            raise EngineError(f"{self.engine_id}: request {request.id} is already in flight")
        if self.version < request.min_version:
            raise EngineError(
                f"{self.engine_id}: request {request.id} needs weights of version {request.min_version} or newer, "
                f"this engine serves {self.version}"
            )
        if not 0 < request.prompt_tokens < self.max_context:
            raise RequestError(
                f"{self.engine_id}: a prompt of {request.prompt_tokens} tokens cannot fit: prompt and answer together "
                f"have {self.max_context} tokens (the least of kv_tokens, the model's positions and "
                "model.context_tokens)"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0.0 or not 0.0 < sampling.top_p <= 1.0:
            raise RequestError(f"{self.engine_id}: request {request.id} cannot be sampled with {sampling}")
        if sampling.stop and self._stops is None:
            raise RequestError(f"{self.engine_id}: stop strings need a tokenizer, this engine has none")
        tokens = request.tokens()
        if len(tokens) != request.prompt_tokens or tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise RequestError(
                f"{self.engine_id}: the prompt of {request.id} is not {request.prompt_tokens} valid token ids"
            )

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """End a request now, with what it has; its slot is free at once. Unknown ids are ignored."""
        self._drain()
        seq = self.live.get(request_id)
        if seq is not None:
            self.scheduler.remove(seq)
            self.kv.release(seq)
            self._end(seq, Finish.ABORT, self._ended)

    def prepare(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> Ready:
        """Make weights ready for `put_in`. The one call that another thread may make, beside the steps. `adopt`: their
        memory stays as it is while their tensors live, and may be served from. Raises WeightError."""
        return self.backend.prepare(weights, adopt=adopt)

    def swap(self, version: WeightVersion, weights: Mapping[str, Tensor]) -> SwapReport:
        """Both at once: serve these weights from the next step on."""
        ready = self.prepare(weights)
        try:
            return self.put_in(version, ready)
        finally:
            ready.let_go()

    @torch.inference_mode()
    def put_in(self, version: WeightVersion, ready: Ready) -> SwapReport:
        """Serve these weights from the next step on. Raises WeightError, with the old ones still in place."""
        self._drain()
        ready.put_in()
        self.version = version
        rebuilt = 0
        for seq in self.live.values():
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
        return SwapReport(version=version, rebuilt_tokens=rebuilt)

    # --- one step

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Completion]]:
        """Run one batch; returns what ended since the last step."""
        if self._under_way is not None and self.kv.short_of(self.scheduler.running):
            self._drain()  # whoever gives way must know all its tokens
        launched = self._launch()
        self.stalled = launched is None and self._under_way is None
        self._drain()
        self._under_way = launched
        if not self.backend.overlaps:
            self._drain()
        ended, self._ended = self._ended, []
        return ended

    def _launch(self) -> _Step | None:
        """Begin a step, and count on what it will give. None where there is nothing to compute."""
        num_tokens = self.scheduler.schedule()
        if num_tokens == 0:
            return None
        rested = self._under_way is None
        if rested:
            self._began = time.perf_counter()
        launched = self.backend.launch(self.scheduler.running, rested=rested)
        sequences = cached = prompts = tokens = pairs = 0
        for seq in launched.seqs:
            known = seq.take - seq.draft
            if known > 1 or (seq.total == seq.prompt_tokens and not seq.given):
                seq.prefilled += known
                tokens += known
                pairs += known * (2 * seq.length + known)
                prompts += seq.length + known == seq.total
            else:
                sequences += 1
                cached += seq.total
            seq.length += known
        for seq, ahead in launched.asked:
            if ahead == 0:
                seq.expect()
        self.stats.steps += 1
        self.stats.computed_tokens += num_tokens
        return _Step(launched, StepSums(1.0, sequences, cached, prompts, tokens, pairs / 2))

    def _drain(self) -> None:
        """Take the results of the step under way; what ended by them is handed out by the next step."""
        step, self._under_way = self._under_way, None
        if step is None:
            return
        launched = step.launched
        tokens, logprobs = launched.result()
        now = time.perf_counter()
        step_s, self._began = now - self._began, now
        if launched.taken_s is not None:
            step_s = launched.taken_s()
        # Who ended a step ago pays nothing for the token too many.
        paying = [(seq, take) for seq, take in zip(launched.seqs, launched.takes, strict=True) if seq.placed]
        if num_tokens := sum(take for _, take in paying):
            self.stats.step_s += step_s
        for seq, take in paying:
            seq.busy_s += take * step_s / num_tokens
        before = self.stats.sampled_tokens
        finished = self._take(launched.asked, tokens, logprobs)
        if num_tokens:
            self._count(step.has, step_s, (self.stats.sampled_tokens - before) / len(paying))
        for seq, finish in finished:
            seq.cut_short()
            self.scheduler.remove(seq)
            if seq.request.last:
                self.kv.release(seq)
            else:
                self.kv.park(seq)
            if self._lender is not None:
                self.lent[seq.request.id] = self._lender.lend(seq.session, seq.buffer[: seq.prompt_tokens - 1])
            self._end(seq, finish, self._ended)

    def _count(self, has: StepSums, step_s: float, sampled: float) -> None:
        """`sampled`: tokens of each sequence. A step in which guesses came out counts as the steps that it saved."""
        steps = max(1.0, sampled) if self._draft_tokens and not has.tokens else 1.0
        self._work.add(
            step_s,
            steps,
            sequences=has.sequences,
            cached=has.cached,
            prompts=has.prompts,
            tokens=has.tokens,
            pairs=has.pairs,
        )

    def _take(
        self, asked: list[tuple[Sequence, int]], tokens: list[int], logprobs: list[float]
    ) -> list[tuple[Sequence, Finish]]:
        """Give these tokens to their sequences; of guesses as many as came out. Returns who is done."""
        finished: list[tuple[Sequence, Finish]] = []
        first = 0
        while first < len(asked):
            seq, last = asked[first][0], first + asked[first][0].draft
            if seq.in_flight:  # else it ended a step ago, and this one is one too many
                row = self._take_guesses(seq, tokens, logprobs, first, last, finished)
                self.stats.sampled_tokens += row + 1 - first
                if self._draft_tokens:
                    self._drafts.learn(seq, tokens[first : row + 1])
            first = last + 1
        return finished

    def _take_guesses(
        self,
        seq: Sequence,
        tokens: list[int],
        logprobs: list[float],
        first: int,
        last: int,
        finished: list[tuple[Sequence, Finish]],
    ) -> int:
        """The token that was asked for, and those guessed behind it as far as they came out; returns the last row."""
        row = first
        while True:
            came_out = row < last and tokens[row] == seq.buffer[seq.total - 1]
            seq.append(tokens[row], logprobs[row])
            finish = self._finish(seq)
            if finish is not None:
                finished.append((seq, finish))
            if finish is not None or not came_out:
                break
            row += 1
            seq.expect()
        if not self.backend.overlaps:
            seq.length = seq.total - 1
        return row

    def _finish(self, seq: Sequence) -> Finish | None:
        """Whether its newest token was its last, and why."""
        stops = seq.sampling.stop
        if seq.last_token in self.eos:
            return Finish.STOP
        if stops and self._stops is not None and self._stops.ends(seq.sampled(), stops):
            return Finish.STOP
        return Finish.LENGTH if seq.total - seq.in_flight >= seq.limit else None

    def _end(self, seq: Sequence, finish: Finish, ended: list[tuple[str, Completion]]) -> None:
        del self.live[seq.request.id]
        ended.append((seq.request.id, seq.completion(finish, self.engine_id, self._work.report())))


def make_backend(
    model: PreTrainedModel,
    settings: EngineSettings,
    max_context: int | None,
    paged: bool | None,
    *,
    lends: bool = False,
) -> Backend:
    """Pages on CUDA, slabs elsewhere, unless the caller says otherwise."""
    shape, query_heads = kept_by(model)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 62
    most = min(positions, max_context or 1 << 62)
    if not (shape.device.type == "cuda" if paged is None else paged):
        return SlabBackend(model, shape, query_heads, kv_tokens=settings.cpu_kv_tokens, max_context=most)
    if shape.device.type == "cuda":
        refuse_windows(model.config, most)
    kv_tokens = settings.kv_tokens or (
        kv_tokens_of(model, shape, settings) if shape.device.type == "cuda" else settings.cpu_kv_tokens
    )
    return PagedBackend(
        model,
        shape,
        kv_tokens=kv_tokens,
        max_context=most,
        max_batch=settings.max_batch,
        step_tokens=settings.step_tokens,
        stages=settings.stage == "device",
        lends=lends,
    )


def kv_tokens_of(model: PreTrainedModel, shape: KvShape, settings: EngineSettings) -> int:
    """How many tokens fit into the engine's share of the card, beside the weights and what a step needs."""
    config = model.config.get_text_config()
    free, total = torch.cuda.mem_get_info(shape.device)
    others = total - free - torch.cuda.memory_reserved(shape.device)
    size = torch.finfo(shape.dtype).bits // 8
    inner = config.intermediate_size * getattr(config, "num_experts_per_tok", 1)
    weights = sum(weight.numel() for weight in named_weights(model).values())
    graphed = settings.max_batch + most_chunked(settings.step_tokens, weights)  # their memory serves nothing else
    activations = (settings.step_tokens + graphed) * (4 * inner + 12 * config.hidden_size) * size
    logits = 3 * settings.max_batch * config.vocab_size * size
    kept = 2 * shape.layers * shape.heads * shape.head_size * size
    share = settings.memory_share * total - torch.cuda.memory_allocated(shape.device)
    room = min(share, free + torch.cuda.memory_reserved(shape.device) - torch.cuda.memory_allocated(shape.device))
    staged = sum(weight.nbytes for weight in named_weights(model).values()) if settings.stage == "device" else 0
    tokens = int(room - activations - logits - WORKSPACE - staged) // kept
    if tokens < 1:
        raise JobError(
            f"engines.memory: {settings.memory_share:g} of this card ({total / 2**30:.0f} GiB, {others / 2**30:.1f} of "
            "them held by others) leaves no room for a cache beside the weights"
            f"{' and those that are staged' if staged else ''}; raise it, or choose a smaller model"
        )
    logger.info(
        "cache: %d tokens, %.1f GiB of %.0f GiB (engines.memory %g)",
        *(tokens, tokens * kept / 2**30, total / 2**30, settings.memory_share),
    )
    return tokens


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

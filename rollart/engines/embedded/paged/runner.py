"""One step of the paged back end: what the host says of it goes over in one copy, the answer comes back in one.

A step runs as a CUDA graph, padded to the next captured shape (`shapes.py`); one with so many prompt tokens that it
does not wait for the host runs kernel by kernel. Both compute the same. The device keeps the newest token of every
lane, so that a step can be launched while the one before it, which samples its input, still runs. On a CPU nothing is
captured and nothing overlaps in time; the order of calls is the same, which is what the fast tests see.
"""

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Row
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollart.engines.embedded.backend import Launched, Ready, asked_of
from rollart.engines.embedded.kv import KvShape
from rollart.engines.embedded.paged import ops
from rollart.engines.embedded.paged.forward import PagedForward, paged_forward
from rollart.engines.embedded.paged.ops import CHUNK_ROWS, Draws, Where
from rollart.engines.embedded.paged.pages import PagedMemory
from rollart.engines.embedded.paged.shapes import StepShape, StepShapes, splits_for
from rollart.engines.embedded.sampler import draw
from rollart.engines.embedded.sequence import Sequence
from rollart.model.adapters import are_adapters
from rollart.model.agreement import LENGTHS
from rollart.model.network import forward_hidden, load_weights_, matched, named_weights

logger = logging.getLogger(__name__)

PAGE_TOKENS = {"cuda": 64, "cpu": 16}
RING = 3
"""Host buffers used in turn: one is filled while the device may still read the one before."""
WORDS_PER_ROW, WORDS_PER_TOKEN, WORDS_PER_BLOCK = 5, 3, 4
"""A row that samples: seed (2), temperature, lane, place among the tokens. A token: itself, lane, position."""
PARTS = 10
"""Arrays that the device is told a step with: each is filled up to ALIGNED_WORDS."""
ALIGNED_WORDS = 4
"""What a kernel is given begins at a multiple of 16 bytes: Triton compiles it anew for a pointer that does not."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class _Inputs(NamedTuple):
    """A step as the device sees it: views of the one buffer that was copied there."""

    seeds_B: Tensor
    temperatures_B: Tensor
    lanes_B: Tensor
    rows_B: Tensor
    tokens_T: Tensor
    lanes_T: Tensor
    positions_T: Tensor
    blocks_N4: Tensor
    changed_C: Tensor
    pages_C: Tensor


class _Graph(NamedTuple):
    graph: Any
    tokens_B: Tensor
    logprobs_B: Tensor
    logits_BV: Tensor | None
    """None beside prompts: those of all shapes together would take gigabytes."""


class _Mark:
    """A moment on the device's own clock, when all is done that was launched before it; on a CPU, now.

    The host sees the end of a step late where it starts the kernels of the next one by one: by its clock a step without
    prompts would have taken what the step after it did."""

    def __init__(self, on_cuda: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_cuda else None
        if self._event is not None:
            self._event.record()
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, before: "_Mark") -> float:
        """Once both are over."""
        if self._event is not None and before._event is not None:
            return before._event.elapsed_time(self._event) / 1e3
        return self._at_s - before._at_s


class _Copies:
    """Weights to be copied at the swap: graphs and kernels read them where they are."""

    def __init__(self, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
        self._model = model
        self._weights = weights

    def put_in(self) -> None:
        load_weights_(self._model, self._weights)
        for weight in self._weights.values():
            if weight.is_cuda:  # its memory is not another's before the copy is done
                weight.record_stream(torch.cuda.current_stream(weight.device))

    def let_go(self) -> None:
        self._weights = {}


class PagedBackend:
    overlaps = True

    def __init__(
        self,
        model: PreTrainedModel,
        shape: KvShape,
        *,
        kv_tokens: int,
        max_context: int,
        max_batch: int,
        step_tokens: int,
        forward: PagedForward | None = None,
        page_tokens: int | None = None,
        graphs: bool = True,
        stages: bool = False,
        lends: bool = False,
    ) -> None:
        """`stages`: weights are brought to the device when they are made ready, beside the steps. `lends`: it computes
        prompts for another engine, which copies them from its cache."""
        self._model, self._shape = model, shape
        self._device = shape.device
        page = page_tokens or PAGE_TOKENS[self._device.type]
        self._page_tokens = page
        self.max_context = min(kv_tokens // page * page, max_context)
        self._max_batch = max_batch
        self.memory = PagedMemory(
            shape,
            kv_tokens=kv_tokens,
            max_context=self.max_context,
            page_tokens=page,
            lanes=max_batch,
            lends=lends,
        )
        self._forward = forward or paged_forward(model, max(self.max_context, *LENGTHS))
        """None where only transformers' own code will do."""
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._head = head
        self._lane_tokens = torch.zeros(max_batch + 1, dtype=torch.int32, device=self._device)
        self._on_cuda = self._device.type == "cuda"
        self._ring = [torch.zeros(0, dtype=torch.int32)] * RING
        self._answers = [torch.zeros(2, max_batch, dtype=torch.int32, pin_memory=self._on_cuda) for _ in range(RING)]
        self._turn = 0
        self._ended: _Mark | None = None
        """Of the step that was launched last."""
        self._stages = stages
        self._beside = torch.cuda.Stream(self._device) if stages and self._on_cuda else None
        self._buffer = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._shapes = (
            StepShapes(
                max_batch=max_batch,
                step_tokens=step_tokens,
                max_context=self.max_context,
                kv_heads=shape.heads,
                weights=self._forward.weights,
            )
            if self._forward is not None
            else None
        )
        self._fixed = torch.zeros(self._most_words(), dtype=torch.int32, device=self._device)
        """Stays where it is: graphs read it."""
        self._reserve(len(self._fixed))
        self.graphs: dict[StepShape, _Graph] = {}
        self.captures = self._on_cuda and graphs and not lends and self._forward is not None and not self._forward.waits
        if self.captures:
            self._capture_all()

    def _most_words(self) -> int:
        if self._shapes is None:
            return 0
        return (
            max(
                WORDS_PER_ROW * shape.sampled + WORDS_PER_TOKEN * shape.tokens + WORDS_PER_BLOCK * shape.blocks
                for shape in self._shapes.all()
            )
            + PARTS * ALIGNED_WORDS
        )

    def trial(self, kv_tokens: int, max_context: int) -> "PagedBackend":
        return PagedBackend(
            self._model,
            self._shape,
            kv_tokens=kv_tokens,
            max_context=max_context,
            max_batch=len(LENGTHS),
            step_tokens=sum(LENGTHS),
            forward=self._forward,
            page_tokens=self._page_tokens,
            graphs=False,
        )

    def prepare(self, weights: Mapping[str, Tensor], *, adopt: bool) -> Ready:
        if not self._stages or are_adapters(weights):
            return _Copies(self._model, weights)
        try:
            return _Copies(self._model, self._staged(weights))
        except torch.cuda.OutOfMemoryError as error:
            logger.warning("no room to stage weights on %s, they are copied at the swap: %s", self._device, error)
            return _Copies(self._model, weights)

    def _staged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the device, in the model's own types. Raises WeightError."""
        types = {name: live.dtype for name, live in named_weights(self._model).items()}
        given = matched(self._model, weights)
        with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            there = {name: weight.to(self._device, types[name], copy=True) for name, weight in given.items()}
        if self._beside is not None:
            self._beside.synchronize()
        return there

    # --- a step

    def launch(self, running: Row[Sequence], *, rested: bool = False) -> Launched:
        before = self._ended
        if rested or before is None:
            before = _Mark(self._on_cuda)
        seqs = _ordered(running)
        asked, rows = asked_of(seqs)
        takes = [seq.take for seq in seqs]
        shape = self._shape_of(seqs, asked)
        inputs, where = self._send(seqs, asked, rows, shape)
        captured = self.graphs.get(shape) if shape is not None else None
        if captured is not None:
            captured.graph.replay()
            tokens_B, logprobs_B, logits_BV = captured.tokens_B, captured.logprobs_B, captured.logits_BV
        else:
            hidden_TH = self._hidden(inputs, where)
            if asked:
                tokens_B, logprobs_B, logits_BV = self._sampled(hidden_TH, inputs, where, asked)
        if not asked:
            ended = self._ended = _Mark(self._on_cuda)
            return Launched(seqs, takes, asked, lambda: _nothing(ended), lambda: ended.seconds_since(before))
        if logits_BV is not None:
            self._draw_truncated(logits_BV, asked, tokens_B, logprobs_B)
        result, ended = self._returned(tokens_B, logprobs_B, len(asked))
        self._ended = ended
        return Launched(seqs, takes, asked, result, lambda: ended.seconds_since(before))

    def _shape_of(self, seqs: Row[Sequence], asked: Row[tuple[Sequence, int]]) -> StepShape | None:
        """What the step is padded to; None where it runs as it is."""
        if self._shapes is None:
            return None
        chunks = [seq.take for seq in seqs if seq.take > 1]
        if chunks and (any(_is_truncated(seq) for seq, _ in asked) or (self._on_cuda and not self.captures)):
            return None
        return self._shapes.of(
            singles=len(seqs) - len(chunks),
            longest=max((seq.length + 1 for seq in seqs if seq.take == 1), default=1),
            chunks=len(chunks),
            chunk_tokens=sum(chunks),
        )

    def _sampled(
        self, hidden_TH: Tensor, inputs: _Inputs, where: Where, asked: Row[tuple[Sequence, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probabilities and logits."""
        if len(inputs.rows_B):  # else all rows sample
            hidden_TH = hidden_TH.index_select(0, inputs.rows_B)
        logits_BV = self._logits(hidden_TH)
        return *self._draw(logits_BV if self._on_cuda else logits_BV[: len(asked)], inputs, asked), logits_BV

    def hidden(self, running: Row[Sequence]) -> tuple[list[Sequence], Tensor]:
        seqs = _ordered(running)
        return seqs, self._hidden(*self._send(seqs, [], [], None))

    def project(self, hidden_TH: Tensor) -> Tensor:
        return self._logits(hidden_TH).float()

    def _hidden(self, inputs: _Inputs, where: Where) -> Tensor:
        # A token below 0 is the newest of its lane: only the device knows it.
        newest_T = self._lane_tokens.index_select(0, inputs.lanes_T)
        tokens_T = torch.where(inputs.tokens_T < 0, newest_T, inputs.tokens_T)
        if self._forward is not None:
            return self._forward(tokens_T, where, self.memory.layers)
        plan = _Plan(self.memory.layers, where)
        return forward_hidden(self._model, tokens_T.long(), where.positions_T.long(), plan)

    def _logits(self, hidden_TH: Tensor) -> Tensor:
        return cast(Tensor, self._head(hidden_TH))

    def _draw(self, logits_BV: Tensor, inputs: _Inputs, asked: Row[tuple[Sequence, int]]) -> tuple[Tensor, Tensor]:
        if self._on_cuda:
            return ops.draw(logits_BV, Draws(inputs.temperatures_B, inputs.seeds_B, inputs.lanes_B), self._lane_tokens)
        tokens_B, logprobs_B = draw(logits_BV.float(), [(seq, seq.in_flight) for seq, _ in asked])
        self._lane_tokens.index_copy_(0, inputs.lanes_B.long()[: len(asked)], tokens_B.int())
        return tokens_B.int(), logprobs_B

    def _draw_truncated(
        self, logits_BV: Tensor, asked: Row[tuple[Sequence, int]], tokens_B: Tensor, logprobs_B: Tensor
    ) -> None:
        """Rows with top-k or top-p need their tokens in order: they are drawn once more, by themselves."""
        picked = [row for row, (seq, _) in enumerate(asked) if _is_truncated(seq)]
        if not picked or not self._on_cuda:
            return
        rows = torch.tensor(picked, device=self._device)
        chosen = [(asked[row][0], asked[row][0].in_flight) for row in picked]
        tokens, logprobs = draw(logits_BV.index_select(0, rows).float(), chosen)
        tokens_B.index_copy_(0, rows, tokens.int())
        logprobs_B.index_copy_(0, rows, logprobs)
        lanes = torch.tensor([seq.lane for seq, _ in chosen], device=self._device)
        self._lane_tokens.index_copy_(0, lanes, tokens.int())

    def _returned(
        self, tokens_B: Tensor, logprobs_B: Tensor, count: int
    ) -> tuple[Callable[[], tuple[list[int], list[float]]], _Mark]:
        """Begin to copy the answer to the host; whoever calls the result waits for it. And when that is done."""
        answer = self._answers[self._turn]
        answer[0, :count].copy_(tokens_B[:count], non_blocking=True)
        answer[1, :count].copy_(logprobs_B[:count].view(torch.int32), non_blocking=True)
        ended = _Mark(self._on_cuda)

        def result() -> tuple[list[int], list[float]]:
            ended.wait()
            return answer[0, :count].tolist(), answer[1, :count].view(torch.float32).tolist()

        return result, ended

    # --- what the device is told

    def _send(
        self, seqs: Row[Sequence], asked: Row[tuple[Sequence, int]], rows: Row[int], shape: StepShape | None
    ) -> tuple[_Inputs, Where]:
        """All of a step, filled up to its shape with rows of the idle lane and pieces of no tokens.

        The layout of one shape is always the same, as graphs read it in place. Changed table entries would move it, so
        they travel by themselves."""
        if shape is not None:
            self._tell_tables()
        takes = np.array([seq.take for seq in seqs], dtype=np.int64)
        starts = np.array([seq.length for seq in seqs], dtype=np.int64)
        lanes = np.array([seq.lane for seq in seqs], dtype=np.int64)
        ends = takes.cumsum()
        num_tokens = int(takes.sum())
        offsets = np.arange(num_tokens) - np.repeat(ends - takes, takes)
        singles = int((takes == 1).sum())
        gap = 0 if shape is None else shape.singles - singles
        firsts = ends - takes + gap * (takes > 1)
        flat = np.zeros((3, num_tokens if shape is None else shape.tokens), dtype=np.int32)
        flat[1] = self.memory.idle_lane
        if seqs:
            chunks = [seq.buffer[seq.length : seq.length + seq.take] for seq in seqs[singles:]]
            places = np.repeat(firsts, takes) + offsets
            flat[0, places] = np.concatenate([[_input(seq) for seq in seqs[:singles]], *chunks])
            flat[1, places] = np.repeat(lanes, takes)
            flat[2, places] = np.repeat(starts, takes) + offsets
        pieces = _pieces(*(each[singles:].tolist() for each in (firsts, takes, starts, lanes)))
        blocks = np.zeros((len(pieces) if shape is None else shape.blocks, 4), dtype=np.int32)
        if pieces:
            blocks[: len(pieces)] = pieces
        decoding = singles if shape is None else shape.singles
        sampled = np.zeros(len(asked) if shape is None else shape.sampled, dtype=np.int32)
        sampled[: len(rows)] = [row + (gap if row >= singles else 0) for row in rows]
        all_sample = shape is not None and not shape.chunk_tokens  # or are padding, or last and not asked
        inputs = self._copy(
            [seq for seq, _ in asked],
            sampled=len(sampled),
            rows=sampled[:0] if all_sample else sampled,
            flat=flat,
            blocks=blocks,
            fixed=shape is not None,
        )
        if shape is not None:
            splits = shape.splits
        else:
            longest = int(starts[:singles].max()) + 1 if singles else 0
            splits = splits_for(max(singles, 1), self._shape.heads, longest)
        return inputs, Where(inputs.lanes_T, inputs.positions_T, decoding, splits, inputs.blocks_N4)

    def _copy(
        self,
        asked: Row[Sequence],
        *,
        sampled: int,
        rows: npt.NDArray[np.int32],
        flat: npt.NDArray[np.int32],
        blocks: npt.NDArray[np.int32],
        fixed: bool,
    ) -> _Inputs:
        """One copy to the device, with the changed page tables. `sampled`: rows that sample, nobody's included."""
        changed, pages = self.memory.take_changes()
        seeds = np.zeros(sampled, dtype=np.uint64)
        temperatures = np.zeros(sampled, dtype=np.float32)
        own_lanes = np.full(sampled, self.memory.idle_lane, dtype=np.int32)
        if asked:
            seeds[: len(asked)] = _seeds(asked)
            temperatures[: len(asked)] = [seq.sampling.temperature for seq in asked]
            own_lanes[: len(asked)] = [seq.lane for seq in asked]
        parts = [
            *(seeds.view(np.int32), changed.view(np.int32), temperatures.view(np.int32), own_lanes, rows),
            *(*flat, blocks.ravel(), pages),
        ]
        gaps = [-len(part) % ALIGNED_WORDS for part in parts]
        sizes = [size for part, gap in zip(parts, gaps, strict=True) for size in (len(part), gap)]
        words = sum(sizes)
        self._reserve(words)
        self._turn = (self._turn + 1) % RING
        host = self._ring[self._turn]
        nothing = np.zeros(ALIGNED_WORDS, dtype=np.int32)
        filled = [piece for part, gap in zip(parts, gaps, strict=True) for piece in (part, nothing[:gap])]
        np.concatenate(filled, out=host.numpy()[:words])
        there = (self._fixed if fixed else self._buffer)[:words]
        there.copy_(host[:words], non_blocking=True)
        views = torch.split(there, sizes)[::2]
        inputs = _Inputs(
            seeds_B=views[0].view(torch.int64),
            changed_C=views[1].view(torch.int64),
            temperatures_B=views[2].view(torch.float32),
            lanes_B=views[3],
            rows_B=views[4],
            tokens_T=views[5],
            lanes_T=views[6],
            positions_T=views[7],
            blocks_N4=views[8].view(len(blocks), 4),
            pages_C=views[9],
        )
        if len(changed):
            self.memory.tables_LN.view(-1).index_copy_(0, inputs.changed_C, inputs.pages_C)
        return inputs

    def _tell_tables(self) -> None:
        changed, pages = self.memory.take_changes()
        if len(changed):
            both = torch.from_numpy(np.stack((changed, pages.astype(np.int64))))
            both = (both.pin_memory() if self._on_cuda else both).to(self._device, non_blocking=True)
            self.memory.tables_LN.view(-1).index_copy_(0, both[0], both[1].int())

    def _reserve(self, words: int) -> None:
        if words > len(self._buffer):
            size = 1 << (words - 1).bit_length()
            if self._on_cuda:
                torch.cuda.synchronize(self._device)  # nobody reads the old ones any more
            self._ring = [torch.zeros(size, dtype=torch.int32, pin_memory=self._on_cuda) for _ in range(RING)]
            self._buffer = torch.zeros(size, dtype=torch.int32, device=self._device)

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Graphs for every shape: the largest first, whose memory serves all."""
        assert self._shapes is not None
        began = time.perf_counter()
        pool = None
        shapes = self._shapes.all()
        for number, shape in enumerate(shapes):
            inputs, where = self._send([], [], [], shape)
            self._sampled(self._hidden(inputs, where), inputs, where, [])  # compiles the kernels; a graph may not
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                tokens_B, logprobs_B, logits_BV = self._sampled(self._hidden(inputs, where), inputs, where, [])
            pool = pool or graph.pool()
            self.graphs[shape] = _Graph(graph, tokens_B, logprobs_B, None if shape.chunk_tokens else logits_BV)
            if number % 16 == 0 or number + 1 == len(shapes):
                seconds = time.perf_counter() - began
                logger.info("CUDA graphs: %d of %d captured, %.1f s", number + 1, len(shapes), seconds)


class _Plan:
    """An `AttentionPlan` over pages, for models that run by transformers' own code."""

    def __init__(self, layers: list[ops.Cache], where: Where) -> None:
        self._layers, self._where = layers, where

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        cache = self._layers[layer]
        ops.keep(key_THD, value_THD, cache, self._where)
        return ops.attend(query_THD, cache, self._where, scaling, window)


def _nothing(ended: _Mark) -> tuple[list[int], list[float]]:
    """Of a step in which nobody sampled. It is waited for all the same: its host buffer is used again."""
    ended.wait()
    return [], []


def _ordered(running: Row[Sequence]) -> list[Sequence]:
    """Those that take part: single tokens first, then chunks; of both, those that sample first."""
    return sorted((seq for seq in running if seq.take), key=lambda seq: (seq.take > 1, seq.take < seq.pending))


def _pieces(firsts: Row[int], takes: Row[int], starts: Row[int], lanes: Row[int]) -> list[tuple[int, int, int, int]]:
    """What one program of the attention kernel works on, for all chunks: first flat token, tokens, position, lane."""
    pieces = [
        (first + begin, min(CHUNK_ROWS, take - begin), start + begin, lane)
        for first, take, start, lane in zip(firsts, takes, starts, lanes, strict=True)
        for begin in range(0, take, CHUNK_ROWS)
    ]
    # Those with the longest context first: the device is then never left with one of them at the end.
    pieces.sort(key=lambda piece: -piece[2])
    return pieces


def _is_truncated(seq: Sequence) -> bool:
    sampling = seq.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0)


def _input(seq: Sequence) -> int:
    """The one token it takes; -1 where it is still being sampled."""
    if seq.pending > 1:
        return int(seq.buffer[seq.length])
    return -1 if seq.in_flight else seq.last_token


def _seeds(asked: Row[Sequence]) -> npt.NDArray[np.uint64]:
    """One for each token of each request: a function of the request's seed and the token's place."""
    seeds = np.array([seq.seed for seq in asked], dtype=np.uint64)
    places = np.array([seq.total - seq.prompt_tokens for seq in asked], dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = seeds + (places + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)

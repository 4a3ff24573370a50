"""The paged cache: who shares which page, who copies, what comes back; and the order of a step that overlaps."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.backend import Launched
from rollart.engines.embedded.engine import EmbeddedEngine, kv_tokens_of
from rollart.engines.embedded.kv import KvShape
from rollart.engines.embedded.paged.forward import paged_forward
from rollart.engines.embedded.paged.ops import Where
from rollart.engines.embedded.paged.pages import PagedMemory
from rollart.engines.embedded.paged.shapes import StepShape, StepShapes, batch_sizes, mixed_sizes, splits_for
from rollart.engines.embedded.sequence import Sequence
from rollart.errors import WeightError
from rollart.model.network import named_weights
from rollart.types import Completion, Finish, Tokens
from tests.engines.reference import (
    EOS,
    KINDS,
    NO_EOS,
    check,
    drain,
    make_engine,
    our_model,
    plain_model,
    random_tokens,
    request,
)

PAGE = 4


def memory(pages: int = 16, lanes: int = 4) -> PagedMemory:
    shape = KvShape(layers=1, heads=1, head_size=2, dtype=torch.float32, device=torch.device("cpu"))
    return PagedMemory(shape, kv_tokens=pages * PAGE, max_context=pages * PAGE, page_tokens=PAGE, lanes=lanes)


def sequence(tokens: Tokens | list[int], name: str, arrival: int = 0) -> Sequence:
    asked = request(tokens, f"{name}/0", max_tokens=8)
    return Sequence(asked, arrival=arrival, max_context=64, version=0, seed=0)


def computed(kv: PagedMemory, seq: Sequence) -> Sequence:
    """As if its prompt had been computed."""
    assert kv.place(seq, seq.total, 0)
    assert kv.borrow(seq)
    seq.length = seq.total - 1
    return seq


LONG = list(range(10, 10 + 4 * PAGE))
"""Sixteen tokens: long enough to be known by its beginning."""


def test_those_who_begin_alike_share_whole_pages() -> None:
    kv = memory()
    first = computed(kv, sequence(LONG, "first"))
    before = kv.used_tokens
    second = sequence([*LONG[:-1], 99, 98], "second", 1)
    second.buffer[: len(LONG)] = LONG
    assert kv.place(second, second.total, 0)
    assert kv.borrow(second)
    assert second.length == 15
    assert second.pages[:3] == first.pages[:3], "whole pages by reference"
    assert second.pages[3] != first.pages[3], "the page on which they part is a copy"
    assert kv.used_tokens == before + 2 * PAGE


def test_a_page_that_is_shared_is_copied_before_it_is_written() -> None:
    kv = memory()
    first = computed(kv, sequence(LONG, "first"))
    other = sequence([*LONG, 50], "other", 1)
    assert kv.place(other, other.total, 0)
    assert kv.borrow(other)
    shared = first.pages[2]
    kv.park(first)
    # Its history is rewritten in the middle of the shared third page.
    again = sequence([*LONG[:10], 70, 71], "first", 2)
    assert kv.place(again, again.total, 0)
    assert again.length == 10
    assert other.pages[2] == shared
    assert again.pages[2] != shared


def test_every_page_comes_back() -> None:
    kv = memory()
    for seq in [computed(kv, sequence([*LONG, number], f"s{number}", number)) for number in range(3)]:
        kv.park(seq)
    assert kv.num_parked == 3
    kv.drop_parked()
    assert kv.used_tokens == 0


def test_pages_behind_a_rewritten_history_come_back() -> None:
    kv = memory()
    kv.park(computed(kv, sequence(LONG, "s")))
    shorter = sequence([*LONG[:3], 90], "s", 1)
    assert kv.place(shorter, shorter.total, 0)
    assert kv.used_tokens == PAGE
    kv.release(shorter)
    assert kv.used_tokens == 0


def test_idle_sessions_that_share_pages_give_way_together() -> None:
    kv = memory(pages=8)
    for number in range(2):
        kv.park(computed(kv, sequence([*LONG, number], f"s{number}", number)))
    large = sequence(list(range(100, 100 + 8 * PAGE - 9)), "large", 2)
    assert kv.place(large, 8 * PAGE, 0), "all eight pages are free or idle"
    assert kv.num_parked == 0


def test_who_cannot_be_placed_keeps_what_its_session_has() -> None:
    kv = memory(pages=8)
    kv.park(computed(kv, sequence(LONG, "idle")))
    running = computed(kv, sequence(list(range(60, 60 + 3 * PAGE)), "running", 1))
    next_turn = sequence([*LONG, *range(200, 200 + 3 * PAGE)], "idle", 2)
    assert not kv.place(next_turn, next_turn.total, 0)
    kv.release(running)
    assert kv.place(next_turn, next_turn.total, 0)
    assert next_turn.cached == 15


def test_who_needs_every_page_does_not_wait_for_one_more_to_copy_to() -> None:
    kv = memory(pages=10)
    for number in range(2):
        kv.park(computed(kv, sequence([*LONG, 90], f"s{number}", number)))
    assert kv.used_tokens == 4 * PAGE, "both have the same pages"
    rewritten = sequence([*LONG[: PAGE + 1], *range(200, 200 + 9 * PAGE - 2)], "s0", 2)
    assert kv.place(rewritten, 10 * PAGE, 0), "nobody is in flight, and it fits"
    assert rewritten.cached == PAGE, "the page on which it goes its own way is computed anew"
    kv.release(rewritten)
    assert kv.used_tokens == 0


def test_the_device_is_told_the_newest_page_of_each_place() -> None:
    kv = memory()
    seq = computed(kv, sequence(LONG, "s"))
    width = kv.tables_LN.shape[1]
    where, pages = kv.take_changes()
    assert dict(zip(where.tolist(), pages.tolist(), strict=True)) == {
        seq.lane * width + index: page for index, page in enumerate(seq.pages)
    }
    assert len(kv.take_changes()[0]) == 0


def test_a_request_that_ended_is_cut_where_it_ended() -> None:
    """The step after its last token is under way by then: what that one samples is dropped."""
    plain, rng = plain_model("qwen3"), np.random.default_rng(3)
    engine = make_engine(plain, paged=True)
    asked = [request(random_tokens(rng, 12), f"s{i}/0", max_tokens=200, temperature=1.0, seed=i) for i in range(6)]
    for call in asked:
        engine.add(call)
    done = drain(engine)
    assert any(got.finish is Finish.STOP for got in done.values())
    for call in asked:
        got = done[call.id]
        assert list(got.tokens).count(EOS) == (got.finish is Finish.STOP)
        check(call, got, {0: plain})
    assert engine.stats.sampled_tokens == sum(len(got.tokens) for got in done.values())


def test_a_step_is_given_the_time_that_it_took_and_not_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a step are taken when the next one is launched already: where that one has a prompt in it, whose
    kernels the host starts one by one, the host waited that long for both."""
    monkeypatch.setattr("rollart.types.REPORT_STEPS", 0.0)
    now = [0.0]
    for module in ("paged.runner", "engine"):
        monkeypatch.setattr(f"rollart.engines.embedded.{module}.time.perf_counter", lambda: now[0])

    def slow_forward(model: PreTrainedModel, positions: int) -> Any:
        plainly: Any = paged_forward(model, positions)

        def forward(tokens_T: torch.Tensor, *more: Any) -> torch.Tensor:
            now[0] += 20.0 if len(tokens_T) > 8 else 1.0
            hidden_TH: torch.Tensor = plainly(tokens_T, *more)
            return hidden_TH

        forward.weights = plainly.weights  # type: ignore[attr-defined]
        return forward

    monkeypatch.setattr("rollart.engines.embedded.paged.runner.paged_forward", slow_forward)
    engine, rng = make_engine(plain_model("qwen3"), paged=True), np.random.default_rng(3)
    compute = engine.backend.launch

    def launch(running: list[Sequence], *, rested: bool = False) -> Launched:
        launched = compute(running, rested=rested)
        now[0] += 100.0  # of the host, before the next thing is asked of it
        return launched

    engine.backend.launch = launch  # type: ignore[assignment, method-assign]
    ended: list[Completion] = []
    for number in range(4):
        engine.add(request(random_tokens(rng, 20), f"s{number}/0", max_tokens=30, temperature=1.0, seed=number))
        ended += [got for _ in range(5) for _, got in engine.step()]
    ended += drain(engine).values()
    work = max((got.work for got in ended if got.work is not None), key=lambda work: sum(one.steps for one in work))
    assert work.prefill.seconds == 20.0 * work.prefill.steps, "the first one's time begins when it is launched"
    assert work.mixed.steps == 3
    assert work.mixed.seconds == 120.0 * work.mixed.steps
    assert work.decode.seconds == 101.0 * work.decode.steps


def test_what_kernels_are_given_is_aligned_whatever_the_step_has_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To 16 bytes, or Triton would compile them anew when the first prompt of such a length comes."""
    offsets: list[Any] = []

    def looked_at(model: PreTrainedModel, positions: int) -> Any:
        plainly: Any = paged_forward(model, positions)

        def forward(tokens_T: torch.Tensor, where: Where, layers: Any) -> torch.Tensor:
            for one in (where.lanes_T, where.positions_T, where.blocks_N4):
                offsets.extend([one.storage_offset()] if len(one) else [])
            hidden_TH: torch.Tensor = plainly(tokens_T, where, layers)
            return hidden_TH

        forward.weights = plainly.weights  # type: ignore[attr-defined]
        return forward

    monkeypatch.setattr("rollart.engines.embedded.paged.runner.paged_forward", looked_at)
    engine, rng = make_engine(plain_model("qwen3"), paged=True), np.random.default_rng(3)
    for number in range(7):
        engine.add(request(random_tokens(rng, 20 + number), f"s{number}/0", max_tokens=10))
        engine.step()
    drain(engine)
    assert len(offsets) > 30
    assert not any(offset % 4 for offset in offsets)


def test_slabs_and_pages_draw_the_same() -> None:
    plain, rng = plain_model("qwen3-tied"), np.random.default_rng(5)
    prompts = [random_tokens(rng, 30) for _ in range(4)]
    answers = []
    for paged in (False, True):
        engine = make_engine(plain, paged=paged, draft_tokens=0)
        for number, prompt in enumerate(prompts):
            engine.add(request(prompt, f"s{number}/0", max_tokens=20, temperature=0.9, top_k=number, seed=7))
        answers.append({name: got.tokens.tolist() for name, got in drain(engine).items()})
    assert answers[0] == answers[1]


def test_batches_are_padded_by_a_quarter_at_most() -> None:
    sizes = batch_sizes(256)
    assert sizes[-1] == 256
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(sizes))
    assert all(larger <= 1.25 * smaller for smaller, larger in itertools.pairwise(sizes) if smaller >= 32)
    assert batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(1) == [1]


def shapes(max_batch: int = 128, step_tokens: int = 8192, max_context: int = 2048, weights: int = 10**8) -> StepShapes:
    return StepShapes(
        max_batch=max_batch, step_tokens=step_tokens, max_context=max_context, kv_heads=3, weights=weights
    )


def test_a_shape_has_room_for_every_step_it_is_chosen_for_and_is_captured() -> None:
    rng, chosen = np.random.default_rng(0), 0
    ours = shapes(max_batch=96, max_context=8192)
    captured = set(ours.all())
    for _ in range(2000):
        takes = rng.integers(2, 2 + int(2 ** rng.integers(1, 11)), rng.integers(0, 40)).tolist()
        singles = int(rng.integers(0 if takes else 1, 96 - len(takes) + 1))
        longest = int(rng.choice([1, 2000, 2049, 8000]))
        shape = ours.of(singles=singles, longest=longest, chunks=len(takes), chunk_tokens=sum(takes))
        if shape is None:
            assert sum(takes) > 4096 or sum(takes) / len(takes) < 100, "long steps have none"
            continue
        chosen += 1
        assert shape in captured
        assert shape.singles >= singles
        assert shape.chunk_tokens >= sum(takes)
        assert shape.blocks >= sum(-(-take // 128) for take in takes)
        assert shape.sampled >= singles + len(takes)
        assert shape.splits >= (4 if longest > 2048 else 1)
    assert chosen > 500


def test_one_long_prompt_and_many_short_ones_are_more_pieces_than_prompts() -> None:
    shape = shapes(max_batch=96).of(singles=0, longest=1, chunks=96, chunk_tokens=95 * 2 + 3900)
    assert shape is not None
    assert shape.blocks >= 95 + -(-3900 // 128)


def test_a_step_with_prompts_has_no_shape_where_tokens_are_drawn_by_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """These rows are drawn once more from the step's logits, which graphs of steps with prompts do not keep."""
    computed: list[int] = []

    def looked_at(model: PreTrainedModel, positions: int) -> Any:
        plainly: Any = paged_forward(model, positions)

        def forward(tokens_T: torch.Tensor, where: Where, layers: Any) -> torch.Tensor:
            computed.append(len(tokens_T))
            hidden_TH: torch.Tensor = plainly(tokens_T, where, layers)
            return hidden_TH

        forward.weights = plainly.weights  # type: ignore[attr-defined]
        return forward

    monkeypatch.setattr("rollart.engines.embedded.paged.runner.paged_forward", looked_at)
    for sampling in ({"top_p": 0.9}, {"top_k": 3}, {}):
        engine = make_engine(plain_model("qwen3"), paged=True)
        computed.clear()
        engine.add(
            request(random_tokens(np.random.default_rng(3), 20), "s/0", max_tokens=4, temperature=1.0, **sampling)
        )
        drain(engine)
        assert (computed[0] == 20) == bool(sampling)


def test_a_step_that_keeps_the_device_busy_has_no_shape() -> None:
    def largest(weights: int) -> int:
        return max(tokens for tokens in range(1, 5000) if chunk(weights, tokens) is not None)

    def chunk(weights: int, tokens: int) -> StepShape | None:
        return shapes(weights=weights).of(singles=0, longest=1, chunks=1, chunk_tokens=tokens)

    assert largest(10**8) == 4096
    assert largest(4 * 10**9) == 384
    assert largest(70 * 10**9) == 64
    assert shapes(step_tokens=100).of(singles=0, longest=1, chunks=1, chunk_tokens=65) is None


def test_short_contexts_need_no_graphs_for_long_ones() -> None:
    assert len(shapes(max_context=4096).all()) > len(shapes(max_context=2048).all())
    assert mixed_sizes(96) == [16, 32, 64, 96]
    assert mixed_sizes(4) == [4]


def test_graphs_find_what_they_are_given_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of one shape, with other prompts, other rows and other changes of the tables."""
    places: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def looked_at(model: PreTrainedModel, positions: int) -> Any:
        plainly: Any = paged_forward(model, positions)

        def forward(tokens_T: torch.Tensor, where: Where, layers: Any) -> torch.Tensor:
            own = (where.lanes_T, where.positions_T, where.blocks_N4)
            sizes = (len(tokens_T), where.decoding, where.splits, len(where.blocks_N4))
            places.setdefault(sizes, set()).add(tuple(one.data_ptr() for one in own))
            hidden_TH: torch.Tensor = plainly(tokens_T, where, layers)
            return hidden_TH

        forward.weights = plainly.weights  # type: ignore[attr-defined]
        return forward

    monkeypatch.setattr("rollart.engines.embedded.paged.runner.paged_forward", looked_at)
    engine, rng = make_engine(plain_model("qwen3"), paged=True, eos=NO_EOS), np.random.default_rng(3)
    for number in range(12):
        engine.add(request(random_tokens(rng, 5 + 7 * (number % 5)), f"s{number}/0", max_tokens=9))
        for _ in range(number % 3):
            engine.step()
    drain(engine)
    assert all(len(seen) == 1 for seen in places.values())
    assert {sizes[3] > 0 for sizes in places} == {True, False}, "with and without prompts"
    assert len(places) < 10, "steps share shapes"


def test_a_prompt_taken_token_by_token_disturbs_nobody_and_samples_nothing() -> None:
    """Beside others who decode: each of its tokens is a single one, but what comes after it is known."""
    plain, rng = plain_model("qwen3"), np.random.default_rng(7)
    engine = make_engine(plain, paged=True, eos=NO_EOS)
    slow, quick = (
        request(random_tokens(rng, 12), "a/0", max_tokens=4),
        request(random_tokens(rng, 5), "b/0", max_tokens=9),
    )
    engine.add(slow)
    engine.add(quick)
    plan = engine.scheduler.schedule

    def schedule() -> int:
        tokens = plan()
        for seq in engine.scheduler.running:
            if seq.session == "a" and seq.take > 1:
                tokens -= seq.take - 1
                seq.take = 1
        return tokens

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    done = drain(engine)
    check(slow, done["a/0"], {0: plain})
    check(quick, done["b/0"], {0: plain})


def test_few_long_contexts_are_read_in_parts() -> None:
    assert splits_for(256, 8, 1024) == 1
    assert splits_for(16, 8, 32_768) >= 4
    assert splits_for(1, 8, 100) > 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "cuda", "draft_tokens": 4}, "guesses run on a CPU only"),
        ({"memory": 0.5}, "on a CPU set kv_tokens"),
        ({"device": "cuda", "memory": 0.5, "kv_tokens": 4096}, "remove one of them"),
    ],
)
def test_what_a_device_cannot_use_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineSettings.model_validate(given)


def test_a_gpu_computes_in_bfloat16_by_default() -> None:
    assert EngineSettings(device="cuda:1").dtype == "bfloat16"
    assert EngineSettings(device="cuda", dtype="float32").dtype == "float32"
    assert EngineSettings().dtype == "float32"


# --- versions that wait on the device: the paths that a CPU has too


def staging_engine(kind: str = "qwen3") -> EmbeddedEngine:
    settings = EngineSettings(device="cuda", stage="device", kv_tokens=4096, max_batch=64, step_tokens=64)
    return EmbeddedEngine(our_model(plain_model(kind)), settings, eos=NO_EOS, paged=True)


def served(engine: EmbeddedEngine) -> dict[str, torch.Tensor]:
    return named_weights(engine.model)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_staged_is_a_copy_beside_the_store(kind: str) -> None:
    engine, second = staging_engine(kind), plain_model(kind, seed=1)
    given = {name: weight.double() for name, weight in named_weights(second).items()}
    ready = engine.prepare(given)
    for weight in given.values():
        weight.zero_()  # the store's memory is used again
    assert all(torch.equal(served(engine)[name], held) for name, held in named_weights(plain_model(kind)).items())
    engine.put_in(1, ready)
    ready.let_go()
    assert all(torch.equal(served(engine)[name], held) for name, held in named_weights(second).items())
    asked = request([10, 11, 12], max_tokens=20)
    engine.add(asked)
    check(asked, drain(engine)[asked.id], {1: second})


def test_what_is_not_of_the_model_is_refused_when_it_is_staged() -> None:
    engine = staging_engine()
    with pytest.raises(WeightError, match="tensors are missing"):
        engine.prepare({})


def test_a_device_without_room_gets_the_copy_at_the_swap(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, second = staging_engine(), plain_model("qwen3", seed=1)

    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("no more of it")

    given = named_weights(second)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", full)
        ready = engine.prepare(given)
    assert "no room to stage weights" in caplog.text
    engine.put_in(1, ready)
    assert all(torch.equal(served(engine)[name], held) for name, held in given.items())


def test_the_cache_leaves_room_for_what_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_model("qwen3")
    shape = KvShape(layers=2, heads=1, head_size=16, dtype=torch.bfloat16, device=torch.device("cuda:0"))
    for name, value in (("mem_get_info", (60 << 30, 80 << 30)), ("memory_reserved", 0), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    settings = {
        stage: EngineSettings.model_validate({"device": "cuda", "stage": stage}) for stage in ("host", "device")
    }
    tokens = {stage: kv_tokens_of(model, shape, one) for stage, one in settings.items()}
    kept = 2 * 2 * 1 * 16 * 2
    weights = sum(weight.nbytes for weight in named_weights(model).values())
    assert tokens["host"] - tokens["device"] == pytest.approx(weights / kept, abs=1)


def lender(seq: Sequence) -> tuple[PagedMemory, list[int]]:
    """A cache that lends the prompt of a sequence, filled with noise."""
    shape = KvShape(layers=2, heads=1, head_size=2, dtype=torch.float32, device=torch.device("cpu"))
    kv = PagedMemory(shape, kv_tokens=16 * PAGE, max_context=16 * PAGE, page_tokens=PAGE, lanes=4, lends=True)
    assert kv.lending is not None
    kv.lending.raw.view(torch.float32).copy_(torch.randn(kv.lending.raw.numel() // 4))
    own = sequence(seq.buffer[: seq.prompt_tokens].tolist(), seq.session)
    assert kv.place(own, own.total, 0)
    own.length = own.total
    kv.park(own)
    return kv, kv.lend(seq.session, seq.buffer[: seq.prompt_tokens - 1])


def taker(pages: int = 16) -> PagedMemory:
    shape = KvShape(layers=2, heads=1, head_size=2, dtype=torch.float32, device=torch.device("cpu"))
    return PagedMemory(shape, kv_tokens=pages * PAGE, max_context=pages * PAGE, page_tokens=PAGE, lanes=4)


def opened(kv: PagedMemory, other: PagedMemory) -> Tensor:
    assert other.lending is not None
    return kv.opened(other.lending.place)


def test_a_prompt_is_taken_over_from_another_cache_page_by_page() -> None:
    seq = sequence(LONG, "s")
    theirs, lent = lender(seq)
    kv = taker()
    kv.place(sequence([1, 2, 3], "before"), 3, 0)  # so that pages have other numbers
    assert kv.take_over(seq, opened(kv, theirs), lent) == 4
    assert seq.given
    assert kv.place(seq, seq.total, 0)
    assert (seq.length, seq.cached) == (15, 15), "the last token is computed here"
    for layer, other in zip(kv.layers, theirs.layers, strict=True):
        for mine, page in zip(seq.pages, lent, strict=True):
            assert torch.equal(layer.keys_PHSD[mine], other.keys_PHSD[page])
            assert torch.equal(layer.values_PHSD[mine], other.values_PHSD[page])


def test_what_is_lent_stays_until_it_is_given_back() -> None:
    seq = sequence(LONG, "s")
    kv, lent = lender(seq)
    kv.drop_parked()
    large = sequence(list(range(100, 100 + 13 * PAGE)), "large")
    assert kv.used_tokens == 4 * PAGE
    assert not kv.place(large, 13 * PAGE, 0), "its pages are nobody else's"
    kv.take_back(lent)
    assert kv.used_tokens == 0
    assert kv.place(large, 13 * PAGE, 0)


def test_what_is_not_there_any_more_is_not_lent() -> None:
    seq = sequence(LONG, "s")
    kv, lent = lender(seq)
    assert kv.lend("s", seq.buffer[: seq.prompt_tokens]) == lent, "all of it is there"
    kv.forget("s")
    assert kv.lend("s", seq.buffer[:3]) == []
    assert kv.lend("other", seq.buffer[:3]) == []


def test_where_there_is_no_room_a_prompt_is_left_to_be_computed() -> None:
    seq = sequence(LONG, "s")
    theirs, lent = lender(seq)
    kv = taker(pages=6)
    computed(kv, sequence(list(range(60, 60 + 3 * PAGE)), "running"))
    assert kv.take_over(seq, opened(kv, theirs), lent) == 0
    assert not seq.given
    assert kv.used_tokens == 3 * PAGE


def test_pages_that_a_prompt_has_already_are_no_room_for_the_rest_of_it() -> None:
    kv = taker(pages=6)
    computed(kv, sequence([90, 91], "running"))
    kv.park(computed(kv, sequence([*LONG[: 2 * PAGE], 90], "s", 1)))
    seq = sequence([*LONG, *range(60, 60 + 2 * PAGE)], "s", 2)
    theirs, lent = lender(seq)
    assert kv.take_over(seq, opened(kv, theirs), lent) == 0, "four are missing, and three are free"
    assert not seq.given
    assert kv.num_parked == 1
    assert kv.used_tokens == 3 * PAGE


def test_idle_sessions_give_way_to_a_prompt_but_not_its_own_pages() -> None:
    kv = taker(pages=6)
    kv.park(computed(kv, sequence([*LONG[: 2 * PAGE], 90], "s")))
    kv.park(computed(kv, sequence(list(range(60, 60 + 3 * PAGE)), "idle", 1)))
    seq = sequence(LONG, "s", 2)
    theirs, lent = lender(seq)
    assert kv.take_over(seq, opened(kv, theirs), lent) == 2, "two pages are here"
    assert kv.num_parked == 1
    assert kv.place(seq, seq.total, 0)
    assert seq.cached == 15
    kv.release(seq)
    assert kv.used_tokens == 0

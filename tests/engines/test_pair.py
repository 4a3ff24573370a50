"""Prefill and decode apart: answers are one engine's, what is handed over is computed once, and what cannot be is
computed by the decode side."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import numpy as np
import pytest
import torch

from rollart.engines.embedded.handover import cache_of
from rollart.engines.embedded.pair import PairedEngine
from rollart.errors import EngineError, WeightError
from rollart.model.network import named_weights
from rollart.types import Completion, Finish, GenerateRequest, WeightManifest
from tests.engines.pairs import SideHere, pair_of
from tests.engines.reference import NO_EOS, check, drain, make_engine, plain_model, random_tokens, request

MODELS = {version: plain_model("qwen3", seed=version) for version in range(4)}
PAGE = 16
"""Of a CPU."""
Work = Callable[[PairedEngine, SideHere], Awaitable[None]]


def fetch(manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
    if manifest.version not in MODELS:
        raise WeightError(f"bucket 0 of version {manifest.version} is damaged")
    return named_weights(MODELS[manifest.version])


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, buckets=())


def play(work: Work, *, max_batch: int = 8, kv_tokens: int = 4096, on: str = "cpu") -> None:
    async def main() -> None:
        pair, side = pair_of(MODELS[0], fetch=fetch, on=on, max_batch=max_batch, kv_tokens=kv_tokens)
        try:
            async with asyncio.timeout(60.0):
                await work(pair, side)
            if not side.gone:
                await nothing_is_held(side)
        finally:
            await pair.close()

    asyncio.run(main())


async def nothing_is_held(side: SideHere) -> None:
    """All that was lent is given back."""
    memory = cache_of(side.side.engine)
    for _ in range(500):
        if side.answered.count("give_back") == side.lent:
            break
        await asyncio.sleep(0.01)

    def left() -> int:
        memory.drop_parked()
        return memory.used_tokens

    assert await side.side.engine.call(left) == 0


async def until(true: Callable[[], bool]) -> None:
    for _ in range(5000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def alone(asked: list[GenerateRequest]) -> dict[str, Completion]:
    engine = make_engine(MODELS[0], paged=True, eos=NO_EOS)
    for one in asked:
        engine.add(one)
    return drain(engine)


def test_answers_are_those_of_one_engine_and_only_the_prefill_side_computes_prompts() -> None:
    rng = np.random.default_rng(0)
    asked = [
        request(random_tokens(rng, 5 + 17 * number), f"s{number}/0", max_tokens=12, temperature=number % 2, seed=3)
        for number in range(6)
    ]
    expected = alone(asked)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        done = await asyncio.gather(*(pair.generate(one) for one in asked))
        for one, got in zip(asked, done, strict=True):
            assert got.tokens.tolist() == expected[one.id].tokens.tolist()
            check(one, got, MODELS)
            assert (got.prefill_tokens, got.cached_tokens) == (one.prompt_tokens, 0)
            assert got.prefill_busy_s > 0
        assert pair.handed.prompts == len(asked)
        assert pair.handed.dropped == 0
        assert pair.engine.core.stats.computed_tokens < 14 * len(asked), "its own tokens, and one too many of each"

    play(work)


def test_a_session_sends_only_what_the_other_side_has_not() -> None:
    rng = np.random.default_rng(1)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        prompt, cached = random_tokens(rng, 5 * PAGE), 0
        for turn in range(4):
            before = pair.handed.copied_bytes
            asked = request(prompt, f"s/{turn}", max_tokens=10, temperature=1.0, seed=turn, last=turn == 3)
            got = await pair.generate(asked)
            check(asked, got, MODELS)
            pages = (pair.handed.copied_bytes - before) / cache_of(pair.engine).page_bytes
            assert pages == 5 if turn == 0 else pages <= 3, "whole pages are here already"
            assert got.cached_tokens == cached, "the prefill side has the prompt before, and not the answer"
            assert got.prefill_tokens == len(prompt) - cached
            cached = len(prompt)
            prompt = np.concatenate([prompt, got.tokens, random_tokens(rng, 20)])

    play(work)


def test_a_group_has_the_pages_of_its_prompt_once() -> None:
    prompt = random_tokens(np.random.default_rng(2), 6 * PAGE)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        asked = [request(prompt, f"m{number}/0", max_tokens=8, temperature=1.0, seed=number) for number in range(4)]
        for one, got in zip(asked, await asyncio.gather(*(pair.generate(one) for one in asked)), strict=True):
            check(one, got, MODELS)
        pages = pair.handed.copied_bytes / cache_of(pair.engine).page_bytes
        assert pages == 6 + 3, "the last page of each is its own"

    play(work)


def test_a_history_that_is_rewritten_is_handed_over_from_where_it_differs() -> None:
    rng = np.random.default_rng(3)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        prompt = random_tokens(rng, 4 * PAGE + 3)
        for turn, cut in enumerate((len(prompt), 2 * PAGE + 5, 3, len(prompt))):
            prompt = np.concatenate([prompt[:cut], random_tokens(rng, 2 * PAGE)])
            asked = request(prompt, f"s/{turn}", max_tokens=6)
            check(asked, await pair.generate(asked), MODELS)

    play(work)


def test_a_prompt_that_was_computed_before_a_swap_is_not_used_after_it() -> None:
    asked = request(random_tokens(np.random.default_rng(4), 40), "s/0", max_tokens=6)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        side.holds.append("compute")
        call = asyncio.ensure_future(pair.generate(asked))
        await until(lambda: "compute" in side.held)
        await pair.swap(manifest(1))
        side.let_go()
        got = await call
        assert [span.version for span in got.spans] == [1]
        check(asked, got, MODELS)
        assert (pair.handed.prompts, pair.handed.dropped) == (0, 1)
        assert got.prefill_tokens == 2 * asked.prompt_tokens, "in vain, and again"
        again = request(asked.tokens(), "t/0", max_tokens=6)
        check(again, await pair.generate(again), MODELS)
        assert pair.handed.prompts == 1, "both sides serve the new version"

    play(work)


def test_work_in_flight_goes_on_over_a_swap_under_the_new_weights() -> None:
    rng = np.random.default_rng(5)
    asked = [request(random_tokens(rng, 30), f"s{number}/0", max_tokens=200) for number in range(4)]

    async def work(pair: PairedEngine, side: SideHere) -> None:
        calls = [asyncio.ensure_future(pair.generate(one)) for one in asked]
        await until(lambda: pair.engine.core.stats.sampled_tokens > 20)
        report = await pair.swap(manifest(1))
        assert report.rebuilt_tokens > 0
        done = await asyncio.gather(*calls)
        assert any(len(got.spans) == 2 for got in done)
        for one, got in zip(asked, done, strict=True):
            check(one, got, MODELS)

    play(work)


def test_weights_that_are_not_whole_change_neither_side() -> None:
    asked = request([10, 11, 12], "s/0", max_tokens=4)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        with pytest.raises(WeightError, match="damaged"):
            await pair.swap(manifest(9))
        assert "swap" not in side.calls
        check(asked, await pair.generate(asked), MODELS)
        assert pair.handed.prompts == 1

    play(work)


def test_where_only_one_side_takes_a_version_the_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pair: PairedEngine, side: SideHere) -> None:
        def refuse(*_: object) -> None:
            raise WeightError("no such tensor")

        monkeypatch.setattr(side.side.engine.core, "put_in", refuse)
        with pytest.raises(EngineError, match=r"only one side of the pair took version 1: .*no such tensor"):
            await pair.swap(manifest(1))
        with pytest.raises(EngineError, match="only one side"):
            await pair.generate(request([10, 11], "s/0"))

    play(work)


def test_where_neither_side_takes_a_version_both_go_on_with_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request([10, 11, 12], "s/0", max_tokens=4)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        def refuse(*_: object) -> None:
            raise WeightError("no such tensor")

        for core in (side.side.engine.core, pair.engine.core):
            monkeypatch.setattr(core, "put_in", refuse)
        with pytest.raises(WeightError, match="no such tensor"):
            await pair.swap(manifest(1))
        check(asked, await pair.generate(asked), MODELS)

    play(work)


def test_an_abort_ends_a_prompt_that_is_prefilled_and_one_that_waits_to_decode() -> None:
    rng = np.random.default_rng(6)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        side.holds.append("compute")
        first = asyncio.ensure_future(pair.generate(request(random_tokens(rng, 40), "first/0", max_tokens=5)))
        await until(lambda: "compute" in side.held)
        await pair.abort("first/0")
        side.let_go()
        assert (await first).finish is Finish.ABORT
        holding = [
            asyncio.ensure_future(pair.generate(request(random_tokens(rng, 9), f"h{number}/0", max_tokens=900)))
            for number in range(2)
        ]
        await until(lambda: pair.handed.prompts == 2)
        waits = asyncio.ensure_future(pair.generate(request(random_tokens(rng, 40), "waits/0", max_tokens=5)))
        gone = asyncio.ensure_future(pair.generate(request(random_tokens(rng, 40), "gone/0", max_tokens=5)))
        await until(lambda: side.answered.count("compute") == 5)
        await pair.abort("waits/0")
        assert (await waits).finish is Finish.ABORT
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        for number, one in enumerate(holding):
            await pair.abort(f"h{number}/0")
            assert (await one).finish is Finish.ABORT
        after = request(random_tokens(rng, 12), "after/0", max_tokens=4)
        check(after, await pair.generate(after), MODELS)

    play(work, max_batch=2)


def test_a_call_that_is_aborted_and_cancelled_while_it_waits_gives_no_place_that_it_had_not() -> None:
    rng = np.random.default_rng(11)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        calls = [asyncio.ensure_future(pair.generate(request(random_tokens(rng, 9), "holds/0", max_tokens=900)))]
        await until(lambda: pair.handed.prompts == 1)
        gone = asyncio.ensure_future(pair.generate(request(random_tokens(rng, 9), "gone/0", max_tokens=5)))
        await until(lambda: side.answered.count("compute") == 2)
        for _ in range(3):
            await asyncio.sleep(0)
        aborted = asyncio.ensure_future(pair.abort("gone/0"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, aborted, return_exceptions=True)
        calls.append(asyncio.ensure_future(pair.generate(request(random_tokens(rng, 9), "next/0", max_tokens=5))))
        await until(lambda: side.answered.count("compute") == 3)
        await asyncio.sleep(0.05)
        assert pair.handed.prompts == 1, "the only place is taken"
        await pair.abort("holds/0")
        await asyncio.gather(*calls)

    play(work, max_batch=1)


def test_a_call_that_is_cancelled_is_not_computed_further_on_either_side() -> None:
    asked = request(random_tokens(np.random.default_rng(7), 40), "s/0", max_tokens=900)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        side.holds.append("compute")
        call = asyncio.ensure_future(pair.generate(asked))
        await until(lambda: "compute" in side.held)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        side.let_go()
        again = asyncio.ensure_future(pair.generate(asked))  # at once, under the same name
        await until(lambda: pair.engine.core.stats.sampled_tokens > 3)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        await until(lambda: not pair.engine.core.busy and not side.side.engine.core.busy)
        assert "abort" in side.calls

    play(work)


@pytest.mark.parametrize("kv_tokens", [160, 288])
def test_with_little_room_on_both_sides_every_request_is_answered_rightly(kv_tokens: int) -> None:
    rng = np.random.default_rng(8)
    asked = [request(random_tokens(rng, 60), f"s{number}/0", max_tokens=60) for number in range(8)]

    async def work(pair: PairedEngine, side: SideHere) -> None:
        for one, got in zip(asked, await asyncio.gather(*(pair.generate(one) for one in asked)), strict=True):
            check(one, got, MODELS)

    play(work, kv_tokens=kv_tokens)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_in_between_every_request_ends_once_and_nothing_stays_lent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = {session: random_tokens(rng, int(rng.integers(2, 70))) for session in range(6)}
    turns = dict.fromkeys(prompts, 0)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        async def one(session: int) -> None:
            while turns[session] < 6:
                turn = turns[session]
                turns[session] += 1
                limit = int(rng.integers(1, 40))
                asked = request(prompts[session], f"s{session}/{turn}", max_tokens=limit, last=turn == 5)
                call = asyncio.ensure_future(pair.generate(asked))
                what, after_s = rng.integers(0, 6), float(rng.random()) * 0.02
                if what < 2:
                    await asyncio.sleep(after_s)
                    if what == 0:
                        call.cancel()
                    await pair.abort(asked.id)
                (got,) = await asyncio.gather(call, return_exceptions=True)
                if isinstance(got, asyncio.CancelledError):
                    continue
                assert isinstance(got, Completion), got
                if len(got.tokens):
                    check(asked, got, MODELS)
                more = random_tokens(rng, int(rng.integers(1, 30)))
                prompts[session] = np.concatenate([prompts[session], got.tokens, more])[: 200 + 2 * turn]

        async def swaps() -> None:
            for version in (1, 2, 3):
                await asyncio.sleep(0.05)
                await pair.swap(manifest(version))

        await asyncio.gather(swaps(), *(one(session) for session in prompts))
        await until(lambda: not pair.engine.core.live and not side.side.engine.core.live)

    play(work, max_batch=3, kv_tokens=288)


def test_a_prefill_side_whose_pages_are_all_lent_waits_and_does_not_spin() -> None:
    rng = np.random.default_rng(10)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        asked = [request(random_tokens(rng, 100), f"s{number}/0", max_tokens=20) for number in range(4)]
        holds = request([10, 11], "holds/0", max_tokens=150)
        calls = [asyncio.ensure_future(pair.generate(holds))]
        await until(lambda: pair.handed.prompts == 1)
        calls += [asyncio.ensure_future(pair.generate(one)) for one in asked]
        await until(lambda: side.side.engine.core.stalled)
        for one, got in zip([holds, *asked], await asyncio.gather(*calls), strict=True):
            check(one, got, MODELS)

    play(work, max_batch=1, kv_tokens=288)


def test_an_abort_ends_a_prompt_for_which_the_prefill_side_has_no_room() -> None:
    rng = np.random.default_rng(12)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        holds = asyncio.ensure_future(pair.generate(request([10, 11], "holds/0", max_tokens=280)))
        await until(lambda: pair.handed.prompts == 1)
        asked = [request(random_tokens(rng, 100), f"s{number}/0", max_tokens=2) for number in range(3)]
        calls = [asyncio.ensure_future(pair.generate(one)) for one in asked]
        await until(lambda: side.side.engine.core.stalled)
        await pair.abort("s2/0")
        assert (await calls[2]).finish is Finish.ABORT
        assert not holds.done(), "nobody gave anything back"
        await pair.abort("holds/0")
        await asyncio.gather(holds, *calls)

    play(work, max_batch=1, kv_tokens=288)


def test_the_prefill_side_forgets_a_session_with_its_last_turn() -> None:
    prompt = random_tokens(np.random.default_rng(13), 40)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        memory = cache_of(side.side.engine)
        for turn, last in enumerate((False, True)):
            await pair.generate(request(prompt, f"s/{turn}", max_tokens=4, last=last))
            await until(lambda: side.answered.count("give_back") == side.lent)
            assert memory.num_parked == (0 if last else 1)

    play(work)


def test_its_work_is_that_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.types.REPORT_STEPS", 0.0)
    rng = np.random.default_rng(14)

    async def work(pair: PairedEngine, side: SideHere) -> None:
        for number in range(3):
            got = await pair.generate(request(random_tokens(rng, 20), f"s{number}/0", max_tokens=8))
        assert got.work is not None
        assert (got.work.prefill.prompts, got.work.prefill.tokens) == (3, 60)
        assert (got.work.mixed.steps, got.work.decode.tokens) == (0, 0)
        assert got.work.decode.steps >= 3 * 8

    play(work)


def test_where_the_prefill_side_is_lost_the_engine_is() -> None:
    async def work(pair: PairedEngine, side: SideHere) -> None:
        await pair.generate(request([10, 11], "fine/0", max_tokens=2))
        side.gone = True
        for number in range(2):
            with pytest.raises(EngineError, match=r"the prefill side: .* ended by signal 9"):
                await pair.generate(request([10, 11], f"s{number}/0"))
        with pytest.raises(EngineError, match="signal 9"):
            await pair.abort("s0/0")
        with pytest.raises(EngineError, match="signal 9"):
            await pair.swap(manifest(1))

    play(work)


def test_where_the_decode_side_is_lost_the_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pair: PairedEngine, side: SideHere) -> None:
        call = asyncio.ensure_future(pair.generate(request([10, 11], "s/0", max_tokens=900)))
        await until(lambda: pair.engine.core.stats.sampled_tokens > 3)
        monkeypatch.setattr(pair.engine.core, "step", lambda: 1 / 0)
        for asked in (call, asyncio.ensure_future(pair.generate(request([10, 11], "t/0")))):
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await asked
        side.gone = True

    play(work)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_sessions_are_handed_over_turn_by_turn() -> None:
    rng = np.random.default_rng(9)

    async def play_session(pair: PairedEngine, name: str) -> None:
        prompt = random_tokens(rng, 150)
        for turn in range(3):
            asked = request(prompt, f"{name}/{turn}", max_tokens=10, temperature=turn % 2, last=turn == 2)
            got = await pair.generate(asked)
            check(asked, got, MODELS)
            prompt = np.concatenate([prompt, got.tokens, random_tokens(rng, 70)])

    async def work(pair: PairedEngine, side: SideHere) -> None:
        await asyncio.gather(*(play_session(pair, f"s{number}") for number in range(6)))
        assert (pair.handed.prompts, pair.handed.dropped) == (18, 0)
        assert pair.handed.copied_bytes > 0

    play(work, on="cuda")

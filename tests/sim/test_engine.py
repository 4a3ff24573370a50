"""The simulated engine costs what a real one would: more for longer, less for cached, again after a swap."""

import asyncio

import pytest

from rollart.config.settings import Spread
from rollart.config.sim import MeasuredEngineSettings, SimEngineSettings
from rollart.errors import EngineError, RequestError, WeightError
from rollart.hardware import HARDWARE, MODELS, RUNTIMES, engine_costs, kv_capacity_tokens
from rollart.sim.engine import SimEngine
from rollart.types import Finish, GenerateRequest, Span
from tests.sim.engines import Bench, ask, now, run

COSTS = engine_costs(MODELS["qwen3-8b"], HARDWARE["h20"], 1, RUNTIMES["embedded"])


def alone_s(prompt: int, answer: int) -> float:
    """One call in an engine that has no other, token by token: the first comes with the prompt."""
    return COSTS.prefill_s(prompt, prompt / 2) + sum(COSTS.step_s(1, prompt + said) for said in range(1, answer))


async def seconds(engine: SimEngine, *requests: GenerateRequest) -> float:
    began_s = now()
    await asyncio.gather(*(engine.generate(request) for request in requests))
    return now() - began_s


def test_one_request_alone_takes_its_prefill_and_a_step_for_each_token() -> None:
    async def work() -> None:
        taken_s = await seconds(Bench().engine, ask("x", 1000))
        assert taken_s == pytest.approx(alone_s(1000, 100), rel=0.001)

    run(work)


def test_longer_prompts_and_longer_answers_are_slower() -> None:
    async def work() -> None:
        short_s = await seconds(Bench().engine, ask("x", 100))
        assert await seconds(Bench().engine, ask("x", 20_000)) == pytest.approx(alone_s(20_000, 100), rel=0.02)
        assert await seconds(Bench().engine, ask("x", 20_000)) > short_s + 1.5
        longer = Bench(answer=Spread(mean=300)).engine
        assert await seconds(longer, ask("x", 100)) == pytest.approx(3 * short_s, rel=0.1)

    run(work)


def test_a_batch_costs_far_less_than_its_requests_one_by_one_and_more_than_one() -> None:
    async def work() -> None:
        two_s = await seconds(Bench().engine, ask("x"), ask("y"))
        together_s = await seconds(Bench().engine, *(ask(f"x{number}") for number in range(16)))
        assert two_s < together_s < 3 * two_s

    run(work)


def test_calls_wait_for_each_other_at_their_coordinator() -> None:
    async def work() -> None:
        calls = [ask(f"g{number}.0.0") for number in range(40)]
        free_s = await seconds(Bench(max_batch=64).engine, *calls)
        assert 40.0 < await seconds(Bench(max_batch=64, call_s=1.0).engine, *calls) < 40.0 + 1.5 * free_s

    run(work)


def test_a_batch_that_is_full_makes_others_wait() -> None:
    async def work() -> None:
        bench = Bench(max_batch=1)
        alone_s = await seconds(Bench().engine, ask("x"))
        assert await seconds(bench.engine, ask("x"), ask("y"), ask("z")) == pytest.approx(3 * alone_s, rel=0.02)

    run(work)


def test_a_session_that_goes_on_prefills_only_what_is_new() -> None:
    async def work() -> None:
        engine = Bench().engine
        first = await engine.generate(ask("x", 5000))
        assert (first.prefill_tokens, first.cached_tokens) == (5000, 0)
        second = await engine.generate(ask("x", 5300, turn=1))
        assert (second.prefill_tokens, second.cached_tokens) == (200, 5100)
        other = await engine.generate(ask("y", 5300))
        assert (other.prefill_tokens, other.cached_tokens) == (5300, 0)

    run(work)


def test_the_last_turn_of_a_session_leaves_no_cache() -> None:
    async def work() -> None:
        engine = Bench().engine
        await engine.generate(ask("x", 5000, last=True))
        assert (await engine.generate(ask("x", 5300, turn=1))).cached_tokens == 0

    run(work)


def test_idle_caches_go_when_the_room_is_needed_the_longest_unused_first() -> None:
    async def work() -> None:
        engine = Bench().engine
        capacity = kv_capacity_tokens(MODELS["qwen3-8b"], HARDWARE["h20"], 1)
        part = capacity // 3
        for name in ("x", "y"):
            await engine.generate(ask(name, part))
        await engine.generate(ask("z", part))
        assert (await engine.generate(ask("y", part + 200, turn=1))).cached_tokens == part + 100
        assert (await engine.generate(ask("x", part + 200, turn=1))).cached_tokens == 0

    run(work)


def test_requests_that_do_not_fit_in_memory_together_wait_and_one_that_never_fits_is_refused() -> None:
    async def work() -> None:
        capacity = kv_capacity_tokens(MODELS["qwen3-8b"], HARDWARE["h20"], 1)
        half = int(capacity * 0.6)
        alone_s = await seconds(Bench().engine, ask("x", half))
        assert await seconds(Bench().engine, ask("x", half), ask("y", half)) == pytest.approx(2 * alone_s, rel=0.02)
        with pytest.raises(RequestError, match="does not fit"):
            await Bench().engine.generate(ask("x", capacity))

    run(work)


def test_an_engine_holds_no_more_than_the_job_lets_it() -> None:
    async def work() -> None:
        alone_s = await seconds(Bench().engine, ask("x", 1000))
        two = (ask("x", 1000), ask("y", 1000))
        assert await seconds(Bench(kv_tokens=2300).engine, *two) < 1.5 * alone_s
        assert await seconds(Bench(kv_tokens=2100).engine, *two) == pytest.approx(2 * alone_s, rel=0.02)
        with pytest.raises(RequestError, match="does not fit in 1050"):
            await Bench(kv_tokens=1050).engine.generate(ask("x", 1000))

    run(work)


def test_an_abort_frees_the_slot_and_the_memory_at_once() -> None:
    async def work() -> None:
        bench = Bench(max_batch=1)
        for where_s in (0.0, 0.001, 0.5):
            engine = bench.engine
            task = asyncio.ensure_future(engine.generate(ask("x", 5000)))
            waiting = asyncio.ensure_future(engine.generate(ask("w", 100)))
            await asyncio.sleep(where_s)
            task.cancel()
            waiting.cancel()
            await asyncio.gather(task, waiting, return_exceptions=True)
            await engine.abort("w/0")
            await engine.abort("x/0")
            await engine.abort("never heard of")
            alone_s = await seconds(Bench().engine, ask("y", 100))
            assert await seconds(engine, ask("y", 100)) == pytest.approx(alone_s, rel=0.01)
            bench = Bench(max_batch=1)

    run(work)


def test_the_memory_of_an_aborted_request_is_free_for_the_next() -> None:
    async def work() -> None:
        most = int(kv_capacity_tokens(MODELS["qwen3-8b"], HARDWARE["h20"], 1) * 0.6)
        engine = Bench().engine
        alone_s = await seconds(Bench().engine, ask("y", most))
        for where_s in (0.1, alone_s - 0.1):
            task = asyncio.ensure_future(engine.generate(ask("x", most)))
            await asyncio.sleep(where_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.abort("x/0")
            assert await seconds(engine, ask(f"y{where_s}", most, last=True)) == pytest.approx(alone_s, rel=0.01)

    run(work)


def test_a_swap_makes_work_in_flight_prefill_again_and_its_spans_show_both_versions() -> None:
    async def work() -> None:
        bench = Bench()
        undisturbed_s = await seconds(Bench().engine, ask("x", 5000))
        manifest = bench.put(1)
        await bench.engine.stage(1)
        await asyncio.sleep(5.0)
        began_s = now()
        task = asyncio.ensure_future(bench.engine.generate(ask("x", 5000)))
        await asyncio.sleep(undisturbed_s * 0.8)
        suspended_s = now()
        report = await bench.engine.swap(manifest)
        exposed_s = now() - suspended_s
        completion = await task
        assert [span.version for span in completion.spans] == [0, 1]
        assert sum(span.length for span in completion.spans) == len(completion.tokens) == 100
        said = completion.spans[0].length
        assert report.rebuilt_tokens == 5000 + said
        assert completion.prefill_tokens == 5000 + 5000 + said
        again_s = COSTS.prefill_s(5000 + said, (5000 + said) / 2)
        assert now() - began_s == pytest.approx(undisturbed_s + exposed_s + again_s, rel=0.02)
        assert exposed_s == pytest.approx(0.1), "it was staged: only the load is left"
        after = await bench.engine.generate(ask("y"))
        assert after.spans == (Span(1, 100),)

    run(work)


def test_a_swap_drops_the_caches_of_idle_sessions() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.engine.generate(ask("x", 5000))
        await bench.engine.swap(bench.put(1))
        again = await bench.engine.generate(ask("x", 5300, turn=1))
        assert (again.prefill_tokens, again.cached_tokens) == (5300, 0)

    run(work)


def test_a_swap_that_was_not_staged_stands_still_for_the_transfer() -> None:
    async def work() -> None:
        bench = Bench()
        began_s = now()
        report = await bench.engine.swap(bench.put(1, gb=20.0))
        assert report.pulled.seconds == pytest.approx(2.0)
        assert now() - began_s == pytest.approx(2.0 + 2.0)

    run(work)


def test_a_loader_that_reads_all_weights_on_every_gpu_shares_its_rate_with_the_machines_other_gpus() -> None:
    async def work() -> None:
        for whole, load_s in ((False, 2.0), (True, 16.0)):
            bench = Bench(settings=SimEngineSettings(load_gb_s=10.0, load_whole=whole))
            began_s = now()
            await bench.engine.swap(bench.put(1, gb=20.0))
            assert now() - began_s == pytest.approx(2.0 + load_s)

    run(work)


def test_work_under_way_stands_still_during_a_swap_and_a_failed_one_leaves_the_old_weights() -> None:
    async def work() -> None:
        bench = Bench()
        manifest = bench.put(1)
        bench.store.damage(1, 0, lose=False)
        task = asyncio.ensure_future(bench.engine.generate(ask("x", 100)))
        await asyncio.sleep(0.1)
        with pytest.raises(WeightError):
            await bench.engine.swap(manifest)
        completion = await task
        assert completion.spans == (Span(0, 100),)
        assert bench.engine.version == 0

    run(work)


def test_an_answer_is_cut_at_its_most_tokens_and_says_so() -> None:
    async def work() -> None:
        engine = Bench().engine
        cut = await engine.generate(ask("x", max_tokens=7))
        assert (len(cut.tokens), cut.finish) == (7, Finish.LENGTH)
        assert (await engine.generate(ask("y"))).finish is Finish.STOP

    run(work)


def test_busy_seconds_add_up_to_what_the_engine_worked() -> None:
    async def work() -> None:
        engine = Bench().engine
        began_s = now()
        done = await asyncio.gather(*(engine.generate(ask(f"x{number}", 700)) for number in range(9)))
        assert sum(one.busy_s for one in done) == pytest.approx(now() - began_s, rel=0.05)

    run(work)


def test_an_engine_that_dies_tells_all_who_wait_and_all_who_come() -> None:
    async def work() -> None:
        bench = Bench()
        task = asyncio.ensure_future(bench.engine.generate(ask("x")))
        await asyncio.sleep(0.1)
        bench.engine.die("killed")
        bench.engine.die("again")
        with pytest.raises(EngineError, match="killed"):
            await task
        with pytest.raises(EngineError, match="killed"):
            await bench.engine.generate(ask("y"))
        with pytest.raises(EngineError, match="killed"):
            await bench.engine.stage(1)
        assert bench.died == ["pool-0"]

    run(work)


def test_an_engine_that_hangs_answers_nobody() -> None:
    async def work() -> None:
        bench = Bench()
        task = asyncio.ensure_future(bench.engine.generate(ask("x")))
        await asyncio.sleep(0.1)
        bench.engine.hang()
        for call in (task, bench.engine.generate(ask("y")), bench.engine.abort("x/0"), bench.engine.swap(bench.put(1))):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 10_000.0)

    run(work)


def test_measured_costs_take_the_place_of_the_hardware() -> None:
    cost = MeasuredEngineSettings(step_s=0.01, sequence_s=0.001, kv_token_s=1e-6, prefill_token_s=2e-4)
    settings = SimEngineSettings(call_s=0.5, measured={"pool": cost})

    async def work() -> None:
        alone_s = await seconds(Bench(settings=settings).engine, ask("x", 1000))
        decode_s = 99 * (0.01 + 0.001 + 1050e-6)
        assert alone_s == pytest.approx(0.5 + 1000 * 2e-4 + 0.011 + decode_s, rel=0.001)
        requests = [ask(f"x{number}", 10) for number in range(10)]
        together_s = await seconds(Bench(settings=settings).engine, *requests)
        assert together_s == pytest.approx(0.5 + 10 * 10 * 2e-4 + 100 * 0.02 + 99 * 10 * 60e-6, rel=0.01)
        other_pool = settings.model_copy(update={"measured": {"other": cost}, "call_s": 0.0})
        assert await seconds(Bench(settings=other_pool).engine, ask("x", 1000)) != pytest.approx(alone_s, rel=0.1)

    run(work)


def test_steps_take_as_long_as_they_are_told_to_from_then_on() -> None:
    """What else runs on an engine's device may change in the middle of a prompt, and of an answer."""

    async def work() -> None:
        engine = Bench().engine
        slow = COSTS.slowed(3.0)
        call = asyncio.ensure_future(engine.generate(ask("x", 8000)))
        prefill_s, whole_s = COSTS.prefill_s(8000, 4000), alone_s(8000, 100)
        await asyncio.sleep(prefill_s / 2)
        assert engine.doing == "prefill"
        engine.recost(slow)
        await asyncio.sleep(1.5 * prefill_s + 3 * (whole_s - prefill_s) / 2)
        assert engine.doing == "decode"
        engine.recost(COSTS)
        await call
        assert engine.doing == ""
        assert now() == pytest.approx(2 * whole_s, rel=0.01)

    run(work)


def test_prompts_that_wait_are_computed_in_one_step() -> None:
    """64 short prompts: one step, not 64."""

    async def work() -> None:
        bench = Bench(max_batch=64, answer=Spread(mean=1))
        taken_s = await seconds(bench.engine, *(ask(f"x{number}", 16) for number in range(64)))
        assert taken_s == pytest.approx(COSTS.prefill_s(16, 8) + COSTS.step_s(0, 0, 63 * 16, 8, 63), rel=0.03)
        assert taken_s < 0.5 * 64 * COSTS.prefill_s(16, 8)

    run(work)


def test_a_step_takes_no_more_tokens_than_it_may() -> None:
    async def work() -> None:
        settings = SimEngineSettings(chunk_tokens=1000)
        taken_s = await seconds(Bench(settings=settings, answer=Spread(mean=1)).engine, ask("x", 10_000))
        assert taken_s == pytest.approx(10 * COSTS.step_s(0, 0, 1000, 5000, 0.1), rel=0.001)

    run(work)


def test_context_that_grows_while_nothing_arrives_is_paid_for_exactly() -> None:
    """Sixteen equal answers of 16,000 tokens: the fluid against a sum over every token."""

    async def work() -> None:
        bench = Bench(max_batch=16, answer=Spread(mean=16_000))
        calls = (ask(f"x{number}", 10, max_tokens=16_000) for number in range(16))
        taken_s = await seconds(bench.engine, *calls)
        exact_s = sum(COSTS.step_s(16, 16 * (10 + said)) for said in range(1, 16_000))
        assert taken_s == pytest.approx(exact_s, rel=0.002)
        assert taken_s > 1.2 * 16_000 * COSTS.step_s(16, 16 * 10)

    run(work)


def test_members_of_a_group_compute_their_prompt_once() -> None:
    async def work() -> None:
        engine = Bench().engine
        done = await asyncio.gather(*(engine.generate(ask(f"g1.{number}.0", 5000)) for number in range(4)))
        assert [one.prefill_tokens for one in done] == [5000, 1, 1, 1]
        other = await engine.generate(ask("g2.0.0", 5000))
        assert other.prefill_tokens == 5000
        report = await (bench := Bench()).engine.swap(bench.put(1))
        assert report.rebuilt_tokens == 0

    run(work)


def test_a_swap_lets_a_group_compute_its_prompt_once_more() -> None:
    async def work() -> None:
        bench = Bench(answer=Spread(mean=2000))
        calls = [asyncio.ensure_future(bench.engine.generate(ask(f"g1.{number}.0", 5000))) for number in range(4)]
        await asyncio.sleep(1.0)
        report = await bench.engine.swap(bench.put(1))
        done = await asyncio.gather(*calls)
        said = [one.spans[0].length for one in done]
        assert report.rebuilt_tokens == 5000 + sum(said)

    run(work)


@pytest.mark.parametrize(("kind", "kept"), [("vllm", True), ("embedded", False)])
def test_servers_drop_blocks_of_an_idle_session_and_the_embedded_engine_all_of_it(kind: str, kept: bool) -> None:
    async def work() -> None:
        engine = Bench(kind=kind).engine
        part = kv_capacity_tokens(MODELS["qwen3-8b"], HARDWARE["h20"], 1) // 3
        for name in ("x", "y", "z"):
            await engine.generate(ask(name, part))
        again = await engine.generate(ask("x", part + 200, turn=1))
        assert (again.cached_tokens > 0.9 * part) == kept

    run(work)


def test_two_gpus_are_faster_than_one_and_less_than_twice_as_fast() -> None:
    model, h100, vllm = MODELS["qwen3-32b"], HARDWARE["h100"], RUNTIMES["vllm"]
    steps = {gpus: engine_costs(model, h100, gpus, vllm).step_s(16, 16 * 750) for gpus in (1, 2, 4, 8, 64)}
    assert 1.5 < steps[1] / steps[2] < 1.8, "1.64 was measured"
    assert steps[2] > steps[4] > steps[8]
    assert steps[64] > steps[8], "beyond one machine the network costs more than it brings"

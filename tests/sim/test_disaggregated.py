"""Prefill and decode on workers of their own: on two kinds of hardware, with a link between them."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import Spread
from rollart.errors import EngineError, JobError, RequestError
from rollart.hardware import HARDWARE, MODELS, RUNTIMES, Disaggregated, engine_costs, kv_capacity_tokens
from rollart.launch.checks import check_supported
from rollart.launch.pools import bindings
from rollart.launch.simulation import simulate
from tests.sim.engines import Bench, ask, now, run

MODEL = MODELS["qwen3-8b"]
FAST = Disaggregated(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=25e9)
THERE = engine_costs(MODEL, HARDWARE["h800"], 1, RUNTIMES["embedded"])
HERE = engine_costs(MODEL, HARDWARE["h20"], 1, RUNTIMES["embedded"])


def linked(link_gb_s: float) -> Disaggregated:
    return Disaggregated(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=link_gb_s * 1e9)


def test_a_call_takes_prefill_there_then_the_link_then_decode_here() -> None:
    async def work() -> None:
        tokens = 8000
        bench = Bench(apart=linked(2.0))
        began_s = now()
        done = await bench.engine.generate(ask("x", tokens))
        link_s = tokens * MODEL.kv_bytes_per_token / 2e9
        decode_s = 99 * HERE.step_s(1, tokens + 50)
        assert now() - began_s == pytest.approx(THERE.prefill_s(tokens, tokens / 2) + link_s + decode_s, rel=0.02)
        assert done.busy_s == pytest.approx(decode_s, rel=0.02), "the link is nobody's work"
        assert done.prefill_busy_s == pytest.approx(THERE.prefill_s(tokens, tokens / 2), rel=0.02)
        assert (done.prefill_tokens, done.cached_tokens) == (tokens, 0)

    run(work)


def test_calls_take_turns_on_the_link() -> None:
    async def work() -> None:
        slow = Bench(apart=linked(0.1), answer=Spread(mean=1))
        began_s = now()
        await asyncio.gather(*(slow.engine.generate(ask(f"x{number}", 1000)) for number in range(4)))
        assert now() - began_s == pytest.approx(4 * 1000 * MODEL.kv_bytes_per_token / 0.1e9, rel=0.05)

    run(work)


def test_decode_does_not_wait_for_the_prefill_of_others() -> None:
    async def taken_s(others: int) -> float:
        bench, began_s = Bench(apart=FAST), now()
        first = asyncio.ensure_future(bench.engine.generate(ask("x", 100)))
        await asyncio.sleep(0.1)
        prefilling = [bench.engine.generate(ask(f"y{number}", 60_000)) for number in range(others)]
        calls = [asyncio.ensure_future(call) for call in prefilling]
        await first
        passed_s = now() - began_s
        await asyncio.gather(*calls)
        return passed_s

    async def work() -> None:
        assert await taken_s(2) == pytest.approx(await taken_s(0), rel=0.02), "0.7 s of decode, 4 s of others' prefill"

    run(work)


def test_the_next_turn_computes_the_last_answer_again_but_sends_only_what_is_new() -> None:
    async def work() -> None:
        bench = Bench(apart=linked(1.0))
        await bench.engine.generate(ask("x", 1000))
        began_s = now()
        done = await bench.engine.generate(ask("x", 1300, turn=1))
        assert (done.prefill_tokens, done.cached_tokens) == (300, 1000), "100 said, 200 new"
        link_s = 200 * MODEL.kv_bytes_per_token / 1e9
        decode_s = 99 * HERE.step_s(1, 1350)
        assert now() - began_s == pytest.approx(THERE.prefill_s(300, 1150) + link_s + decode_s, rel=0.02)

    run(work)


def test_a_swap_makes_what_is_on_the_link_start_again() -> None:
    async def work() -> None:
        bench = Bench(apart=linked(0.1))
        call = asyncio.ensure_future(bench.engine.generate(ask("x", 1000)))
        await asyncio.sleep(0.5)  # 33 ms of prefill, then 1.5 s on the link
        report = await bench.engine.swap(bench.put(1))
        assert report.rebuilt_tokens == 1000
        done = await call
        assert [tuple(span) for span in done.spans] == [(1, 100)]
        assert done.prefill_tokens == 2000

    run(work)


def test_an_abort_on_the_link_frees_the_batch() -> None:
    async def work() -> None:
        bench = Bench(apart=linked(0.1), max_batch=1)
        first = asyncio.ensure_future(bench.engine.generate(ask("x", 1000)))
        await asyncio.sleep(0.5)
        second = asyncio.ensure_future(bench.engine.generate(ask("y", 10)))
        await bench.engine.abort("x/0")
        await second
        first.cancel()
        assert now() < 2.8, "1.5 s until the link is free, 1.1 s to decode; nothing for the aborted one"

    run(work)


def test_all_workers_die_as_one() -> None:
    async def work() -> None:
        bench = Bench(apart=linked(0.1))
        calls = [asyncio.ensure_future(bench.engine.generate(ask(name, 1000))) for name in ("x", "y")]
        await asyncio.sleep(0.05)  # x is on the link, y prefills
        bench.engine.die("killed")
        for call in calls:
            with pytest.raises(EngineError):
                await call
        assert bench.died == ["pool-0"]

    run(work)


MANY = Disaggregated(hardware=HARDWARE["h800"], gpus=1, workers=2, decoders=2, link_bytes_per_s=0.5e9)


def test_prompts_are_prefilled_side_by_side_and_each_worker_has_a_link() -> None:
    async def taken_s(apart: Disaggregated, calls: int) -> float:
        bench, began_s = Bench(apart=apart, answer=Spread(mean=1)), now()
        await asyncio.gather(*(bench.engine.generate(ask(f"x{number}", 30_000)) for number in range(calls)))
        return now() - began_s

    async def work() -> None:
        one_s = await taken_s(MANY, 1)
        assert await taken_s(MANY, 2) == pytest.approx(one_s, rel=0.02)
        assert await taken_s(replace(MANY, workers=1), 2) > 1.8 * one_s, "the second waits for the link"

    run(work)


def test_a_prompt_that_is_done_first_leaves_its_worker_first() -> None:
    async def work() -> None:
        bench = Bench(apart=replace(MANY, link_bytes_per_s=1e15), answer=Spread(mean=1))
        long, short, next_one = (
            asyncio.ensure_future(bench.engine.generate(ask(name, tokens)))
            for name, tokens in (("x", 60_000), ("y", 1000), ("z", 1000))
        )
        await asyncio.gather(short, next_one)
        assert now() < 0.2, "the other worker takes both short ones"
        await long
        assert now() > 1.0

    run(work)


def test_decode_workers_share_the_batch_and_each_has_its_own_memory() -> None:
    async def work() -> None:
        bench, began_s = Bench(apart=replace(MANY, link_bytes_per_s=1e15)), now()
        context = 100_000
        await asyncio.gather(*(bench.engine.generate(ask(name, context)) for name in ("x", "y")))
        decode_s = 99 * HERE.step_s(1, context)
        chunks = context / 8192
        prefill_s = chunks * THERE.step_s(0, 0, 8192, context / 2, 1 / chunks)
        assert now() - began_s == pytest.approx(prefill_s + decode_s, rel=0.02), "one sequence on each"
        with pytest.raises(RequestError, match="does not fit"):
            await bench.engine.generate(ask("z", kv_capacity_tokens(MODEL, HARDWARE["h20"], 1)))

    run(work)


# --- whole jobs -------------------------------------------------------------------------------------------------


PREFILL = {"pool": "prefill", "workers": 2, "decoders": 3}


def job(**changes: Any) -> Job:
    raw: dict[str, Any] = {
        "name": "apart",
        "tasks": [{"name": "game", "group_size": 2}, {"name": "maths", "group_size": 2}],
        "rollout": {"groups_per_step": 4, "zero_variance": "keep"},
        "pools": [
            {"name": "decode", "hardware": "h20", "engines": {"count": 2, "gpus": 2, "prefill": PREFILL}},
            {"name": "prefill", "hardware": "h800"},
            {"name": "environments", "slots": 64},
        ],
        "train": {"steps": 4},
        "checkpoint": {"every": 2},
        "sim": {"tasks": {"game": {"prompt_tokens": 4000}, "maths": {"turns": 2, "answer_tokens": 800}}},
    }
    raw["sim"] |= changes.pop("sim", {})
    return build_job(raw | changes)


def test_a_job_books_each_pool_its_own_work() -> None:
    result = simulate(job())
    assert result.summary.state == "finished"
    assert result.violations == []
    pools = result.summary.pools
    assert pools["decode"].tokens > 0
    assert pools["prefill"].tokens == 0
    assert 0 < pools["prefill"].utilisation < 1
    assert 0 < pools["decode"].utilisation < 1
    assert (pools["prefill"].engines, pools["prefill"].gpus) == (0, 2 * 2)
    assert (pools["decode"].engines, pools["decode"].gpus) == (2, 2 * 3 * 2)
    assert result.summary.cost.pools["prefill"] > 0


@pytest.mark.parametrize("kind", ["engine_death", "engine_hang", "engine_restart", "bucket_corrupt"])
def test_faults_where_prefill_is_apart_break_no_promise(kind: str) -> None:
    faults = [{"kind": kind, "at_s": 40}, {"kind": kind, "swap": 2}]
    result = simulate(job(sim={"faults": faults}, limits={"progress_s": 60, "swap_s": 60}))
    assert result.summary.state == "finished", result.summary.reason
    assert result.violations == []


def test_a_pool_can_prefill_for_itself_and_have_engines_that_do_both() -> None:
    pools = [
        {"name": "both", "hardware": "h20", "engines": {"prefill": {"gpus": 2}}},
        {"name": "alone", "hardware": "h20", "engines": {"prefill": {"pool": "both"}}},
        {"name": "environments", "slots": 64},
    ]
    result = simulate(job(pools=pools))
    assert result.violations == []
    found = result.summary.pools
    assert (found["both"].gpus, found["alone"].gpus) == (1 + 2 + 1, 1)
    assert found["alone"].tokens > 0
    rows = bindings(job(pools=pools, train={"steps": 4, "gpus": 8, "type": "fsdp2"}))
    assert [(row.role, row.pool, row.workers, row.devices) for row in rows] == [
        *(("rollout", "both", 1, 1), ("prefill", "both", 2, 3), ("train", "both", 1, 8)),
        *(("rollout", "alone", 1, 1), ("environments", "environments", 64, 0)),
    ]


@pytest.mark.parametrize(
    ("prefill", "message"),
    [
        ({"pool": "prefil"}, r"pools.0.engines.prefill.pool: 'prefil' is not known, did you mean 'prefill'\?"),
        ({}, r"pools.1: pool 'prefill' has no engines and no slots, and neither trains nor prefills"),
        ("prefill", r"pools.0.engines.prefill: "),
    ],
)
def test_a_prefill_pool_that_does_not_fit_is_refused(prefill: Any, message: str) -> None:
    pools = [
        {"name": "decode", "engines": {"prefill": prefill}},
        {"name": "prefill"},
        {"name": "environments", "slots": 64},
    ]
    with pytest.raises(JobError, match=message):
        job(pools=pools)


def test_no_task_can_be_declared_to_a_pool_that_only_prefills() -> None:
    with pytest.raises(JobError, match=r"tasks.0.affinity: 'prefill' is not known; one of auto, any, decode"):
        job(tasks=[{"name": "game", "group_size": 2, "affinity": "prefill"}, {"name": "maths", "group_size": 2}])


def real(kind: str, cluster: str) -> Job:
    pools = [
        {"name": "prefill", "hardware": "h800"},
        {"name": "decode", "hardware": "h20", "engines": {"type": kind, "prefill": {"pool": "prefill"}}},
        {"name": "environments", "slots": 64},
    ]
    return job(pools=pools, cluster={"type": cluster}, weights={"type": "files"})


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("sglang", r"pools.decode.engines.prefill: sglang engines cannot prefill apart; set"),
        (
            "embedded",
            r"pools.decode.engines.prefill.pool: embedded engines prefill on the device that decodes; remove it",
        ),
    ],
)
def test_rollart_train_refuses_engines_that_cannot_prefill_apart(kind: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        check_supported(real(kind, "local"))


def test_the_workers_of_a_real_engine_are_on_one_machine() -> None:
    check_supported(real("vllm", "local"))
    with pytest.raises(
        JobError, match=r"pools.decode.engines.prefill.pool: all workers of an engine run on one machine"
    ):
        check_supported(real("vllm", "ray"))

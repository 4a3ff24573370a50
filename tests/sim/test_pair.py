"""An engine in two halves: prefill on one kind of hardware, decode on another, KV over a link between them."""

import asyncio
from typing import Any

import pytest

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import Spread
from rollart.errors import EngineError, JobError
from rollart.hardware import HARDWARE, MODELS, Pair, decode_step_s, prefill_s_per_token
from rollart.launch.checks import check_supported
from rollart.launch.simulation import simulate
from tests.sim.engines import Bench, ask, now, run

MODEL = MODELS["qwen3-8b"]
FAST = Pair(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=25e9)
PREFILL_S = prefill_s_per_token(MODEL, HARDWARE["h800"], 1)


def pair_of(link_gb_s: float) -> Pair:
    return Pair(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=link_gb_s * 1e9)


def test_a_call_takes_prefill_there_then_the_link_then_decode_here() -> None:
    async def work() -> None:
        tokens = 8000
        bench = Bench(pair=pair_of(2.0))
        began_s = now()
        done = await bench.engine.generate(ask("x", tokens))
        link_s = tokens * MODEL.kv_bytes_per_token / 2e9
        decode_s = 100 * decode_step_s(MODEL, HARDWARE["h20"], 1, 1, tokens + 50)
        assert now() - began_s == pytest.approx(tokens * PREFILL_S + 0.002 + link_s + decode_s, rel=0.02)
        assert done.busy_s == pytest.approx(decode_s, rel=0.02), "the link is nobody's work"
        assert done.prefill_busy_s == pytest.approx(tokens * PREFILL_S + 0.002, rel=0.02)
        assert (done.prefill_tokens, done.cached_tokens) == (tokens, 0)

    run(work)


def test_calls_take_turns_on_the_link() -> None:
    async def work() -> None:
        slow = Bench(pair=pair_of(0.1), answer=Spread(mean=1))
        began_s = now()
        await asyncio.gather(*(slow.engine.generate(ask(f"x{number}", 1000)) for number in range(4)))
        assert now() - began_s == pytest.approx(4 * 1000 * MODEL.kv_bytes_per_token / 0.1e9, rel=0.05)

    run(work)


def test_decode_does_not_wait_for_the_prefill_of_others() -> None:
    async def taken_s(others: int) -> float:
        bench, began_s = Bench(pair=FAST), now()
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
        bench = Bench(pair=pair_of(1.0))
        await bench.engine.generate(ask("x", 1000))
        began_s = now()
        done = await bench.engine.generate(ask("x", 1300, turn=1))
        assert (done.prefill_tokens, done.cached_tokens) == (300, 1000), "100 said, 200 new"
        link_s = 200 * MODEL.kv_bytes_per_token / 1e9
        decode_s = 100 * decode_step_s(MODEL, HARDWARE["h20"], 1, 1, 1350)
        assert now() - began_s == pytest.approx(300 * PREFILL_S + 0.002 + link_s + decode_s, rel=0.02)

    run(work)


def test_a_swap_makes_what_is_on_the_link_start_again() -> None:
    async def work() -> None:
        bench = Bench(pair=pair_of(0.1))
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
        bench = Bench(pair=pair_of(0.1), max_batch=1)
        first = asyncio.ensure_future(bench.engine.generate(ask("x", 1000)))
        await asyncio.sleep(0.5)
        second = asyncio.ensure_future(bench.engine.generate(ask("y", 10)))
        await bench.engine.abort("x/0")
        await second
        first.cancel()
        assert now() < 2.5, "1.5 s until the link is free, 0.7 s to decode; nothing for the aborted one"

    run(work)


def test_the_pair_dies_as_one() -> None:
    async def work() -> None:
        bench = Bench(pair=pair_of(0.1))
        calls = [asyncio.ensure_future(bench.engine.generate(ask(name, 1000))) for name in ("x", "y")]
        await asyncio.sleep(0.05)  # x is on the link, y prefills
        bench.engine.die("killed")
        for call in calls:
            with pytest.raises(EngineError):
                await call
        assert bench.died == ["pool-0"]

    run(work)


# --- whole jobs -------------------------------------------------------------------------------------------------


def job(**changes: Any) -> Job:
    raw: dict[str, Any] = {
        "name": "pairs",
        "tasks": [{"name": "game", "group_size": 2}, {"name": "maths", "group_size": 2}],
        "rollout": {"groups_per_step": 4, "zero_variance": "keep"},
        "pools": [
            {"name": "decode", "hardware": "h20", "engines": {"count": 2, "gpus": 2, "prefill": "prefill"}},
            {"name": "prefill", "hardware": "h800", "engines": {"count": 2}},
            {"name": "environments", "slots": 64},
        ],
        "train": {"steps": 4},
        "checkpoint": {"every": 2},
        "sim": {"tasks": {"game": {"prompt_tokens": 4000}, "maths": {"turns": 2, "answer_tokens": 800}}},
    }
    raw["sim"] |= changes.pop("sim", {})
    return build_job(raw | changes)


def test_a_job_on_pairs_books_each_pool_its_own_work() -> None:
    result = simulate(job())
    assert result.summary.state == "finished"
    assert result.violations == []
    pools = result.summary.pools
    assert pools["decode"].tokens > 0
    assert pools["prefill"].tokens == 0
    assert 0 < pools["prefill"].utilisation < 1
    assert 0 < pools["decode"].utilisation < 1
    assert pools["prefill"].gpus == 2
    assert result.summary.cost.pools["prefill"] > 0


@pytest.mark.parametrize("kind", ["engine_death", "engine_hang", "engine_restart", "bucket_corrupt"])
def test_faults_on_pairs_break_no_promise(kind: str) -> None:
    faults = [{"kind": kind, "at_s": 40}, {"kind": kind, "swap": 2}]
    result = simulate(job(sim={"faults": faults}, limits={"progress_s": 60, "swap_s": 60}))
    assert result.summary.state == "finished", result.summary.reason
    assert result.violations == []


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([("a", "b", 1)], "no other pool with engines is called 'b'"),
        ([("a", "a", 1)], "no other pool with engines is called 'a'"),
        ([("a", "b", 1), ("b", None, 2)], "make the counts equal"),
        ([("a", "b", 1), ("b", "c", 1), ("c", None, 1)], "has its own prefill pool"),
        ([("a", "c", 1), ("b", "c", 1), ("c", None, 1)], "prefills for two pools"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(pools: list[tuple[str, str | None, int]], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job(
            pools=[
                *({"name": name, "engines": {"count": count, "prefill": other}} for name, other, count in pools),
                {"name": "environments", "slots": 64},
            ]
        )


def test_no_task_can_be_declared_to_a_pool_that_only_prefills() -> None:
    with pytest.raises(JobError, match=r"tasks.0.affinity: no pool with engines is called 'prefill'"):
        job(tasks=[{"name": "game", "group_size": 2, "affinity": "prefill"}, {"name": "maths", "group_size": 2}])


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_rollart_train_refuses_pairs_of_pools(kind: str) -> None:
    pools = [
        {"name": "prefill", "engines": {"type": kind}},
        {"name": "decode", "engines": {"type": kind, "prefill": "prefill"}},
        {"name": "environments", "slots": 64},
    ]
    with pytest.raises(JobError, match=r"pools.decode.engines.prefill: pairs of two pools are simulated only; remove"):
        check_supported(job(pools=pools))

"""Two factors from what engines say of their steps."""

import random

import pytest

from rollart.config.load import build_job
from rollart.hardware import HARDWARE, MODELS, RUNTIMES, TABLE, Learnt, LearntCosts, engine_costs
from rollart.launch.pools import build_affinity
from rollart.policy.speeds import ENOUGH, LIMIT, WINDOWS, Gauge, is_news, learnt
from rollart.types import REPORT_STEPS, EngineWork, WorkMeter

COSTS = engine_costs(MODELS["qwen3-8b"], HARDWARE["h200"], 1, RUNTIMES["embedded"])


class Engine:
    """Steps that take so many times what the table says."""

    def __init__(self, prefill: float, decode: float, seed: int = 0) -> None:
        self.truth = LearntCosts(table=COSTS, learnt=Learnt(prefill=prefill, decode=decode))
        self.meter = WorkMeter()
        self.rng = random.Random(seed)
        self.before: EngineWork | None = None

    def decodes(self, steps: int, slower: float = 1.0) -> None:
        for _ in range(steps):
            batch = self.rng.randint(30, 40)
            cached = batch * self.rng.uniform(900, 1100)
            self.meter.add(slower * self.truth.step_s(batch, cached), sequences=batch, cached=cached)

    def prefills(self, steps: int, *, batch: int) -> None:
        for _ in range(steps):
            tokens = self.rng.randint(600, 1000)
            took_s = self.truth.step_s(batch, batch * 1000.0, tokens, tokens / 2, 1.0)
            self.meter.add(
                took_s, sequences=batch, cached=batch * 1000.0, prompts=1, tokens=tokens, pairs=tokens**2 / 2
            )

    def tell(self, gauge: Gauge) -> None:
        now = self.meter.report()
        assert now is not None
        gauge.add(self.before, now, COSTS, COSTS)
        self.before = now


def alone(gauge: Gauge) -> Learnt:
    """What is learnt where there is one pool."""
    return learnt({"one": gauge})["one"]


def test_a_pool_of_which_too_little_was_seen_is_as_far_from_its_table_as_the_others() -> None:
    """Or whoever is measured first looks slow, where the table is wrong for all of them."""
    gauges = {name: Gauge() for name in ("one", "two", "three")}
    for name, factor, windows in (("one", 2.0, ENOUGH), ("two", 8.0, ENOUGH), ("three", 5.0, ENOUGH - 1)):
        engine = Engine(1.0, factor)
        for _ in range(windows):
            engine.decodes(64)
            engine.tell(gauges[name])
    found = {name: one.decode for name, one in learnt(gauges).items()}
    assert found == pytest.approx({"one": 2.0, "two": 8.0, "three": 4.0})
    assert {one.prefill for one in learnt(gauges).values()} == {1.0}


def test_both_factors_come_out_of_steps_that_do_both() -> None:
    gauge, engines = Gauge(), [Engine(3.0, 0.5, seed) for seed in range(2)]
    for _ in range(20):
        for engine in engines:
            engine.decodes(40)
            engine.prefills(3, batch=35)
            engine.prefills(1, batch=0)
            engine.tell(gauge)
    assert alone(gauge).prefill == pytest.approx(3.0, rel=0.05)
    assert alone(gauge).decode == pytest.approx(0.5, rel=0.02)


def test_the_table_stands_until_there_is_enough_to_go_by() -> None:
    gauge, engine = Gauge(), Engine(3.0, 3.0)
    for number in range(1, 2 * ENOUGH):
        engine.decodes(64)
        engine.tell(gauge)
        assert alone(gauge).decode == pytest.approx(3.0 if number >= ENOUGH else 1.0)
        assert gauge.prefill is None
        assert alone(gauge).prefill == 1.0


def test_a_few_steps_that_took_very_long_move_nothing() -> None:
    """Kernels that compile, or another process on the device."""
    gauge, engine = Gauge(), Engine(1.0, 1.0)
    for number in range(WINDOWS):
        engine.decodes(64, slower=500.0 if number < 3 or number == 20 else 1.0)
        engine.tell(gauge)
    assert alone(gauge).decode == pytest.approx(1.0)


def test_an_engine_that_becomes_slower_is_followed() -> None:
    gauge, engine = Gauge(), Engine(1.0, 1.0)
    for slower in (1.0, 2.0):
        for _ in range(WINDOWS):
            engine.decodes(64, slower)
            engine.tell(gauge)
    assert alone(gauge).decode == pytest.approx(2.0)


def test_factors_are_bounded() -> None:
    gauge, engine = Gauge(), Engine(1.0, 1000.0)
    for _ in range(ENOUGH):
        engine.decodes(64)
        engine.tell(gauge)
    assert alone(gauge).decode == LIMIT


def test_where_every_step_has_prompts_both_are_as_far_off_as_the_whole_step() -> None:
    gauge, engine = Gauge(), Engine(2.0, 2.0)
    for _ in range(20):
        engine.prefills(40, batch=35)
        engine.tell(gauge)
    assert gauge.decode is None
    assert (alone(gauge).prefill, alone(gauge).decode) == pytest.approx((2.0, 2.0), rel=0.05)


def test_what_an_engine_cannot_have_done_is_not_counted() -> None:
    gauge, engine = Gauge(), Engine(1.0, 1.0)
    engine.decodes(500)
    engine.tell(gauge)
    known = gauge.decode
    younger = Engine(1.0, 9.0)
    younger.decodes(40)
    now = younger.meter.report()
    assert now is not None
    gauge.add(engine.before, now, COSTS, COSTS)
    broken = now._replace(decode=now.decode._replace(seconds=float("nan")))
    gauge.add(None, broken, COSTS, COSTS)
    assert gauge.decode == known


def test_a_report_comes_with_enough_steps_and_has_all_since_the_beginning() -> None:
    meter = WorkMeter()
    for _ in range(int(REPORT_STEPS) - 1):
        meter.add(0.5, sequences=2, cached=10)
    assert meter.report() is None
    meter.add(1.0, sequences=2, cached=10, prompts=1, tokens=5, pairs=15)
    first = meter.report()
    assert first is not None
    assert first.decode.steps == REPORT_STEPS - 1
    assert first.decode.cached == 10 * (REPORT_STEPS - 1)
    assert (first.mixed.tokens, first.mixed.pairs, first.mixed.seconds) == (5, 15, 1.0)
    assert meter.report() is None
    for _ in range(int(REPORT_STEPS)):
        meter.add(0.5, sequences=2)
    second = meter.report()
    assert second is not None
    assert second.decode.steps == 2 * REPORT_STEPS - 1


def test_news_is_what_moved_by_a_fifth() -> None:
    assert is_news("one", TABLE, Learnt(prefill=1.1, decode=0.9)) == ""
    assert (
        is_news("one", TABLE, Learnt(prefill=3.0))
        == "one is measured to take 3.00 times the table's seconds in prefill"
    )
    assert "0.50 times the table's seconds in decode" in is_news("one", TABLE, Learnt(decode=0.5))


def test_a_part_of_a_device_computes_by_its_share_and_reads_more_than_that() -> None:
    whole = HARDWARE["h200"]
    part = whole.part(48 / 132)
    assert part.tflops == pytest.approx(whole.tflops * 48 / 132)
    assert part.bandwidth_gb_s / whole.bandwidth_gb_s == pytest.approx(0.79, abs=0.02), "3.4 of 4.3 TB/s were measured"
    assert whole.part(1.0) == whole


def test_a_pool_with_a_share_of_a_card_is_not_taken_for_a_whole_one() -> None:
    engines = {"device": "cuda:0", "share": 0.25}
    job = build_job(
        {
            "name": "parts",
            "tasks": [{"name": "game"}],
            "pools": [
                {"name": "whole", "hardware": "h200", "engines": {"count": 1}},
                {"name": "part", "hardware": "h200", "engines": engines},
                {"name": "environments", "slots": 8},
            ],
        }
    )
    whole, part = build_affinity(job, MODELS["qwen3-8b"]).pools
    assert part.costs.prefill_token_s(0.0) > 2 * whole.costs.prefill_token_s(0.0)
    assert whole.costs.step_s(8, 8000) < part.costs.step_s(8, 8000) < 2 * whole.costs.step_s(8, 8000)

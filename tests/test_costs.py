"""Who used the engines, and what it cost: calls that came to nothing are waste, and rewards have a price."""

from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.schema import Event
from rollart.launch.driver import facts
from rollart.launch.simulation import simulate
from rollart.report.summary import Costs, Summary, TaskCost
from tests.events import some
from tests.summaries import summary_with

RAW: dict[str, Any] = {
    "name": "job",
    "tasks": [{"name": "a", "group_size": 2}],
    "pools": [
        {"name": "fast", "hardware": "h20", "cost": 2.0, "engines": {"count": 1}},
        {"name": "rooms", "slots": 8, "cost": 0.0},
    ],
    "train": {"steps": 3, "pool": "rooms"},
}
HOUR_S = 3600.0


def cost_of(*events: Event, until_h: float = 4.0, **changes: Any) -> Costs:
    """Of a run with these events, at hours, on one engine whose hour costs 2."""
    return summary_of(*events, until_h=until_h, **changes).cost


def summary_of(*events: Event, until_h: float = 4.0, **changes: Any) -> Summary:
    run = facts(build_job({**RAW, **changes}), clock="real")
    return summary_with(at(0.0, run), *events, at(until_h, schema.Warning(text="")))


def at(hour: float, event: Event) -> Event:
    event.t = hour * HOUR_S
    return event


def start(attempt: str, *, evaluation: bool = False) -> Event:
    return schema.Start(t=0.0, id=attempt, task="a/1", pool="fast", eval=evaluation)


def send(at_h: float, attempt: str, engine: str = "fast-0") -> Event:
    return at(at_h, some(schema.Send, id=f"{attempt}/0", engine=engine, pool="fast"))


def said(at_h: float, attempt: str, busy_h: float) -> Event:
    busy_s = busy_h * HOUR_S
    return at(at_h, some(schema.Said, id=f"{attempt}/0", engine="fast-0", tokens=5, prefill=3, busy_s=busy_s))


def end(at_h: float, attempt: str, status: str) -> Event:
    reward = 1.0 if status == "done" else None
    return at(at_h, some(schema.End, id=attempt, task="a/1", status=status, turns=1, tokens=5, reward=reward))


@pytest.mark.parametrize("status", ["aborted", "stale", "failed"])
def test_the_work_of_a_call_that_is_given_up_is_waste_and_not_idle(status: str) -> None:
    result = summary_of(start("g0.0.0"), send(1.0, "g0.0.0"), end(3.0, "g0.0.0", status))
    cost = result.cost
    assert cost.tasks["a"] == TaskCost(used=4.0, wasted=4.0), "two hours of the engine"
    assert (cost.wasted, cost.idle, result.pools["fast"].utilisation) == (4.0, 4.0, 0.5)


def test_calls_beside_each_other_share_their_engine() -> None:
    cost = cost_of(
        start("g0.0.0"),
        start("g0.1.0"),
        send(0.0, "g0.0.0"),
        send(1.0, "g0.1.0"),
        said(3.0, "g0.1.0", busy_h=1.0),
        end(3.0, "g0.1.0", "done"),
        end(4.0, "g0.0.0", "stale"),
    )
    assert cost.tasks["a"] == TaskCost(used=2.0 * (1.0 + 1.0 + 1.0 + 1.0), wasted=2.0 * (1.0 + 2.0 / 2 + 1.0) + 2.0)
    assert cost.idle == 0.0


def test_an_answered_call_costs_what_its_engine_measured() -> None:
    cost = cost_of(start("g0.0.0"), send(1.0, "g0.0.0"), said(3.0, "g0.0.0", busy_h=0.5), end(4.0, "g0.0.0", "stale"))
    assert (cost.tasks["a"].used, cost.idle) == (1.0, 7.0)


def test_what_is_lost_with_an_engine_is_waste_whatever_becomes_of_its_attempt() -> None:
    cost = cost_of(
        start("g0.0.0"),
        send(0.0, "g0.0.0", "fast-0"),
        at(1.0, schema.Lost(id="g0.0.0/0", engine="fast-0", reason="died")),
        send(1.0, "g0.0.0"),
        said(2.0, "g0.0.0", busy_h=1.0),
        at(0.0, schema.Admit(group="g0", task="a/1", serving=0)),
        end(2.0, "g0.0.0", "done"),
    )
    assert cost.tasks["a"] == TaskCost(used=4.0, wasted=2.0)


def test_what_evaluation_loses_with_an_engine_is_evaluation_and_not_idle() -> None:
    cost = cost_of(
        start("eval0.0.0", evaluation=True),
        send(0.0, "eval0.0.0"),
        at(1.0, schema.Lost(id="eval0.0.0/0", engine="fast-0", reason="died")),
        send(1.0, "eval0.0.0"),
        said(2.0, "eval0.0.0", busy_h=1.0),
        end(2.0, "eval0.0.0", "done"),
    )
    assert (cost.evaluation, cost.idle, cost.wasted) == (4.0, 4.0, 0.0)


def test_a_killed_coordinator_wastes_what_was_under_way() -> None:
    cost = cost_of(start("g0.0.0"), send(1.0, "g0.0.0"), at(2.0, schema.Killed()))
    assert cost.tasks["a"] == TaskCost(used=2.0, wasted=2.0)
    assert cost.idle == 6.0


def test_evaluation_and_what_is_still_under_way_are_neither_used_nor_idle() -> None:
    cost = cost_of(
        start("eval0.0.0", evaluation=True),
        start("g0.0.0"),
        send(0.0, "eval0.0.0"),
        said(1.0, "eval0.0.0", busy_h=1.0),
        end(1.0, "eval0.0.0", "done"),
        send(1.0, "g0.0.0"),
        said(3.0, "g0.0.0", busy_h=2.0),
    )
    assert (cost.evaluation, cost.under_way, cost.idle) == (2.0, 4.0, 2.0)
    assert cost.tasks["a"] == TaskCost(used=0.0, wasted=0.0)


FAILED = schema.RewardFailed(id="g0.0.0", reason="no")
HTTP = {"type": "http", "url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("rewards", "price"),
    [
        ({}, 0.0),
        ({"workers": 3, "cost": 0.5}, 3 * 0.5 * 4.0),
        ({**HTTP, "cost": 8.0}, 8.0 * (0.5 + 0.6)),
        ({**HTTP, "call_cost": 0.25}, 3 * 0.25),
        ({**HTTP, "gb_second_cost": 2.0, "memory_mb": 512}, 3600.0 * (0.5 + 0.6)),
        (HTTP, 0.0),
    ],
)
def test_rewards_have_a_price(rewards: dict[str, Any], price: float) -> None:
    known, unknown = (
        some(schema.Reward, id="g0.0.0", value=1.0, s=0.6 * HOUR_S, busy_s=busy_s, cold_s=0.25 * HOUR_S)
        for busy_s in (0.25 * HOUR_S, 0.0)
    )
    cost = cost_of(at(1.0, known), at(2.0, unknown), at(3.0, FAILED), rewards=rewards)
    assert cost.rewards == pytest.approx(price)
    assert cost.total == pytest.approx(8.0 + price)


def test_each_call_that_was_made_is_paid() -> None:
    """Asked again beside a slow one: both run. Known to the judge: nobody was asked. Nobody was reached: none."""
    seconds = {"s": 0.5 * HOUR_S, "busy_s": 0.0, "cold_s": 0.0, "id": "g0.0.0", "value": 1.0}
    twice, never = some(schema.Reward, made=2, **seconds), some(schema.Reward, made=0, **seconds)
    refused = schema.RewardFailed(id="g0.0.0", reason="no", s=HOUR_S, made=0)
    late = schema.RewardFailed(id="g0.0.0", reason="no answer", s=0.25 * HOUR_S)
    priced = {**HTTP, "cost": 8.0, "call_cost": 1.0}
    result = summary_of(at(1.0, twice), at(2.0, never), at(3.0, refused), at(3.0, late), rewards=priced)
    assert result.cost.rewards == pytest.approx(2 * 0.5 * 8.0 + 2 * 1.0 + 0.25 * 8.0 + 1.0)
    assert (result.reward.made, result.reward.calls, result.reward.failed) == (3, 2, 2)


def judged(**changes: Any) -> dict[str, Any]:
    own = {"name": "style", "type": "judge", "url": "http://127.0.0.1:1", "model": "m", "rubric": "r", **changes}
    return {"tasks": [{"name": "a", "group_size": 2, "rewards": [own]}]}


def graded(mean: float, spread: float, weight: float, made: int = 2) -> Event:
    call = schema.RewardCall(s=1.0, busy_s=0.0, cold_s=0.0, tries=1, made=made)
    parts = {"style": weight * mean, "style/spread": spread}
    return some(schema.Reward, id="g0.0.0", value=weight * mean, parts=parts, calls=[call], made=made)


@pytest.mark.parametrize(
    ("grades", "spread", "agreement"),
    [
        ([(0.2, 0.0), (0.8, 0.0)], 0.0, 1.0),
        ([(0.5, 0.1), (0.5, 0.1)], 0.1, -0.5),  # nothing but noise
        ([(0.2, 0.1), (0.8, 0.1), (0.4, 0.0)], 0.0667, 0.8387),  # votes 1 3, 7 9, 4 4: by hand
        ([(0.5, 0.0), (0.5, 0.0)], 0.0, None),
    ],
)
def test_how_far_a_judge_agrees_with_itself(
    grades: list[tuple[float, float]], spread: float, agreement: float | None
) -> None:
    """Krippendorff's alpha for intervals. An episode that was known adds nothing."""
    events = [graded(mean, apart, 0.5) for mean, apart in [*grades, grades[0]]]
    events[-1] = graded(*grades[0], 0.5, made=0)
    result = summary_of(start("g0.0.0"), *events, **judged(votes=2, weight=0.5))
    row = result.reward.judges["a/style"]
    assert (row.graded, row.known, row.votes) == (len(events), 1, 2)
    assert row.spread == pytest.approx(spread, abs=1e-4)
    assert row.agreement == (None if agreement is None else pytest.approx(agreement, abs=1e-4))


def test_a_price_that_nothing_reads_is_refused() -> None:
    with pytest.raises(
        JobError, match=r"^rewards\.call_cost: has an effect only with a url: local workers and the engines of a judge"
    ):
        build_job({**RAW, "rewards": {"call_cost": 1.0}})


def test_in_a_run_all_of_the_engines_cost_is_accounted_for() -> None:
    """Spare members are aborted all the time; what the engines were reserved for is used, or idle."""
    raw = {**RAW, "rollout": {"groups_per_step": 4, "spare_members": 4}, "train": {"steps": 6}}
    cost = simulate(build_job(raw), None).summary.cost
    assert cost.wasted > 0.1 * cost.pools["fast"]
    parts = cost.tasks["a"].used + cost.evaluation + cost.under_way + cost.idle
    assert parts == pytest.approx(cost.pools["fast"], rel=0.02)

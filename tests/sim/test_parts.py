"""The simulated parts: dice, links and the store, rewards, faults."""

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable

import pytest

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import RewardSettings, Spread
from rollart.config.sim import FAULT_KINDS, ChaosSettings, FaultSettings, SimRewardSettings, SimTaskSettings
from rollart.errors import RewardError, WeightError
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.events.schema import Event
from rollart.launch.simulation import simulate
from rollart.sim.clock import VirtualLoop
from rollart.sim.dice import Dice
from rollart.sim.faults import Faults, Work, draw_plan
from rollart.sim.links import SLOW, SimLink, SimStore, digest_of
from rollart.sim.rewards import SimRewards
from rollart.types import Bucket, Status, Task, Trajectory, TrajectoryId, WeightManifest


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def awaited() -> None:
        await work()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(awaited())


def now() -> float:
    return asyncio.get_running_loop().time()


# --- dice -----------------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_name_and_on_nothing_else() -> None:
    once = Dice(7)
    first = [once.uniform(f"x{number}") for number in range(5)]
    again = Dice(7)
    assert [again.uniform(f"x{number}") for number in reversed(range(5))] == list(reversed(first))
    assert Dice(8).uniform("x0") != first[0]
    assert len(set(first)) == 5


def test_the_numbers_drawn_are_pinned() -> None:
    """Another hash or another formula would change every simulated run ever published."""
    assert (Dice(0).uniform("a"), Dice(1).uniform("g0.0.0/answer")) == (0.5095025705900529, 0.7163796039312756)


@pytest.mark.parametrize(
    ("spread", "mean", "deviation"),
    [
        (Spread(kind="constant", mean=5), 5.0, 0.0),
        (Spread(kind="normal", mean=50, sigma=5), 50.0, 5.0),
        (Spread(kind="uniform", mean=10, sigma=6), 10.0, 6 / math.sqrt(3)),
        (Spread(kind="lognormal", mean=10, sigma=0.5), 10.0, 10 * math.sqrt(math.exp(0.25) - 1)),
    ],
)
def test_spreads_have_the_mean_and_the_width_they_say(spread: Spread, mean: float, deviation: float) -> None:
    drawn = [Dice(3).draw(spread, str(number)) for number in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.06)


def test_draws_are_cut_to_their_range_and_counts_are_at_least_one() -> None:
    spread = Spread(kind="normal", mean=5, sigma=10, low=3, high=6)
    drawn = [Dice(0).draw(spread, str(number)) for number in range(200)]
    assert (min(drawn), max(drawn)) == (3, 6)
    assert Dice(0).count(Spread(mean=0), "x") == 1
    assert {Dice(0).number(str(number), 3) for number in range(50)} == {0, 1, 2}


# --- links and the store --------------------------------------------------------------------------------------------


def test_a_transfer_takes_bytes_over_rate() -> None:
    assert SimLink(10.0).done_s(3.0, 50.0) == 8.0


def test_a_slow_link_keeps_its_share_and_a_cut_one_nothing_while_it_lasts() -> None:
    slow = SimLink(10.0)
    slow.disturb(2.0, 10.0, SLOW)
    assert slow.done_s(0.0, 50.0) == pytest.approx(12.0 + (50 - 20 - 10) / 10)
    cut = SimLink(10.0)
    cut.disturb(2.0, 10.0, 0.0)
    assert cut.done_s(0.0, 50.0) == pytest.approx(12.0 + 3.0)
    assert cut.done_s(20.0, 50.0) == 25.0, "and is well again"
    both = SimLink(10.0)
    both.disturb(0.0, 10.0, SLOW)
    both.disturb(5.0, 10.0, 0.0)
    assert both.done_s(0.0, 50.0) == pytest.approx(15.0 + (50 - 5) / 10)


def test_a_transfer_under_way_feels_what_happens_to_the_link() -> None:
    async def work() -> None:
        link = SimLink(10.0)
        asyncio.get_running_loop().call_later(1.0, link.disturb, 1.0, 100.0, 0.0)
        await link.transfer(50.0)
        assert now() == pytest.approx(101.0 + 4.0)

    run(work)


def manifest(version: int, count: int = 3) -> WeightManifest:
    return WeightManifest(
        version=version,
        buckets=tuple(Bucket(f"{version}/{n}", 100, digest_of(version, n)) for n in range(count)),
    )


def test_a_store_gives_back_what_was_put_and_names_what_is_lost_or_damaged() -> None:
    async def work() -> None:
        events: list[Event] = []
        log = EventLog(now)
        log.read_by(events.append)
        store = SimStore(log)
        wanted = manifest(4)
        assert store.newest() is None
        with pytest.raises(WeightError, match="bucket 0 of version 4 is not in the store"):
            store.pull_done_s(wanted, SimLink(10.0), 0.0)
        for position, bucket in enumerate(wanted.buckets):
            await asyncio.sleep(20.0)
            store.put(4, position, bucket)
        store.commit(wanted)
        assert [type(event) for event in events] == [schema.Bucket] * 3 + [schema.Manifest]
        assert store.pull_done_s(wanted, SimLink(10.0), 0.0) == (70.0, 30.0), "each as soon as it is there"
        assert store.pull_done_s(wanted, SimLink(10.0), 100.0) == (130.0, 30.0)
        assert store.read(wanted) == [4, 4, 4]
        store.damage(4, 1, lose=False)
        with pytest.raises(WeightError, match="bucket 1 of version 4 is damaged"):
            store.read(wanted)
        store.damage(4, 2, lose=True)
        with pytest.raises(WeightError, match="bucket 2 of version 4 is not in the store"):
            store.pull_done_s(wanted, SimLink(10.0), 0.0)
        store.put(5, 0, manifest(5).buckets[0])
        await store.drop_before(5)
        assert store.newest() == 5
        with pytest.raises(WeightError, match="not in the store"):
            store.read(wanted)
        store.clear()
        assert store.newest() is None

    run(work)


# --- rewards --------------------------------------------------------------------------------------------------------


def trajectory(name: str, born: int = 0) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(name, 0, 0),
        task=Task(id="a/0", domain="a", index=0),
        turns=(),
        status=Status.DONE,
        born=born,
        oldest=born,
    )


def rewards(settings: RewardSettings, **task: object) -> SimRewards:
    log = EventLog(now)
    sim = SimTaskSettings.model_validate({"reward_s": 2.0, **task})
    return SimRewards(settings, SimRewardSettings(cold_start_s=5.0, idle_s=60.0), {"a": sim}, Dice(0), Faults((), log))


SERVERLESS = RewardSettings(type="http", url="http://x", concurrency=2)


def test_a_function_starts_cold_stays_warm_and_scales_to_zero() -> None:
    async def work() -> None:
        backend = rewards(SERVERLESS)
        first = await backend.score(trajectory("g0"))
        assert (first.cold_start_s, now()) == (5.0, 7.0)
        warm = await backend.score(trajectory("g1"))
        assert (warm.cold_start_s, now()) == (0.0, 9.0)
        await asyncio.sleep(61.0)
        again = await backend.score(trajectory("g2"))
        assert again.cold_start_s == 5.0, "idle for more than a minute, it was gone"

    run(work)


def test_calls_at_once_each_start_an_instance_and_later_ones_find_them_warm() -> None:
    async def work() -> None:
        backend = rewards(SERVERLESS)
        for cold_s in (5.0, 0.0):
            scores = await asyncio.gather(*(backend.score(trajectory(f"g{number}")) for number in range(3)))
            assert [score.cold_start_s for score in scores] == [cold_s] * 3
            assert [score.busy_s for score in scores] == [2.0] * 3
        assert now() == 7.0 + 2.0

    run(work)


def test_calls_beyond_a_platform_s_quota_wait_for_an_instance() -> None:
    async def work() -> None:
        sim = SimRewardSettings(cold_start_s=5.0, idle_s=60.0, quota=2)
        tasks = {"a": SimTaskSettings(reward_s=Spread(mean=2.0))}
        backend = SimRewards(SERVERLESS, sim, tasks, Dice(0), Faults((), EventLog(now)))
        scores = await asyncio.gather(*(backend.score(trajectory(f"g{number}")) for number in range(5)))
        assert [score.cold_start_s for score in scores] == [5.0, 5.0, 0.0, 0.0, 0.0]
        assert now() == 7.0 + 2.0 + 2.0

    run(work)


def test_dedicated_workers_are_always_warm() -> None:
    async def work() -> None:
        backend = rewards(RewardSettings(workers=3))
        scores = await asyncio.gather(*(backend.score(trajectory(f"g{number}")) for number in range(3)))
        assert [score.cold_start_s for score in scores] == [0.0, 0.0, 0.0]
        assert now() == 2.0

    run(work)


def test_success_rises_with_the_weights_that_played() -> None:
    async def work() -> None:
        backend = rewards(RewardSettings(workers=500), success=0.2, success_gain=0.6, success_steps=10)

        async def mean(born: int) -> float:
            names = [f"{born}-{number}" for number in range(400)]
            scores = await asyncio.gather(*(backend.score(trajectory(name, born)) for name in names))
            return statistics.fmean(score.value for score in scores)

        assert await mean(0) == pytest.approx(0.2, abs=0.06)
        assert await mean(100) == pytest.approx(0.8, abs=0.06)

    run(work)


# --- faults ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_plan_and_another_another() -> None:
    chaos = ChaosSettings(faults=(3, 8), horizon_s=100.0, swaps=5)
    plans = [draw_plan(chaos, seed) for seed in range(200)]
    assert plans == [draw_plan(chaos, seed) for seed in range(200)]
    assert not any(fault.kind == "shard_death" for plan in plans for fault in plan), "one coordinator has none"
    plans = [draw_plan(chaos, seed, shards=True) for seed in range(200)]
    assert len(set(plans)) == 200
    assert {len(plan) for plan in plans} == {3, 4, 5, 6, 7, 8}
    assert {fault.kind for plan in plans for fault in plan} == set(FAULT_KINDS)
    for fault in (fault for plan in plans for fault in plan):
        assert (fault.at_s is None) != (fault.swap is None)
        assert fault.swap is None or 1 <= fault.swap <= 5
        assert fault.at_s is None or 0 <= fault.at_s <= 100.0


def test_a_fault_happens_at_its_time_or_in_its_swap_to_whoever_comes_next() -> None:
    async def work() -> None:
        log = EventLog(now)
        told: list[Event] = []
        log.read_by(told.append)
        plan = (
            FaultSettings(kind="env_crash", at_s=10.0, count=2),
            FaultSettings(kind="env_hang", swap=2, delay_s=3.0),
        )
        faults = Faults(plan, log)
        faults.start()
        assert faults.take("env_crash", "early") is None
        await asyncio.sleep(11.0)
        assert faults.take("env_crash", "one") is plan[0]
        assert faults.take("env_crash", "two") is plan[0]
        assert faults.take("env_crash", "three") is None
        log.emit(schema.SwapStart(version=1, serving=0))
        await asyncio.sleep(5.0)
        assert faults.take("env_hang", "x") is None
        log.emit(schema.SwapStart(version=1, serving=0))
        await asyncio.sleep(2.0)
        assert faults.take("env_hang", "x") is None
        await asyncio.sleep(2.0)
        assert faults.take("env_hang", "x") is plan[1]
        assert [event.target for event in told if isinstance(event, schema.Fault)] == ["one", "two", "x"]

    run(work)


def test_work_under_way_can_be_failed_delayed_or_hung() -> None:
    async def work() -> None:
        failed = Work("a", 5.0)
        asyncio.get_running_loop().call_later(2.0, failed.fail, RewardError("no"))
        with pytest.raises(RewardError):
            await failed.done
        assert now() == 2.0
        late = Work("b", 5.0)
        late.delay(10.0)
        await late.done
        assert now() == 17.0
        hung = Work("c", 5.0)
        hung.hang()
        hung.delay(1.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hung.done, 1000.0)
        done = Work("d", 1.0)
        await done.done
        done.fail(RewardError("too late"))

    run(work)


def outage_job(policy: str) -> Job:
    return build_job(
        {
            "name": "outage",
            "tasks": [{"name": "a", "group_size": 4}],
            "rollout": {"groups_per_step": 4},
            "pools": [{"name": "p", "hardware": "h20", "engines": {"count": 2}}, {"name": "rooms", "slots": 64}],
            "rewards": {"type": "http", "url": "http://127.0.0.1:8080", "on_outage": policy},
            "train": {"steps": 6},
            "sim": {"faults": [{"kind": "reward_outage", "at_s": 20.0, "duration_s": 60.0}]},
        }
    )


@pytest.mark.parametrize("policy", ["fail", "wait", "local"])
def test_a_platform_that_is_down_for_a_minute(policy: str) -> None:
    result = simulate(outage_job(policy))
    row = result.summary.reward
    assert (result.summary.state, result.violations) == ("finished", [])
    assert result.faults["reward_outage"][0] == 1
    assert row.outages == 1
    assert (row.given_up > 0) == (policy == "fail")
    assert (row.local > 0) == (policy == "local")


def test_local_workers_shorten_an_outage() -> None:
    waits, local = (simulate(outage_job(policy)).summary for policy in ("wait", "local"))
    assert local.time_s < waits.time_s - 20.0

"""Links that are shared, images that are pulled, a platform that other jobs use too: twice the load, twice the time."""

import asyncio
from collections.abc import Sequence

import pytest

from rollart.config.load import build_job
from rollart.config.settings import Spread
from rollart.config.sim import SimImageSettings, SimRewardSettings
from rollart.errors import JobError
from rollart.launch.simulation import simulate
from rollart.report.summary import Summary
from rollart.sim.dice import Dice
from rollart.sim.platform import Platform
from rollart.sim.traffic import SharedLink, SimImages
from tests.sim.engines import now, run


async def ended(link: SharedLink, sizes: Sequence[float]) -> list[float]:
    """When each of these transfers, begun at once, is done."""
    ends = [0.0] * len(sizes)

    async def one(number: int) -> None:
        await link.transfer(sizes[number])
        ends[number] = round(now(), 6)

    await asyncio.gather(*(one(number) for number in range(len(sizes))))
    return ends


def test_transfers_share_a_link_evenly() -> None:
    async def work() -> None:
        link = SharedLink(100.0)
        assert await ended(link, [100.0]) == [1.0]
        assert await ended(link, [100.0, 100.0]) == [3.0, 3.0], "twice the load, twice the time"
        assert await ended(link, [100.0, 200.0, 0.0]) == [5.0, 6.0, 3.0], "the longer one has it alone in the end"

    run(work)


def test_one_that_is_given_up_leaves_the_link_to_the_others() -> None:
    async def work() -> None:
        link = SharedLink(100.0)
        long = asyncio.ensure_future(link.transfer(1000.0))
        other = asyncio.ensure_future(ended(link, [200.0]))
        await asyncio.sleep(1.0)
        long.cancel()
        assert await other == [2.5], "50 bytes in the first second, then 100 in each"
        assert await ended(link, [100.0]) == [3.5]

    run(work)


def test_an_image_is_pulled_once_and_kept_while_there_is_room() -> None:
    async def work() -> None:
        images = SimImages(SimImageSettings(cache_gb=2, pull_gb_s=1))

        async def use(name: str) -> float:
            began_s = now()
            await images.take(name, 1e9)
            return round(now() - began_s, 6)

        assert list(await asyncio.gather(use("a"), use("a"))) == [1.0, 1.0], "together they wait for one pull"
        assert await use("a") == 0.0
        assert list(await asyncio.gather(use("b"), use("c"))) == [2.0, 2.0], "two pulls share the link"
        assert await use("a") == 0.0, "in use, so it stays, though there is no room for three"
        for name in ("b", "c", "a", "a", "a", "a"):
            images.leave(name)
        assert [await use(name) for name in ("a", "c")] == [0.0, 0.0]
        assert await use("b") == 1.0, "unused longest, it went"
        for name in ("a", "c", "b"):
            images.leave(name)
        assert await use("c") == 0.0, "and a went for b"
        images.leave("c")
        assert await use("d") == 1.0
        assert [await use(name) for name in ("c", "b")] == [0.0, 1.0], "c was used after b"

    run(work)


def test_a_pull_goes_on_when_the_one_who_began_it_gives_up() -> None:
    async def work() -> None:
        images = SimImages(SimImageSettings(cache_gb=2, pull_gb_s=1))
        first = asyncio.ensure_future(images.take("a", 1e9))
        await asyncio.sleep(0.5)
        second = asyncio.ensure_future(images.take("a", 1e9))
        await asyncio.sleep(0.0)
        first.cancel()
        await second
        assert now() == 1.0

    run(work)


def test_calls_of_other_jobs_take_their_part_of_the_quota() -> None:
    """Calls of 2 s, one every second of ours, on three instances: with as many of others they are all busy, and ours
    wait; a queue at 2/3 of its capacity hardly waits, one at 19/20 does."""

    def waited(others_per_s: float) -> float:
        sim = SimRewardSettings(quota=3, cold_start_s=0, others_per_s=others_per_s, others_s=Spread(mean=2.0))
        platform = Platform(sim, Dice(0), "rewards", 0.0)
        starts = [(float(at_s), platform.take(float(at_s), 2.0)[0]) for at_s in range(4000)]
        return sum(start_s - at_s for at_s, start_s in starts) / len(starts)

    assert waited(0.0) == 0.0
    assert 0.0 < waited(0.1) < waited(0.2) < 0.5
    assert waited(0.45) > 3.0
    assert waited(1.0) > 500.0, "more than it can do: ours wait longer and longer"


def test_instances_that_others_used_are_warm() -> None:
    def cold(others_per_s: float) -> int:
        sim = SimRewardSettings(quota=100, cold_start_s=1.0, idle_s=10.0, others_per_s=others_per_s)
        platform = Platform(sim, Dice(0), "rewards", 0.0)
        return sum(platform.take(60.0 * number, 1.0)[1] > 0 for number in range(1, 50))

    assert cold(0.0) == 49
    assert cold(1.0) < 10


# --- in a job -------------------------------------------------------------------------------------------------------


def played(**sim: object) -> Summary:
    """One task with short environments, whose calls are few tokens."""
    task = {"turns": 4, "answer_tokens": 8, "reset_s": 0.0, "step_s": 0.0, "reward_s": 0.01}
    settings = dict(sim)
    task |= dict(settings.pop("task", {}))  # type: ignore[call-overload]
    job = build_job(
        {
            "name": "traffic",
            "mode": "sync+",
            "tasks": [{"name": "a", "group_size": 8}],
            "rollout": {"groups_per_step": 8, "zero_variance": "keep"},
            "pools": [{"name": "gpu", "hardware": "h800", "engines": {"count": 4}}, {"name": "envs", "slots": 256}],
            "rewards": settings.pop("rewards", {}),
            "train": {"steps": 6},
            "sim": {
                "model": "qwen3-0.6b",
                "tasks": {"a": task},
                "train": {"step_s": 1.0},
                "links": {"push_gb_s": 50.0, "pull_gb_s": 50.0, **dict(settings.pop("links", {}))},  # type: ignore[call-overload]
                **settings,
            },
        }
    )
    return simulate(job).summary


def test_twice_the_traffic_takes_twice_the_time() -> None:
    """64 trajectories with four environment calls each and one reward call, over 100 MB a second."""

    def step_s(**task: float) -> float:
        return played(task=task, links={"calls_gb_s": 0.1}).step_time_s.p50

    free_s = played().step_time_s.p50
    one_s, two_s = step_s(call_mb=1.0), step_s(call_mb=2.0)
    assert one_s - free_s == pytest.approx(64 * 5 * 1.0 / 100, rel=0.1), "a reset and four steps"
    assert two_s - free_s == pytest.approx(2 * (one_s - free_s), rel=0.1)
    assert step_s(reward_mb=5.0) - free_s == pytest.approx(64 * 5.0 / 100, rel=0.1)


def test_images_that_do_not_fit_are_pulled_again_and_again() -> None:
    """Eight groups of a step, each with an image of its own of 2 GB, over 1 GB a second."""

    def reset_s(images: int, cache_gb: float) -> float:
        summary = played(task={"image_gb": 2.0, "images": images}, images={"cache_gb": cache_gb})
        return summary.step_time_s.p50 - free_s

    free_s = played().step_time_s.p50
    assert reset_s(8, 16.0) == pytest.approx(0.0, abs=0.1), "all are there after the first step"
    assert reset_s(16, 32.0) == pytest.approx(0.0, abs=0.1), "all are there after two of six steps"
    assert reset_s(16, 16.0) == pytest.approx(16.0, rel=0.1), "of sixteen that come in turn, eight are kept"


def test_other_jobs_on_the_platform_make_a_step_longer() -> None:
    rewards = {"type": "http", "url": "http://127.0.0.1:1"}

    def step_s(others_per_s: float) -> float:
        reward = {"quota": 8, "cold_start_s": 0.0, "others_per_s": others_per_s, "others_s": 1.0}
        return played(task={"reward_s": 1.0}, rewards=rewards, reward=reward).step_time_s.p50

    assert step_s(4.0) > 1.3 * step_s(0.0)


@pytest.mark.parametrize(
    ("sim", "said"),
    [
        ({"task": {"call_mb": 1.0}}, "sim.tasks.a.call_mb: .*sim.links.calls_gb_s"),
        ({"links": {"calls_gb_s": 1.0}}, "sim.links.calls_gb_s: .*call_mb"),
        ({"task": {"images": 4}}, "sim.tasks.a.images: .*image_gb"),
        ({"images": {"cache_gb": 4}}, "sim.images.cache_gb: .*image_gb"),
        ({"reward": {"others_per_s": 1.0}}, "sim.reward.others_per_s: .*quota"),
    ],
)
def test_settings_without_effect_are_refused(sim: dict[str, object], said: str) -> None:
    with pytest.raises(JobError, match=said):
        played(**sim)

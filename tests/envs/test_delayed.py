"""Latency on purpose: the draws, and that only the slowed environment waits."""

import asyncio
import statistics

import pytest

from rollart.config.settings import Spread
from rollart.envs.delayed import DelayedHost, latency_s
from rollart.sim.clock import VirtualLoop
from rollart.types import Endpoint, Observation, Program, Task, TrajectoryId

NORMAL = Spread(kind="normal", mean=10.0, sigma=3.0)


def ids(count: int) -> list[TrajectoryId]:
    return [TrajectoryId(f"g{number // 8}", number % 8, 0) for number in range(count)]


def test_a_draw_depends_on_seed_trajectory_attempt_and_step_and_on_nothing_else() -> None:
    one = TrajectoryId("g7", 3, 0)
    assert latency_s(NORMAL, 1, one, 2) == latency_s(NORMAL, 1, one, 2)
    others = [
        latency_s(NORMAL, 2, one, 2),
        latency_s(NORMAL, 1, one, 3),
        latency_s(NORMAL, 1, TrajectoryId("g7", 4, 0), 2),
        latency_s(NORMAL, 1, TrajectoryId("g7", 3, 1), 2),
    ]
    assert latency_s(NORMAL, 1, one, 2) not in others
    assert len(set(others)) == len(others)


def test_draws_are_normal_with_the_mean_and_sigma_asked_for() -> None:
    drawn = [latency_s(NORMAL, 0, trajectory, step) for trajectory in ids(800) for step in range(1, 6)]
    assert statistics.fmean(drawn) == pytest.approx(10.0, abs=0.2)
    assert statistics.pstdev(drawn) == pytest.approx(3.0, abs=0.15)
    within = [sum(abs(value - 10.0) < 3.0 * times for value in drawn) / len(drawn) for times in (1, 2)]
    assert within == pytest.approx([0.683, 0.954], abs=0.03)


def test_a_latency_is_never_negative() -> None:
    wide = Spread(kind="normal", mean=1.0, sigma=5.0)
    assert min(latency_s(wide, 0, trajectory, 1) for trajectory in ids(200)) == 0.0


class _Env:
    async def reset(self) -> Observation:
        return Observation()

    async def step(self, action: str) -> Observation:
        return Observation(done=True)

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        raise AssertionError("no program plays here")

    async def close(self) -> None:
        pass


class _Host:
    async def open(self, task: Task, trajectory: TrajectoryId) -> _Env:
        return _Env()


def test_steps_of_a_slowed_task_wait_side_by_side_and_others_not_at_all() -> None:
    async def play(host: DelayedHost, domain: str, trajectory: TrajectoryId) -> float:
        env = await host.open(Task(id=f"{domain}/0", domain=domain, index=0), trajectory)
        await env.reset()
        for _ in range(2):
            assert (await env.step("go")).done
        await env.close()
        return asyncio.get_running_loop().time()

    async def work() -> None:
        host = DelayedHost(_Host(), {"slow": NORMAL}, seed=5)
        one, two = ids(2)
        took = await asyncio.gather(play(host, "slow", one), play(host, "slow", two), play(host, "quick", one))
        own = [latency_s(NORMAL, 5, which, 1) + latency_s(NORMAL, 5, which, 2) for which in (one, two)]
        assert took == pytest.approx([*own, 0.0])

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())

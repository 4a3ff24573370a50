"""The environment contract, on the simulated host and on the wrappers of hosts; and what lockstep adds."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollart.config.settings import Spread
from rollart.config.sim import SimTaskSettings
from rollart.envs.batched import BatchedHost, BatchedRewards, Lockstep
from rollart.envs.delayed import DelayedHost
from rollart.events.log import EventLog
from rollart.ports import Env, EnvHost
from rollart.sim.dice import Dice
from rollart.sim.envs import SimHost, SimTaskSet, SimTokenizer
from rollart.sim.faults import Faults
from rollart.tasks.api import observe
from rollart.types import Message, Observation, Score, Status, Task, Trajectory, TrajectoryId
from tests.contracts.envs import EnvBench, EnvHostContract, episode, name
from tests.sim.engines import now, run


def sim_tasks(seed: int) -> SimTaskSet:
    return SimTaskSet("a", seed, Faults((), EventLog(lambda: 0.0)))


TASK = sim_tasks(0).task(3)
SETTINGS = SimTaskSettings(
    turns=Spread(kind="uniform", mean=5, sigma=3), step_s=Spread(kind="lognormal", mean=2, sigma=1)
)


def sim_host(slots: int) -> SimHost:
    return SimHost(slots, {"a": SETTINGS}, Dice(0), Faults((), EventLog(now)))


class TestSimHost(EnvHostContract):
    def make(self) -> EnvHost:
        return sim_host(3)

    def play(self, work: Callable[[EnvBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            await work(EnvBench(host=self.make(), slots=3, task=TASK))

        run(awaited)


PATIENT = {"a": (1000.0, 1000.0)}


class TestBatchedHost(TestSimHost):
    def make(self) -> EnvHost:
        return BatchedHost(sim_host(3), Lockstep(), PATIENT)


class TestDelayedHost(TestSimHost):
    def make(self) -> EnvHost:
        return DelayedHost(sim_host(3), {"a": Spread(mean=5)}, seed=0)


def test_in_lockstep_results_come_together_and_a_closed_one_is_not_waited_for() -> None:
    async def work() -> None:
        host = BatchedHost(sim_host(3), Lockstep(), PATIENT)
        envs = [await host.open(TASK, name(number)) for number in range(3)]
        times: list[float] = []

        async def play(number: int) -> None:
            await envs[number].reset()
            times.append(now())

        first = [asyncio.ensure_future(play(number)) for number in range(2)]
        await asyncio.sleep(100.0)
        assert times == [], "the third has not arrived"
        await envs[2].close()
        await asyncio.gather(*first)
        assert times == [100.0, 100.0]

    run(work)


def test_in_lockstep_a_hung_one_is_ended_by_its_own_limit() -> None:
    async def work() -> None:
        settings = SimTaskSettings(hang=1.0, turns=Spread(mean=1))
        host = BatchedHost(
            SimHost(2, {"a": settings}, Dice(0), Faults((), EventLog(now))), Lockstep(), {"a": (30.0, 30.0)}
        )
        env = await host.open(TASK, name(0))

        async def calls() -> None:
            await env.reset()
            await env.step("")

        began_s = now()
        with pytest.raises(TimeoutError):
            await calls()
        assert now() - began_s <= 31.0
        await env.close()

    run(work)


def test_in_lockstep_rewards_begin_when_no_environment_is_open() -> None:
    class Instant:
        async def score(self, trajectory: Trajectory) -> Score:
            return Score(value=1.0)

    async def work() -> None:
        lockstep = Lockstep()
        host = BatchedHost(sim_host(3), lockstep, PATIENT)
        rewards = BatchedRewards(Instant(), lockstep, timeout_s=5.0)
        trajectory = Trajectory(id=name(0), task=TASK, turns=(), status=Status.DONE, born=0, oldest=0)
        assert (await rewards.score(trajectory)).value == 1.0, "none is open"
        env = await host.open(TASK, name(0))
        asyncio.get_running_loop().call_later(50.0, lambda: asyncio.ensure_future(env.close()))
        await rewards.score(trajectory)
        assert now() == 50.0

    run(work)


def test_in_lockstep_none_plays_alone_before_the_others_have_opened_theirs() -> None:
    class Instant:
        """Environments that answer without a wait, as those in the coordinator's own process do."""

        async def open(self, task: Task, trajectory: TrajectoryId) -> Env:
            return self  # type: ignore[return-value]

        async def reset(self) -> Observation:
            return observe("go")

        async def close(self) -> None: ...

    async def work() -> None:
        lockstep = Lockstep()
        host, opened = BatchedHost(Instant(), lockstep, PATIENT), []

        async def begin(member: int) -> int:
            env = await host.open(TASK, name(member))
            opened.append(member)
            await env.reset()
            return len(opened)

        assert await asyncio.gather(*(begin(member) for member in range(4))) == [4] * 4

    run(work)


def test_a_simulated_attempt_plays_alike_whenever_it_is_played() -> None:
    async def work() -> None:
        times = []
        for _ in range(2):
            began_s = now()
            bench = EnvBench(host=sim_host(3), slots=3, task=TASK)
            times.append((await episode(bench, 1), round(now() - began_s, 9)))
        assert times[0] == times[1]

    run(work)


def test_simulated_tasks_are_endless_and_held_out_ones_are_others() -> None:
    tasks = sim_tasks(4)
    assert tasks.task(10**6) == Task(id="a/1000000", domain="a", index=10**6, seed=4)
    assert tasks.held_out(3).id != tasks.task(3).id
    tokens = SimTokenizer().render((Message(role="user", content="17"),), fresh=True)
    assert (len(tokens), SimTokenizer().decode(tokens)) == (17, "")

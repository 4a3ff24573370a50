"""What every EnvHost must do, whatever plays in it: one suite, run against each adapter.

A subclass says in `play` how to make an `EnvBench` and run a coroutine on it. (`user_envs.py` goes on from here
for hosts that run users' code.)
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollart.ports import Env, EnvHost
from rollart.types import Message, Observation, Task, TrajectoryId


@dataclass
class EnvBench:
    host: EnvHost
    """With exactly `slots` places."""
    slots: int
    task: Task
    """An environment of it ends within `most_steps` steps."""
    most_steps: int = 64


def makes_sense(observation: object) -> None:
    assert isinstance(observation, Observation)
    assert isinstance(observation.messages, tuple)
    assert all(isinstance(message, Message) for message in observation.messages)
    assert observation.reward == observation.reward


def name(number: int) -> TrajectoryId:
    return TrajectoryId(f"g{number}", 0, 0)


async def episode(bench: EnvBench, number: int) -> int:
    """Open, play to the end, close. Returns the steps."""
    env = await bench.host.open(bench.task, name(number))
    try:
        observation = await env.reset()
        makes_sense(observation)
        steps = 0
        while not (observation.done or observation.truncated):
            observation = await env.step("an action")
            makes_sense(observation)
            steps += 1
            assert steps <= bench.most_steps
        return steps
    finally:
        await env.close()


class EnvHostContract(ABC):
    @abstractmethod
    def play(self, work: Callable[[EnvBench], Awaitable[None]]) -> None: ...

    def test_an_episode_ends(self) -> None:
        async def work(bench: EnvBench) -> None:
            assert await episode(bench, 0) >= 1

        self.play(work)

    def test_more_episodes_than_slots_all_end(self) -> None:
        async def work(bench: EnvBench) -> None:
            steps = await asyncio.gather(*(episode(bench, number) for number in range(4 * bench.slots)))
            assert all(count >= 1 for count in steps)

        self.play(work)

    def test_a_slot_is_waited_for_and_free_again_when_its_environment_is_closed(self) -> None:
        async def work(bench: EnvBench) -> None:
            envs = [await bench.host.open(bench.task, name(number)) for number in range(bench.slots)]
            waiting = asyncio.ensure_future(bench.host.open(bench.task, name(99)))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await envs[0].close()
            late: Env = await waiting
            for env in (*envs[1:], late):
                await env.close()
            assert await episode(bench, 7) >= 1

        self.play(work)

    def test_closing_twice_gives_back_one_slot(self) -> None:
        async def work(bench: EnvBench) -> None:
            env = await bench.host.open(bench.task, name(0))
            await env.close()
            await env.close()
            envs = [await bench.host.open(bench.task, name(number)) for number in range(bench.slots)]
            waiting = asyncio.ensure_future(bench.host.open(bench.task, name(99)))
            await asyncio.sleep(0.05)
            assert not waiting.done(), "the second close gave a slot away that was not its own"
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            for env in envs:
                await env.close()

        self.play(work)

    def test_whoever_gives_up_waiting_takes_no_slot(self) -> None:
        async def work(bench: EnvBench) -> None:
            envs = [await bench.host.open(bench.task, name(number)) for number in range(bench.slots)]
            for number in range(3):
                waiting = asyncio.ensure_future(bench.host.open(bench.task, name(90 + number)))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            for env in envs:
                await env.close()
            await asyncio.gather(*(episode(bench, number) for number in range(bench.slots)))

        self.play(work)

    def test_one_given_up_in_the_middle_of_a_call_frees_its_slot_and_disturbs_nobody(self) -> None:
        async def work(bench: EnvBench) -> None:
            others = [asyncio.ensure_future(episode(bench, number)) for number in range(bench.slots - 1)]
            env = await bench.host.open(bench.task, name(50))
            call = asyncio.ensure_future(env.reset())
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await env.close()
            assert all(count >= 1 for count in await asyncio.gather(*others))
            await asyncio.gather(*(episode(bench, 60 + number) for number in range(bench.slots)))

        self.play(work)

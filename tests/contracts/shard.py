"""What every Shard must do: one suite, run against each adapter. What the methods that are called do is the control
plane's own; here it matters what arrives, in which order, and what a lost shard does."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import pytest

from rollart.errors import ClusterError
from rollart.events import schema
from rollart.ports import Answer, Call, Events, Shard, ShardMessage
from rollart.types import Group, Status, Task

MEMBERS = 4
BEGIN, DRAIN = 1, 2


@dataclass
class ShardBench:
    shard: Shard
    """Just started."""
    engines: list[str]
    """Its own."""
    task: Task
    """Played by `MEMBERS` members."""
    pool: str
    kill: Callable[[], None]
    """End it as a lost process ends."""
    heard: list[ShardMessage] = field(default_factory=list)

    async def tell(self, *messages: ShardMessage) -> None:
        await self.shard.tell(messages)

    async def answer(self, number: int) -> Answer:
        """Listen until this answer is there; all that is said is in `heard`."""
        while True:
            said = await self.shard.news()
            self.heard += said
            for message in said:
                if isinstance(message, Answer) and message.number == number:
                    return message

    async def begin(self) -> Answer:
        await self.tell(Call("begin", (0.0, None, 0, 0, False), BEGIN))
        return await self.answer(BEGIN)

    def play(self, group: str) -> Call:
        return Call("play", (group, self.task, [self.pool], 0, -1))

    def events(self, messages: Iterable[ShardMessage] | None = None) -> list[schema.Event]:
        among = self.heard if messages is None else messages
        return [event for message in among if isinstance(message, Events) for event in message.events]

    def told(self, method: str) -> list[Call]:
        return [message for message in self.heard if isinstance(message, Call) and message.method == method]


class ShardContract(ABC):
    @abstractmethod
    def play(self, work: Callable[[ShardBench], Awaitable[None]]) -> None: ...

    def test_it_begins_with_its_engines(self) -> None:
        async def work(bench: ShardBench) -> None:
            answer = await bench.begin()
            assert (answer.error, list(answer.value)) == ("", bench.engines)

        self.play(work)

    def test_what_it_says_comes_in_order(self) -> None:
        async def work(bench: ShardBench) -> None:
            await bench.begin()
            await bench.tell(*(bench.play(f"g{number}") for number in range(3)), Call("drain", (), DRAIN))
            answer = await bench.answer(DRAIN)
            assert answer.error == ""
            numbers = [event.n for event in bench.events()]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            done = bench.told("complete")
            assert sorted(call.arguments[0] for call in done) == ["g0", "g1", "g2"]
            for call in done:
                name, group, rewards, cause = call.arguments
                before = bench.events(bench.heard[: bench.heard.index(call)])
                ends = [event for event in before if isinstance(event, schema.End) and event.id.startswith(f"{name}.")]
                assert len(ends) >= MEMBERS
                assert cause in {event.n for event in before}
                assert isinstance(group, Group)
                assert [member.reward for member in group.members] == list(rewards)
                assert bench.heard.index(call) < bench.heard.index(answer)

        self.play(work)

    def test_what_it_is_told_comes_in_order(self) -> None:
        """A group that is stopped at once is never reported."""

        async def work(bench: ShardBench) -> None:
            await bench.begin()
            await bench.tell(bench.play("g0"), Call("stop", ("g0", Status.STALE, "too old")), Call("drain", (), DRAIN))
            await bench.answer(DRAIN)
            assert bench.told("complete") == bench.told("given_up") == []

        self.play(work)

    def test_one_that_has_nothing_to_say_says_so(self) -> None:
        """Who listens can tell that from one that hangs."""

        async def work(bench: ShardBench) -> None:
            await bench.begin()
            while said := await asyncio.wait_for(bench.shard.news(), 60.0):
                assert not any(isinstance(message, Answer) for message in said)

        self.play(work)

    def test_one_that_is_lost_is_heard_of_by_both(self) -> None:
        async def work(bench: ShardBench) -> None:
            await bench.begin()

            async def listen() -> None:
                while True:
                    await bench.shard.news()

            listening = asyncio.create_task(listen())
            await asyncio.sleep(0)
            bench.kill()
            with pytest.raises(ClusterError):
                await asyncio.wait_for(listening, 60.0)
            with pytest.raises(ClusterError):
                await bench.tell(bench.play("g0"))

        self.play(work)

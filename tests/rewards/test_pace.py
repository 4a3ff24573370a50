"""How a client of functions behaves in a burst, on the virtual clock."""

import asyncio

import pytest

from rollart.rewards.pace import FEWEST, Hedge, Places
from tests.sim.engines import run


def test_places_are_halved_when_it_is_too_much_and_grow_again() -> None:
    async def work() -> None:
        places = Places(8)
        under_way = most = 0

        async def call() -> None:
            nonlocal under_way, most
            async with places.one():
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(1.0)
                under_way -= 1

        await asyncio.gather(*(call() for _ in range(20)))
        assert most == 8
        places.too_much()
        assert places.allowed == 4
        most = 0
        await asyncio.gather(*(call() for _ in range(20)))
        assert most == 4
        for _ in range(5):
            places.went_well()
        assert places.allowed == 5, "one more for each that many good calls"
        for _ in range(10):
            places.too_much()
        assert places.allowed == 1, "never none"
        for _ in range(100):
            places.went_well()
        assert places.allowed == 8, "never more than it is given"

    run(work)


def test_a_waiter_that_is_cancelled_keeps_no_place() -> None:
    async def work() -> None:
        places = Places(1)
        held = asyncio.Event()

        async def call(until: asyncio.Event) -> None:
            async with places.one():
                await until.wait()

        first = asyncio.ensure_future(call(held))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(call(held)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        held.set()
        await asyncio.sleep(0)
        waiting[1].cancel()  # as it is given its place
        await asyncio.gather(first, *waiting, return_exceptions=True)
        async with asyncio.timeout(1), places.one():
            pass

    run(work)


async def knows_one_second() -> Hedge:
    hedge = Hedge(0.9)

    async def quick() -> None:
        await asyncio.sleep(1.0)

    assert hedge.patience_s is None
    for _ in range(FEWEST):
        await hedge.ask(quick)
    assert hedge.patience_s == pytest.approx(1.0)
    return hedge


def test_a_slow_call_is_asked_again_and_the_first_answer_counts() -> None:
    async def work() -> None:
        hedge = await knows_one_second()
        asked: list[float] = []
        ended: list[str] = []

        async def call() -> int:
            number = len(asked)
            asked.append(asyncio.get_running_loop().time())
            try:
                await asyncio.sleep(50.0 if number == 0 else 0.5)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return number

        began_s = asyncio.get_running_loop().time()
        assert await hedge.ask(call) == 1
        assert [at_s - began_s for at_s in asked] == pytest.approx([0.0, 1.0])
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1.5)
        assert ended == ["cancelled"], "the slow one is not left running"

    run(work)


def test_a_quick_call_is_asked_once_and_errors_are_told() -> None:
    async def work() -> None:
        hedge = await knows_one_second()
        asked = 0

        async def fails(after_s: float) -> None:
            nonlocal asked
            asked += 1
            await asyncio.sleep(after_s)
            raise ValueError(f"call {asked}")

        with pytest.raises(ValueError, match="call 1"):
            await hedge.ask(lambda: fails(0.5))
        assert asked == 1
        with pytest.raises(ValueError, match="call"):
            await hedge.ask(lambda: fails(2.0))
        assert asked == 3, "both were asked, and both failed"

    run(work)

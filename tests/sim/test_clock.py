"""The virtual clock: time jumps, order holds, and a deadlock is noticed at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import TypeVar

import pytest

from rollart.errors import Deadlock
from rollart.ports import BACKGROUND
from rollart.sim.clock import VirtualLoop

T = TypeVar("T")


def run(work: Callable[[VirtualLoop], Awaitable[T]]) -> T:
    async def awaited() -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return await work(loop)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(awaited())


def test_a_week_takes_no_time() -> None:
    async def work(loop: VirtualLoop) -> float:
        await asyncio.sleep(7 * 86_400.0)
        return loop.time()

    began_s = time.monotonic()
    assert run(work) == 7 * 86_400.0
    assert time.monotonic() - began_s < 1.0


def test_timers_run_in_order_of_time_and_then_of_setting() -> None:
    async def work(loop: VirtualLoop) -> list[str]:
        seen: list[str] = []
        for name, delay in (("d", 2.0), ("a", 1.0), ("e", 2.0), ("b", 1.0), ("c", 1.0)):
            loop.call_later(delay, seen.append, name)
        await asyncio.sleep(3.0)
        return seen

    assert run(work) == ["a", "b", "c", "d", "e"]


def test_what_is_ready_runs_before_the_clock_moves() -> None:
    async def work(loop: VirtualLoop) -> list[float]:
        seen: list[float] = []
        loop.call_later(5.0, lambda: loop.call_soon(lambda: seen.append(loop.time())))
        loop.call_later(6.0, lambda: seen.append(loop.time()))
        await asyncio.sleep(7.0)
        return seen

    assert run(work) == [5.0, 6.0]


def test_a_cancelled_timer_neither_runs_nor_moves_the_clock() -> None:
    async def work(loop: VirtualLoop) -> tuple[list[str], float]:
        seen: list[str] = []
        late = loop.call_later(1.0, seen.append, "cancelled by another of the same moment")
        loop.call_later(0.5, loop.call_later(0.7, seen.append, "cancelled before").cancel)
        first = loop.call_at(1.0, lambda: second.cancel())
        second: asyncio.TimerHandle = loop.call_at(1.0, seen.append, "cancelled between falling due and running")
        late.cancel()
        assert not first.cancelled()
        await asyncio.sleep(2.0)
        return seen, loop.time()

    assert run(work) == ([], 2.0)


def test_a_timer_in_the_past_runs_now() -> None:
    async def work(loop: VirtualLoop) -> list[float]:
        await asyncio.sleep(5.0)
        seen: list[float] = []
        loop.call_at(1.0, lambda: seen.append(loop.time()))
        await asyncio.sleep(1.0)
        return seen

    assert run(work) == [5.0]


async def ticks(seen: list[float]) -> None:
    while True:
        await asyncio.sleep(10.0)
        seen.append(asyncio.get_running_loop().time())


def in_background(loop: VirtualLoop, seen: list[float]) -> "asyncio.Task[None]":
    context = copy_context()
    context.run(BACKGROUND.set, True)
    return loop.create_task(ticks(seen), context=context)


def test_background_timers_run_beside_others_and_do_not_keep_the_clock_going() -> None:
    async def work(loop: VirtualLoop) -> tuple[list[float], float, bool]:
        seen: list[float] = []
        told: list[bool] = []
        task = in_background(loop, seen)
        await asyncio.sleep(35.0)
        stuck = loop.create_future()

        def deadlocked() -> None:
            told.append(True)
            stuck.set_result(None)

        loop.on_deadlock = deadlocked
        await stuck
        task.cancel()
        return seen, loop.time(), told == [True]

    assert run(work) == ([10.0, 20.0, 30.0], 35.0, True)


def test_a_deadlock_nobody_listens_to_is_an_error() -> None:
    async def work(loop: VirtualLoop) -> None:
        await loop.create_future()

    loop = VirtualLoop()
    task = loop.create_task(work(loop))
    with pytest.raises(Deadlock, match="no task can ever run again"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_the_deadlock_callback_is_called_once() -> None:
    async def work(loop: VirtualLoop) -> None:
        called: list[None] = []
        loop.on_deadlock = lambda: called.append(None)
        await loop.create_future()

    with pytest.raises(Deadlock):
        run(work)

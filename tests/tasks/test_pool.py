"""Child processes: a slot is never lost with who waited for it, nor with the child that had it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollart.workers.child import LENGTH, describe, pack, unpack
from rollart.workers.pool import Child, ChildError, ChildPool, _Link
from tests.envs.contract import DOMAIN, SOON_S, TASKS, run


@asynccontextmanager
async def pool(tmp_path: Path, *, module: str = "rollart.envs.worker") -> AsyncIterator[ChildPool]:
    """Of one child."""
    setup = {"uses": {DOMAIN: TASKS}, "seed": 0}
    made = ChildPool(module, setup, size=1, log_dir=tmp_path / "logs", name="env")
    try:
        yield made
    finally:
        await made.close()


async def soon(children: ChildPool) -> Child:
    async with asyncio.timeout(SOON_S):
        return await children.acquire()


def test_a_slot_is_not_lost_with_a_waiter_that_is_cancelled_as_it_gets_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(tmp_path) as children:
            child = await soon(children)
            waiting = asyncio.ensure_future(children.acquire())
            await asyncio.sleep(0)
            children.release(child)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            again = await soon(children)
            assert again is child, "and a healthy child is used again"
            children.release(again)

    run(work)


def test_a_slot_is_not_lost_with_a_start_that_is_cancelled(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(tmp_path) as children:
            starting = asyncio.ensure_future(children.acquire())
            while not children.pids:  # noqa: ASYNC110 - a process comes up
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            assert children.pids == [], "what was started is killed"
            children.release(await soon(children))

    run(work)


def test_a_slot_is_not_lost_with_a_child_that_cannot_start(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(tmp_path, module="rollart.no_such_module") as children:
            for _ in range(2):
                with pytest.raises(ChildError):
                    await soon(children)

    run(work)


def test_a_child_that_is_given_back_in_the_middle_of_a_call_is_not_given_out_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(tmp_path) as children:
            child = await soon(children)
            calling = asyncio.ensure_future(child.call({"op": "reset"}))
            await asyncio.sleep(0)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            children.release(child)
            other = await soon(children)
            assert other.pid != child.pid
            children.release(other)

    run(work)


def test_a_child_that_speaks_out_of_turn_is_not_listened_to_any_more(tmp_path: Path) -> None:
    class Transport(asyncio.WriteTransport):
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    transport = Transport()
    link = _Link(lambda: None)
    link.connection_made(transport)
    link.data_received(LENGTH.pack(5) + b"hello")
    assert link.closed
    assert transport.aborted


class Speechless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("error", [Speechless(), OSError("no file caf\udce9.txt")])
def test_what_user_code_raises_can_be_sent_whatever_it_says(error: Exception) -> None:
    assert type(error).__name__ in unpack(pack({"error": describe(error)})[LENGTH.size :])["error"]

"""Child processes: a slot is never lost with who waited for it, nor with the child that had it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollart.errors import ClusterError
from rollart.workers.launch import Process
from rollart.workers.pool import ProcessPool
from rollart.workers.server import failure
from rollart.workers.wire import pack, unpack
from tests.contracts.user_envs import DOMAIN, SOON_S, TASKS, run


@asynccontextmanager
async def pool(tmp_path: Path, *, target: str = "rollart.envs.worker:EnvWorker") -> AsyncIterator[ProcessPool]:
    """Of one child."""
    made = ProcessPool("env", target, {DOMAIN: TASKS}, 0, {}, size=1, log_dir=tmp_path / "logs")
    try:
        yield made
    finally:
        await made.close()


async def soon(children: ProcessPool) -> Process:
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
        async with pool(tmp_path, target="rollart.no_such_module:x") as children:
            for _ in range(2):
                with pytest.raises(ClusterError, match="no_such_module"):
                    await soon(children)

    run(work)


def test_a_child_that_is_given_back_in_the_middle_of_a_call_is_not_given_out_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(tmp_path) as children:
            child = await soon(children)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGSTOP)  # so it cannot answer in between
            calling = asyncio.ensure_future(child.ask("reset"))
            await asyncio.sleep(0)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            children.release(child)
            other = await soon(children)
            assert other.pid != child.pid
            children.release(other)

    run(work)


class Speechless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("error", [Speechless(), OSError("no file caf\udce9.txt")])
def test_what_user_code_raises_can_be_sent_whatever_it_says(error: Exception) -> None:
    kind, text = unpack(pack(failure(error)))
    assert kind == type(error).__name__
    assert kind in text

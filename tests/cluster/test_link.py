"""Many calls over one socket: answers find their callers, and when the other end goes all hear it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollart.workers.link import Link, WorkerFailed, WorkerGone
from rollart.workers.wire import LENGTH, frame, unpack

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def linked(work: Callable[[Link, Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _, link = await asyncio.get_running_loop().create_unix_connection(Link, sock=ours)
        peer = await asyncio.open_unix_connection(sock=theirs)
        async with asyncio.timeout(20):
            await work(link, peer)
        link.close()
        peer[1].close()
        await asyncio.sleep(0)

    asyncio.run(main())


async def heard(peer: Peer) -> tuple[int, str, list[Any]]:
    size = LENGTH.unpack(await peer[0].readexactly(LENGTH.size))[0]
    number, method, arguments = unpack(await peer[0].readexactly(size))
    return number, method, arguments


def test_answers_find_their_callers_in_any_order_and_in_any_pieces() -> None:
    async def work(link: Link, peer: Peer) -> None:
        calls = [asyncio.ensure_future(link.call("double", number)) for number in range(20)]
        asked = [await heard(peer) for _ in calls]
        assert [method for _, method, _ in asked] == ["double"] * 20
        said = b"".join(frame([number, True, 2 * arguments[0]]) for number, _, arguments in reversed(asked))
        for at in range(0, len(said), 7):
            peer[1].write(said[at : at + 7])
            await asyncio.sleep(0)
        assert await asyncio.gather(*calls) == [2 * number for number in range(20)]

    linked(work)


def test_an_error_reaches_its_caller_only() -> None:
    async def work(link: Link, peer: Peer) -> None:
        bad, good = (asyncio.ensure_future(link.call("x")) for _ in range(2))
        (first, *_), (second, *_) = await heard(peer), await heard(peer)
        peer[1].write(frame([first, False, ["WeightError", "bucket 3"]]) + frame([second, True, None]))
        with pytest.raises(WorkerFailed, match="bucket 3") as raised:
            await bad
        assert raised.value.kind == "WeightError"
        assert await good is None

    linked(work)


def test_a_caller_that_gave_up_is_not_missed() -> None:
    async def work(link: Link, peer: Peer) -> None:
        call = asyncio.ensure_future(link.call("x"))
        number, *_ = await heard(peer)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert link.busy, "an answer is still to come"
        peer[1].write(frame([number, True, 1]))
        after = asyncio.ensure_future(link.call("y"))
        number, *_ = await heard(peer)
        peer[1].write(frame([number, True, 3]))
        assert await after == 3

    linked(work)


def test_when_the_other_end_goes_all_hear_it_now_and_later() -> None:
    async def work(link: Link, peer: Peer) -> None:
        calls = [asyncio.ensure_future(link.call("x")) for _ in range(3)]
        await heard(peer)
        assert not link.lost.done()
        peer[1].transport.abort()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, WorkerGone)
        assert link.lost.done()
        with pytest.raises(WorkerGone):
            await link.call("x")

    linked(work)


@pytest.mark.parametrize(
    "noise",
    [
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        frame(7),
        frame([1, True]),
        frame([[1], True, None]),
        frame([1, False, "just text, and not two of them"]),
        frame([1, False, None]),
        LENGTH.pack(2**32 - 1) + b"x",
        b"a line of text\n",
        frame([99, True, "nobody asked"]),
    ],
)
def test_a_worker_that_talks_nonsense_is_given_up(noise: bytes) -> None:
    async def work(link: Link, peer: Peer) -> None:
        call = asyncio.ensure_future(link.call("x"))
        await heard(peer)
        peer[1].write(noise)
        with pytest.raises(WorkerGone):
            await call
        assert link.lost.done()

    linked(work)


def test_what_cannot_be_sent_leaves_nothing_behind() -> None:
    async def work(link: Link, peer: Peer) -> None:
        with pytest.raises(TypeError, match="may not cross"):
            await link.call("x", object())
        assert not link.busy

    linked(work)

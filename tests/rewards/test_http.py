"""The same functions behind a URL: our own server, and servers that answer badly."""

import asyncio
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rollart.config.settings import RewardSettings
from rollart.errors import JobError, RewardError
from rollart.ports import RewardBackend
from rollart.rewards import gzipped
from rollart.rewards.connections import Connections, is_loopback
from rollart.rewards.episodes import episode_of
from rollart.rewards.function import RewardService, parse_functions
from rollart.rewards.http import HttpRewards
from rollart.rewards.serve import serve
from rollart.tasks.api import Episode
from tests.contracts.reward_functions import (
    DOMAIN,
    FUNCTION,
    RewardFunctionContract,
    closing,
    decode,
    run,
    trajectory,
)

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a secret of the tests"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """`serve` in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"from rollart.rewards.serve import serve; serve({FUNCTION!r}, port={port})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROLLART_REWARD_TOKEN": TOKEN, "THREADS": "8"}
    with subprocess.Popen(
        [sys.executable, "-c", command], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    ) as server:
        address = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + 30
        while True:
            try:
                httpx.get(address, trust_env=False)
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline_s
                assert server.poll() is None
                time.sleep(0.1)
        yield address
        os.killpg(server.pid, signal.SIGKILL)


def to(url: str, *, token: str | None = None, **settings: float) -> HttpRewards:
    return HttpRewards(RewardSettings.model_validate({"type": "http", "url": url, **settings}), decode, token)


class TestHttpRewards(RewardFunctionContract):
    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    def backend(self, tmp_path: Path, timeout_s: float) -> AbstractAsyncContextManager[RewardBackend]:
        return closing(to(self.url, timeout_s=timeout_s, token=TOKEN, concurrency=4))

    def test_the_token_is_demanded(self) -> None:
        async def work() -> None:
            async with closing(to(self.url, token="wrong")) as backend:
                with pytest.raises(RewardError, match="401") as raised:
                    await backend.score(trajectory("sum"))
                assert not raised.value.retryable

        run(work)


class Server:
    """A server that always answers the same, after a while, and counts."""

    def __init__(self, answer: bytes, delay_s: float = 0.0) -> None:
        self.answer = answer
        self.answers: list[bytes] = []
        """To be given before it, one each."""
        self.delay_s = delay_s
        self.most = 0
        self.requests: list[bytes] = []
        self.url = ""
        self._now = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        self.requests.append(head + await reader.readexactly(length))
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(self.delay_s)
            self._now -= 1
            writer.write(self.answers.pop(0) if self.answers else self.answer)
            await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: bytes, delay_s: float = 0.0) -> AsyncIterator[Server]:
    server = Server(answer, delay_s)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server


def http(status: str, body: str, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n{body}".encode()


@pytest.mark.parametrize(
    ("answer", "match", "retryable"),
    [
        (http("503 Busy", "later"), "503: later", True),
        (http("429 Slow down", ""), "429", True),
        (http("500 Oops", "trace"), "500", True),
        (http("404 Not Found", "who?"), "404", False),
        (http("302 Found", "", "Location: http://127.0.0.1:1/\r\n"), "302", False),
        (http("200 OK", "<html>"), "no JSON", False),
        (http("200 OK", '{"reward": null}'), "finite", False),
        (http("200 OK", "NaN"), "finite|no JSON", False),
        (http("200 OK", '"1"'), "finite", False),
        (b"not http at all\r\n\r\n", "ProtocolError", True),
        (b"", "ProtocolError", True),
    ],
)
def test_what_is_worth_another_try(answer: bytes, match: str, retryable: bool) -> None:
    async def work() -> None:
        async with serving(answer) as server, closing(to(server.url)) as backend:
            with pytest.raises(RewardError, match=match) as raised:
                await backend.score(trajectory("sum"))
            assert raised.value.retryable == retryable

    run(work)


def test_no_server_and_no_address() -> None:
    async def work() -> None:
        async with closing(to("http://127.0.0.1:1")) as backend:
            with pytest.raises(RewardError, match="ConnectError") as raised:
                await backend.score(trajectory("sum"))
            assert raised.value.retryable
        async with closing(to("ftp://somewhere")) as backend:
            with pytest.raises(RewardError, match="ftp") as raised:
                await backend.score(trajectory("sum"))
            assert not raised.value.retryable
        async with closing(to("http://127.0.0.1:1")) as backend:
            with pytest.raises(RewardError, match="cannot be sent") as raised:
                await backend.score(trajectory("sum", what=object()))
            assert not raised.value.retryable

    run(work)


def test_calls_are_bounded_and_carry_their_key() -> None:
    async def work() -> None:
        answer = http("200 OK", '{"reward": 2, "parts": {"a": 1}}', "X-Cold-Start-Seconds: 0.5\r\n")
        async with serving(answer, 0.02) as server:
            async with closing(to(server.url, concurrency=3)) as backend:
                scores = await asyncio.gather(*(backend.score(trajectory("sum")) for _ in range(12)))
            assert server.most == 3
            assert {(score.value, score.parts["a"], score.cold_start_s) for score in scores} == {(2.0, 1.0, 0.5)}
            assert all(b"idempotency-key: g1.2.3" in request.lower() for request in server.requests)

    run(work)


def test_a_second_call_beside_a_slow_one_is_counted() -> None:
    async def work() -> None:
        async with serving(http("200 OK", "1")) as server, closing(to(server.url, hedge=0.95)) as backend:
            assert {(await backend.score(trajectory("sum"))).calls for _ in range(20)} == {1}
            server.delay_s = 1.0
            assert (await backend.score(trajectory("sum"))).calls == 2

    run(work)


def test_a_plain_number_is_a_reward() -> None:
    async def work() -> None:
        async with serving(http("200 OK", "0.5")) as server, closing(to(server.url)) as backend:
            assert (await backend.score(trajectory("sum"))).value == 0.5

    run(work)


def test_service_statuses() -> None:
    service = RewardService({DOMAIN: FUNCTION}, token="")
    episode = episode_of(trajectory("sum"), decode)
    body, elsewhere = as_body(episode), replace(episode, task=replace(episode.task, domain="elsewhere"))
    answer, status, headers = service.answer(body)
    assert (answer, status) == ({"reward": 0.75, "parts": {}}, 200)
    assert "X-Cold-Start-Seconds" in headers
    assert service.answer(body)[2] == {"Accept-Encoding": "gzip"}
    assert service.answer(b"")[1] == 400
    assert service.answer(b'{"id": "x"}')[1] == 400
    assert service.answer(as_body(elsewhere))[1] == 400
    assert service.answer(as_body(episode_of(trajectory("text"), decode)))[1] == 422
    closed = RewardService({DOMAIN: FUNCTION}, token="t")
    assert closed.answer(body, authorization="Bearer u")[1] == 401
    assert closed.answer(bomb(), coding="gzip", authorization="Bearer u")[1] == 401, "nothing is inflated for strangers"


def as_body(episode: Episode) -> bytes:
    return json.dumps(episode.to_json()).encode()


def test_names_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_functions("m:f") == {"": "m:f"}
    assert parse_functions("a=m:f, b=n.py:g") == {"a": "m:f", "b": "n.py:g"}
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org", "")] == [
        *[True] * 3,
        *[False] * 3,
    ]
    monkeypatch.delenv("ROLLART_REWARD_TOKEN", raising=False)
    with pytest.raises(JobError, match="ROLLART_REWARD_TOKEN"):
        serve(FUNCTION, host="0.0.0.0")
    with pytest.raises(JobError, match="no module"):
        serve("no.such.module:score")


def test_a_burst_is_served_by_small_pools_that_are_used_again() -> None:
    """One pool of hundreds of connections would cost the event loop seconds of CPU for each burst."""

    async def work() -> None:
        taken: set[tuple[str, int]] = set()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken.add(writer.get_extra_info("peername"))
            with suppress(asyncio.IncompleteReadError):
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    await asyncio.sleep(0.2)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        connections = Connections(url, most=40, timeout_s=30.0)
        for _ in range(2):
            answers = await asyncio.gather(*(connections.post(url) for _ in range(40)))
            assert {one.status_code for one in answers} == {200}
            assert len(taken) == 40, "the second burst finds those of the first"
        assert connections.pools == 3
        await connections.close()
        server.close()
        await asyncio.sleep(0.1)  # they see that it is closed

    run(work)


# --- compressed bodies --------------------------------------------------------------------------------------------

LONG = "a few words again and again; " * 700
"""Some 20 KB."""


@asynccontextmanager
async def relay(url: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An address that leads there, and what clients sent on each of their connections."""
    sent: list[bytes] = []
    ended: list[asyncio.Event] = []
    port = int(url.rpartition(":")[2])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int | None) -> None:
        while part := await reader.read(1 << 16):
            if number is not None:
                sent[number] += part
            writer.write(part)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(b"")
        ended.append(asyncio.Event())
        number = len(sent) - 1
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back, number), pump(there, writer, None), return_exceptions=True)
        for each in (writer, back):
            each.close()
            await each.wait_closed()
        ended[number].set()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", sent
        await asyncio.gather(*(each.wait() for each in ended))


def test_our_server_says_that_it_takes_gzip_and_gets_it(url: str) -> None:
    async def work() -> None:
        async with relay(url) as (address, sent), closing(to(address, token=TOKEN, concurrency=1)) as backend:

            async def took(kind: str, **payload: str) -> tuple[int, bool]:
                before = len(b"".join(sent))
                score = await backend.score(trajectory(kind, **payload))
                assert (score.value, score.calls) == (0.75, 1)
                new = b"".join(sent)[before:]
                return len(new), b"content-encoding: gzip" in new.lower()

            plain, gzipped_first = await took("sum", text=LONG)
            assert (plain > 20_000, gzipped_first) == (True, False), "it has not said so yet"
            small, gzipped_then = await took("sum", text=LONG)
            assert (small < 2_000, gzipped_then) == (True, True)
            assert not (await took("sum"))[1], "a short one stays as it is"
            with pytest.raises(RewardError, match="no reference answer"):
                await backend.score(trajectory("raise", text=LONG))
            assert (await took("sum", text=LONG))[1], "an error of the function says nothing about gzip"

    run(work)


TAKES = http("200 OK", "0.5", "Accept-Encoding: br, gzip;q=0.5\r\n")


@pytest.mark.parametrize("refusal", ["415 Unsupported Media Type", "400 Bad Request"])
def test_a_server_that_refuses_gzip_gets_plain_bodies_from_then_on(refusal: str) -> None:
    async def work() -> None:
        async with serving(http("200 OK", "0.5")) as server, closing(to(server.url)) as backend:
            server.answers = [TAKES, http(refusal, "what is this?"), TAKES]
            scores = [await backend.score(trajectory("sum", text=LONG)) for _ in range(4)]
            assert [score.value for score in scores] == [0.5] * 4
            assert [score.calls for score in scores] == [1, 2, 1, 1], "the refused call was one too"
            assert coded(server) == [False, True, False, False, False]

    run(work)


def test_gzip_stays_where_the_plain_body_is_refused_too() -> None:
    async def work() -> None:
        async with serving(TAKES) as server, closing(to(server.url)) as backend:
            await backend.score(trajectory("sum", text=LONG))
            server.answers = [http("400 Bad Request", "no such domain")] * 2
            with pytest.raises(RewardError, match="no such domain") as raised:
                await backend.score(trajectory("sum", text=LONG))
            assert (raised.value.retryable, raised.value.calls) == (False, 2)
            assert (await backend.score(trajectory("sum", text=LONG))).calls == 1
            assert coded(server) == [False, True, False, True]

    run(work)


def test_a_server_that_says_nothing_is_sent_nothing_that_it_may_not_know() -> None:
    async def work() -> None:
        async with serving(http("200 OK", "0.5")) as server, closing(to(server.url)) as backend:
            for _ in range(3):
                await backend.score(trajectory("sum", text=LONG))
            assert coded(server) == [False] * 3

    run(work)


def coded(server: Server) -> list[bool]:
    """Which of the requests came compressed; each is read as what it says it is."""
    found = []
    for request in server.requests:
        head, _, body = request.partition(b"\r\n\r\n")
        found.append(b"content-encoding: gzip" in head.lower())
        assert json.loads(gzip.decompress(body) if found[-1] else body)["id"] == "g1.2.3"
    return found


def bomb() -> bytes:
    """Some 150 KB that stand for more than a server takes."""
    return gzip.compress(bytes(gzipped.LARGEST_BYTES + 1), 1)


def test_a_bomb_and_other_nonsense_is_refused(url: str) -> None:
    good = gzip.compress(as_body(episode_of(trajectory("sum"), decode)))
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {TOKEN}"}) as client:

        def answered(body: bytes, coding: str = "gzip") -> tuple[int, str]:
            response = client.post(url, content=body, headers={"Content-Encoding": coding})
            assert response.headers["Accept-Encoding"] == "gzip"
            return response.status_code, response.text

        status, said = answered(bomb())
        assert (status, "33554432 bytes inflated" in said) == (413, True)
        assert answered(good, "br")[0] == 415
        assert answered(good, "gzip, gzip")[0] == 415
        assert answered(good[:-9])[0] == 400, "torn"
        assert answered(good + good)[0] == 400
        assert answered(b"{}")[0] == 400
        assert answered(good, "X-GZIP")[0] == 200

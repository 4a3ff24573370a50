"""The same functions behind a URL: our own server, and servers that answer badly."""

import asyncio
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
from rollart.rewards.connections import Connections, is_loopback
from rollart.rewards.episodes import episode_of
from rollart.rewards.function import RewardService, parse_functions
from rollart.rewards.http import HttpRewards
from rollart.rewards.serve import serve
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


def test_a_plain_number_is_a_reward() -> None:
    async def work() -> None:
        async with serving(http("200 OK", "0.5")) as server, closing(to(server.url)) as backend:
            assert (await backend.score(trajectory("sum"))).value == 0.5

    run(work)


def test_service_statuses() -> None:
    service = RewardService({DOMAIN: FUNCTION}, token="")
    episode = episode_of(trajectory("sum"), decode)
    body, elsewhere = episode.to_json(), replace(episode, task=replace(episode.task, domain="elsewhere"))
    answer, status, headers = service.answer(body, "")
    assert (answer, status) == ({"reward": 0.75, "parts": {}}, 200)
    assert "X-Cold-Start-Seconds" in headers
    assert service.answer(body, "")[2] == {}
    assert service.answer(None, "")[1] == 400
    assert service.answer({"id": "x"}, "")[1] == 400
    assert service.answer(elsewhere.to_json(), "")[1] == 400
    assert service.answer(episode_of(trajectory("text"), decode).to_json(), "")[1] == 422
    assert RewardService({DOMAIN: FUNCTION}, token="t").answer(body, "Bearer u")[1] == 401


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

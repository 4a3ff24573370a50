"""HTTP to one inference server: JSON calls and streams of JSON events, with our errors.

A connection that breaks is an EngineError: the server is lost. An answer that refuses one request is a RequestError,
and a stream with an event that cannot be read an AnswerError: its tokens would be missing without a word.
"""

import contextlib
import ipaddress
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from rollart.errors import AnswerError, EngineError, RequestError
from rollart.types import JsonObject, ParsedJson

EVENT = b"data: "
END = b"[DONE]"
REFUSALS = frozenset({400, 404, 413, 422})
"""Answers that speak of the request, not of the server."""
CLOSED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
"""How a connection ends that the server closed while it was idle."""
JSON = "application/json"
SAID_CHARS = 500
"""How much of an answer goes into an error."""
CONNECT_S = 60.0
KEEP_S = 2.0
"""An idle connection is not used again after this: servers close theirs after 5 s, perhaps just as we write to it."""


class Http:
    """Calls of one server. No time limit but for connecting: who waits decides how long."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        host = urlsplit(url).hostname or ""
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEP_S),
            trust_env=not _is_loopback(host),  # no proxy between us and ourselves
        )

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None)

    async def post(self, path: str, body: JsonObject | None = None) -> Any:
        return await self._call("POST", path, {} if body is None else body)

    async def _call(self, method: str, path: str, body: JsonObject | None) -> Any:
        async with self._answer(method, path, body) as response:
            content = await response.aread()
        self._check(path, response.status_code, content)
        if not response.headers.get("content-type", "").startswith(JSON):
            return {}  # some control calls answer in words, or not at all
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self.url}{path}: answered no JSON ({error}): {_start(content)}") from None

    async def events(self, path: str, body: JsonObject) -> AsyncGenerator[ParsedJson, None]:
        """Each event of a stream, decoded. Ends with the stream; closing this closes the connection."""
        async with self._answer("POST", path, body) as response:
            if response.status_code != 200:
                self._check(path, response.status_code, await response.aread())
            async for line in _lines(response):
                if not line.startswith(EVENT) or line == EVENT + END:
                    continue
                event = self._event(path, line[len(EVENT) :])
                if "error" in event:
                    error = event["error"]
                    code = error.get("code") if isinstance(error, dict) else None
                    raise (RequestError if code in REFUSALS else EngineError)(f"{self.url}{path}: {error}")
                yield event

    def _event(self, path: str, text: bytes) -> ParsedJson:
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise AnswerError(f"{self.url}{path}: an event is not JSON ({error}): {_start(text)}") from None
        if not isinstance(event, dict):
            raise AnswerError(f"{self.url}{path}: an event is not a JSON object: {_start(text)}")
        return event

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, body: JsonObject | None) -> AsyncGenerator[httpx.Response, None]:
        """The server's answer once it has begun. A connection that closed before that was an old one: a new one is
        tried, once."""
        response: httpx.Response | None = None
        try:
            for old in (True, False):
                request = self._client.build_request(method, path, json=body)
                try:
                    response = await self._client.send(request, stream=True)
                    break
                except CLOSED:
                    if not old:
                        raise
            assert response is not None
            yield response
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            if response is not None:
                await response.aclose()

    def _check(self, path: str, status: int, content: bytes) -> None:
        if status != 200:
            raise (RequestError if status in REFUSALS else EngineError)(
                f"{self.url}{path}: answered {status}: {_start(content)}"
            )

    async def close(self) -> None:
        await self._client.aclose()


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Ended by a newline and by nothing else: httpx's own also ends one at characters that a model may have said."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


def _start(content: bytes) -> str:
    return content.decode(errors="replace").strip()[:SAID_CHARS]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

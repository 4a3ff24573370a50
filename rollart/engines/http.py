"""HTTP to one inference server: JSON calls and streams of JSON events, with our errors.

A connection that breaks is an EngineError: the server is lost. An answer that refuses one request is a RequestError.
"""

import ipaddress
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from rollart.errors import EngineError, RequestError

EVENT = "data: "
END = "[DONE]"
REFUSALS = frozenset({400, 404, 413, 422})
"""Answers that speak of the request, not of the server."""
CONNECT_S = 10.0


class Http:
    """Calls of one server. No time limit but for connecting: who waits decides how long."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        host = urlsplit(url).hostname or ""
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=not _is_loopback(host),  # no proxy between us and ourselves
        )

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._call("POST", path, {} if body is None else body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        self._check(path, response.status_code, response.content)
        return _json(response.content)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Each event of a stream, decoded. Ends with the stream; closing this closes the connection."""
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    self._check(path, response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith(EVENT) or line == EVENT + END:
                        continue
                    event = _json(line[len(EVENT) :].encode())
                    if "error" in event:
                        error = event["error"]
                        code = error.get("code") if isinstance(error, dict) else None
                        raise (RequestError if code in REFUSALS else EngineError)(f"{self.url}{path}: {error}")
                    yield event
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    def _check(self, path: str, status: int, content: bytes) -> None:
        if status != 200:
            said = content.decode(errors="replace").strip()[:500]
            raise (RequestError if status in REFUSALS else EngineError)(f"{self.url}{path}: answered {status}: {said}")

    async def close(self) -> None:
        await self._client.aclose()


def _json(content: bytes) -> Any:
    try:
        return orjson.loads(content) if content.strip() else {}
    except orjson.JSONDecodeError:
        return {}  # some control calls answer in words


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

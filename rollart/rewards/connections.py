"""The connections of a client of functions or judges: reused from call to call, and cheap with hundreds of them.

For each call httpx looks several times at every connection of its pool: with 512 of them a burst of 512 calls costs
the event loop some 20 s of CPU, in pools of 16 half a second. Pools are made when those that are there are full.
"""

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

KEPT_OPEN_S = 60.0
"""A connection that is not used for so long is closed: from burst to burst they stay, where the server keeps them."""
POOL = 16
"""Connections of one pool."""


@dataclass(eq=False)
class _Pool:
    client: httpx.AsyncClient
    taken: int = 0


class Connections:
    """At most `most` calls at a time to one address; more wait for a connection."""

    def __init__(self, url: str, *, most: int, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        self._most_pools = -(-most // POOL)
        self._timeout_s = timeout_s
        self._headers = headers
        self._trust_env = not is_loopback(urlsplit(url).hostname or "")  # no proxy between us and ourselves
        self._secure: ssl.SSLContext | bool = httpx.create_ssl_context() if urlsplit(url).scheme == "https" else False
        self._pools: list[_Pool] = []

    @property
    def pools(self) -> int:
        return len(self._pools)

    async def post(self, url: str, **content: Any) -> httpx.Response:
        """Raises httpx's errors."""
        pool = self._free()
        pool.taken += 1
        try:
            return await pool.client.post(url, **content)
        finally:
            pool.taken -= 1

    def _free(self) -> _Pool:
        """The first that has room: so that few stay in use, and their connections with them."""
        for pool in self._pools:
            if pool.taken < POOL:
                return pool
        if len(self._pools) >= self._most_pools:
            return min(self._pools, key=lambda pool: pool.taken)
        limits = httpx.Limits(max_connections=POOL, max_keepalive_connections=POOL, keepalive_expiry=KEPT_OPEN_S)
        client = httpx.AsyncClient(
            timeout=httpx.Timeout(self._timeout_s),
            limits=limits,
            headers=self._headers,
            trust_env=self._trust_env,
            verify=self._secure,
        )
        self._pools.append(_Pool(client))
        return self._pools[-1]

    async def close(self) -> None:
        for pool in self._pools:
            await pool.client.aclose()


def is_loopback(host: str) -> bool:
    """Whether this name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

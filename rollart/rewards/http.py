"""A RewardBackend behind any URL: one POST of an episode's JSON for each trajectory, answered with its reward.

The header `Idempotency-Key` holds the trajectory's id. Whether an error is worth another try is said in the error;
trying again is the caller's business.
"""

import asyncio
import ipaddress
from typing import Any
from urllib.parse import urlsplit

import httpx

from rollart.config.settings import RewardSettings
from rollart.errors import RewardError
from rollart.rewards.episodes import Decode, episode_of, score_from_json
from rollart.types import Score, Trajectory

COLD_START_HEADER = "X-Cold-Start-Seconds"
"""A server may say here how long it took to start the instance that gave this answer."""
LOOK_S = 5.0
"""For a connection, when we only look whether someone is there."""
WORTH_A_RETRY = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpRewards:
    """Calls the function at `rewards.url`, at most `rewards.concurrency` calls at a time."""

    def __init__(self, settings: RewardSettings, decode: Decode, token: str | None = None) -> None:
        assert settings.url is not None
        self._url = settings.url
        self._decode = decode
        self._timeout_s = settings.timeout_s
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(settings.timeout_s),
            limits=httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=not is_loopback(urlsplit(self._url).hostname or ""),  # no proxy between us and ourselves
        )

    async def score(self, trajectory: Trajectory) -> Score:
        """Raises RewardError. The time limit is for the call; waiting for one's turn does not count."""
        body = episode_of(trajectory, self._decode).to_json()
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._client.post(
                        self._url, json=body, headers={"Idempotency-Key": str(trajectory.id)}
                    )
            except (TimeoutError, httpx.TimeoutException):
                raise RewardError(f"{self._url}: no answer within {self._timeout_s:g} s") from None
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise RewardError(f"{self._url}: {error}", retryable=False) from error
            except httpx.HTTPError as error:
                raise RewardError(f"{self._url}: {type(error).__name__}: {error}") from error
            except (TypeError, ValueError) as error:  # the payload holds what JSON cannot
                raise RewardError(f"{self._url}: the episode cannot be sent: {error}", retryable=False) from error
        if response.status_code != 200:
            raise RewardError(
                f"{self._url}: answered {response.status_code}: {response.text.strip()[:500]}",
                retryable=response.status_code in WORTH_A_RETRY,
            )
        try:
            return score_from_json(_json(response), cold_start_s=_cold_start_s(response))
        except ValueError as error:
            raise RewardError(f"{self._url}: {error}", retryable=False) from error

    async def close(self) -> None:
        await self._client.aclose()


def unreachable(url: str) -> str | None:
    """Why nobody can be asked at this address, or None. Any answer will do, and a late one too."""
    try:
        trust_env = not is_loopback(urlsplit(url).hostname or "")
        with httpx.Client(timeout=LOOK_S, trust_env=trust_env) as client:
            client.head(url)
    except (httpx.ReadTimeout, httpx.RemoteProtocolError):
        return None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # urlsplit's is a ValueError
        return str(error) or type(error).__name__
    return None


def is_loopback(host: str) -> bool:
    """Whether this name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ValueError(f"answered no JSON: {response.text.strip()[:200]!r}") from error


def _cold_start_s(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get(COLD_START_HEADER, 0)))
    except ValueError:
        return 0.0

"""A RewardBackend behind any URL: one POST of an episode's JSON for each trajectory, answered with its reward.

`lambda://NAME` is an AWS Lambda function, `fc://HOST/PATH` the HTTPS trigger of Alibaba's Function Compute. The header
`Idempotency-Key` holds the trajectory's id. Large bodies are compressed where the function says that it takes that
(`gzipped.py`). Whether an error is worth another try is said in the error; trying again is the caller's business.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from rollart.config.settings import RewardSettings
from rollart.errors import JobError, RewardError
from rollart.rewards import gzipped
from rollart.rewards.aws import FAILED_HEADER, SCHEME, LambdaFunction, event_of
from rollart.rewards.connections import Connections, is_loopback
from rollart.rewards.episodes import Decode, episode_of, score_from_json
from rollart.rewards.pace import Hedge, Places
from rollart.tasks.api import Episode
from rollart.types import Score, Trajectory

COLD_START_HEADER = "X-Cold-Start-Seconds"
"""A server may say here how long it took to start the instance that gave this answer."""
LOOK_S = 5.0
"""For a connection, when we only look whether someone is there."""
TOO_MUCH = frozenset({429, 503})
"""The platform's words for more calls than it takes."""
NOBODY_THERE = frozenset({502, 503, 504})
"""What the way to a function says where the function itself said nothing."""
WORTH_A_RETRY = frozenset({408, 425, 429, 500, 502, 503, 504})
NOT_UNDERSTOOD = frozenset({400, 415})
"""What a server says to a compressed body that it does not take."""

Answered = tuple[int, str, Mapping[str, str]]
"""Status, body and headers."""


@dataclass(slots=True, eq=False)
class _Request:
    """One episode to be scored."""

    body: bytes
    key: str
    made: int = 0
    """Calls that reached somebody, beside slow ones too."""


class HttpRewards:
    """Calls the function at `rewards.url`, at most `rewards.concurrency` calls at a time, and fewer for a while after
    the platform said that it is too much."""

    def __init__(self, settings: RewardSettings, decode: Decode, token: str | None = None) -> None:
        assert settings.url is not None
        self._url = settings.url
        self._lambda = LambdaFunction(self._url) if self._url.startswith(SCHEME) else None
        self._token = token
        self._decode = decode
        self._timeout_s = settings.timeout_s
        self._places = Places(settings.concurrency)
        self._hedge = Hedge(settings.hedge) if settings.hedge is not None else None
        self._takes_gzip: bool | None = None
        """None until they say so."""
        self._connections = Connections(self._address, most=settings.concurrency, timeout_s=settings.timeout_s)

    @property
    def _address(self) -> str:
        return self._lambda.url if self._lambda is not None else https(self._url)

    async def score(self, trajectory: Trajectory) -> Score:
        """Raises RewardError. The time limit is for the call; waiting for one's turn does not count."""
        return await self.score_episode(episode_of(trajectory, self._decode))

    async def score_episode(self, episode: Episode) -> Score:
        try:
            body = json.dumps(episode.to_json(), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:  # the payload holds what JSON cannot
            text = f"{self._url}: the episode cannot be sent: {error}"
            raise RewardError(text, retryable=False, answered=False, calls=0) from error
        request = _Request(body, episode.id)
        status, text, headers = await self._asked(request)
        if status in TOO_MUCH:
            self._places.too_much()
        if status != 200:
            raise RewardError(
                f"{self._url}: answered {status}: {text.strip()[:500]}",
                retryable=status in WORTH_A_RETRY,
                answered=status not in NOBODY_THERE,
                calls=request.made,
            )
        self._places.went_well()
        try:
            score = score_from_json(_json(text), cold_start_s=_cold_start_s(headers))
        except ValueError as error:
            raise RewardError(f"{self._url}: {error}", retryable=False, calls=request.made) from error
        return replace(score, calls=request.made)

    async def _asked(self, request: _Request) -> Answered:
        """Raises RewardError where there is no answer."""
        call = partial(self._post, request)
        async with self._places.one():
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await (self._hedge.ask(call) if self._hedge else call())
            except (TimeoutError, httpx.TimeoutException):
                self._places.too_much()
                text = f"{self._url}: no answer within {self._timeout_s:g} s"
                raise RewardError(text, answered=False, calls=request.made) from None
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise RewardError(f"{self._url}: {error}", retryable=False, answered=False, calls=0) from error
            except httpx.HTTPError as error:
                text = f"{self._url}: {type(error).__name__}: {error}"
                raise RewardError(text, answered=False, calls=request.made) from error
            except ValueError as error:  # what answered is no function of ours
                raise RewardError(f"{self._url}: {error}", retryable=False, calls=request.made) from error

    async def _post(self, request: _Request) -> Answered:
        """Compressed where they take that; one that refuses it is asked again at once, and gets plain bodies from
        then on. Where the plain body is refused too, the compression was not what they minded."""
        if self._takes_gzip and gzipped.is_worth_it(request.body):
            answered = await self._send(request, gzipped.deflate(request.body), {"Content-Encoding": "gzip"})
            if answered[0] not in NOT_UNDERSTOOD:
                return answered
            answered = await self._send(request, request.body, {})
            if answered[0] not in NOT_UNDERSTOOD:
                self._takes_gzip = False
            return answered
        answered = await self._send(request, request.body, {})
        if self._takes_gzip is None and gzipped.is_accepted(answered[2].get("Accept-Encoding", "")):
            self._takes_gzip = True
        return answered

    async def _send(self, request: _Request, body: bytes, headers: Mapping[str, str]) -> Answered:
        """One call. Raises httpx's errors, and ValueError where no function of ours is there."""
        shown = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        headers = {**shown, "Idempotency-Key": request.key, **headers}
        request.made += 1
        try:
            if self._lambda is None:
                headers = {**headers, "Content-Type": "application/json"}
                response = await self._connections.post(self._address, content=body, headers=headers)
                return response.status_code, response.text, response.headers
            event = event_of(body, headers)
            response = await self._connections.post(self._address, content=event, headers=self._lambda.headers(event))
        except httpx.HTTPError as error:
            request.made -= int(is_unreached(error))
            raise
        if response.status_code != 200 or FAILED_HEADER in response.headers:
            return max(response.status_code, 500), response.text, {}
        answer = _json(response.text)
        if not isinstance(answer, dict) or not isinstance(answer.get("statusCode"), int):
            raise ValueError(f"is no function of `rollart reward build lambda`: it answered {response.text[:200]!r}")
        return answer["statusCode"], str(answer.get("body", "")), httpx.Headers(answer.get("headers") or {})

    async def close(self) -> None:
        await self._connections.close()


def unreachable(url: str) -> str | None:
    """Why nobody can be asked at this address, or None. Any answer will do, and a late one too. A Lambda function is
    not asked: that would be a call of it."""
    if url.startswith(SCHEME):
        try:
            LambdaFunction(url)
        except JobError as error:
            return str(error)
        return None
    url = https(url)
    try:
        trust_env = not is_loopback(urlsplit(url).hostname or "")
        with httpx.Client(timeout=LOOK_S, trust_env=trust_env) as client:
            client.head(url)
    except (httpx.ReadTimeout, httpx.RemoteProtocolError):
        return None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # urlsplit's is a ValueError
        return str(error) or type(error).__name__
    return None


def is_unreached(error: httpx.HTTPError) -> bool:
    """The call was not made."""
    return isinstance(error, httpx.ConnectError | httpx.PoolTimeout)


def https(url: str) -> str:
    """The address that a URL of a job stands for."""
    return f"https://{url.removeprefix('fc://')}" if url.startswith("fc://") else url


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"answered no JSON: {text.strip()[:200]!r}") from error


def _cold_start_s(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get(COLD_START_HEADER, 0)))
    except ValueError:
        return 0.0

"""A reward function as an HTTP function: `handle` speaks functions-framework's contract, here or on any cloud.

    ROLLART_REWARD_FUNCTION=my_task.py:score functions-framework --source rollart/rewards/function.py --target handle

Several functions, one for each domain: `ROLLART_REWARD_FUNCTION="maths=my_maths:score,lake=my_lake:score"`.
Where ROLLART_REWARD_TOKEN is set, callers must show it as a bearer token.
`lambda_handler` is the same for AWS Lambda, called by name or by its own URL.
Bodies may be compressed with gzip, and every answer says so.
Answers: 200 with the reward; 400 for what is not an episode, 401 without the token, 413 for what is too much when
inflated, 415 for other codings than gzip, 422 where the function returned nonsense (all: do not try again); 500 where
it raised.
"""

import base64
import hmac
import json
import os
import time
from typing import Any, TypedDict

from rollart.rewards import gzipped
from rollart.rewards.episodes import reward_to_json
from rollart.tasks.api import Episode
from rollart.tasks.load import RewardFunction, load_reward
from rollart.workers.server import describe

FUNCTION_VARIABLE = "ROLLART_REWARD_FUNCTION"
TOKEN_VARIABLE = "ROLLART_REWARD_TOKEN"

Answer = tuple[Any, int, dict[str, str]]


def parse_functions(text: str) -> dict[str, str]:
    """`module:function` for all domains (key ""), or `domain=module:function,...`."""
    if "=" not in text:
        return {"": text}
    return {domain.strip(): name.strip() for domain, _, name in (part.partition("=") for part in text.split(","))}


class RewardService:
    """The functions of one server, loaded at its start."""

    def __init__(self, functions: dict[str, str], token: str) -> None:
        began_s = time.monotonic()
        self._functions: dict[str, RewardFunction] = {domain: load_reward(name) for domain, name in functions.items()}
        self._token = token
        self._cold_start_s = time.monotonic() - began_s

    def answer(self, body: bytes, *, coding: str = "", authorization: str = "") -> Answer:
        """The reward of one episode, as (JSON, status, headers). `coding`: its Content-Encoding."""
        answer, status, headers = self._answer(body, coding, authorization)
        return answer, status, {**headers, **gzipped.ACCEPTS}

    def _answer(self, body: bytes, coding: str, authorization: str) -> Answer:
        if self._token and not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            return {"error": f"show the token of {TOKEN_VARIABLE} as a bearer token"}, 401, {}
        try:
            episode = Episode.from_json(_json(gzipped.decoded(body, coding)))
        except gzipped.UnknownCoding as error:
            return {"error": str(error)}, 415, {}
        except gzipped.TooLarge as error:
            return {"error": str(error)}, 413, {}
        except ValueError as error:
            return {"error": str(error)}, 400, {}
        function = self._functions.get(episode.task.domain) or self._functions.get("")
        if function is None:
            return {"error": f"no reward function is known for the domain {episode.task.domain}"}, 400, {}
        try:
            returned = function(episode)
        except Exception as error:  # the boundary to user code
            return {"error": describe(error)}, 500, {}
        try:
            reward = reward_to_json(returned)
        except ValueError as error:
            return {"error": str(error)}, 422, {}
        cold_start_s, self._cold_start_s = self._cold_start_s, 0.0
        return reward, 200, {"X-Cold-Start-Seconds": f"{cold_start_s:.6f}"} if cold_start_s else {}


class LambdaAnswer(TypedDict):
    """As Lambda's URLs want it."""

    statusCode: int
    headers: dict[str, str]
    body: str


services: list[RewardService] = []


def handle(request: Any) -> Answer:
    """The function that functions-framework calls with a Flask request."""
    told = request.headers
    coding, authorization = told.get("Content-Encoding", ""), told.get("Authorization", "")
    return _service().answer(request.get_data(), coding=coding, authorization=authorization)


def lambda_handler(event: Any, context: object) -> LambdaAnswer:
    """The function that AWS Lambda calls, with an event as its URLs make them."""
    headers = {str(name).lower(): str(value) for name, value in (event.get("headers") or {}).items()}
    body = str(event.get("body") or "").encode(errors="replace")
    if event.get("isBase64Encoded"):
        body = base64.b64decode(body)
    coding, authorization = headers.get("content-encoding", ""), headers.get("authorization", "")
    answer, status, said = _service().answer(body, coding=coding, authorization=authorization)
    return {
        "statusCode": status,
        "headers": {"Content-Type": "application/json", **said},
        "body": json.dumps(answer),
    }


def _json(text: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _service() -> RewardService:
    """Made at the first call, from the environment."""
    if not services:
        functions = parse_functions(os.environ[FUNCTION_VARIABLE])
        services.append(RewardService(functions, os.environ.get(TOKEN_VARIABLE, "")))
    return services[0]

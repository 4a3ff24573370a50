"""Where other jobs reach a judge of this one: OpenAI's chat completions over the engines of its pool.

Listens from the beginning; who asks before the engines are there waits for them. Ends with the job that serves it.
"""

import asyncio
import hmac
import itertools
import socket

import orjson
from aiohttp import web

from rollart.config.settings import JudgeSettings
from rollart.errors import AnswerError, EngineError, JobError, RequestError
from rollart.gateway.openai import Refusal, model, models, parsed, whole
from rollart.gateway.server import BACKLOG, JSON, MAX_BODY, as_errors
from rollart.ports import FrozenModel, Tokenizer
from rollart.types import ChatAnswer, GenerateRequest, Sampling

DEFAULT_TOKENS = 512
"""Of an answer whose length the request does not bound."""


class JudgeEndpoint:
    def __init__(
        self, judge: FrozenModel, tokenizer: Tokenizer, name: str, settings: JudgeSettings, token: str
    ) -> None:
        """`name`: of the model. Raises JobError where nothing can listen there."""
        self._judge = judge
        self._tokenizer = tokenizer
        self._name = name
        self._context_tokens = settings.context_tokens
        self._token = token
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None
        host, _, port = settings.listen.rpartition(":")
        try:
            family = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=BACKLOG)
        except OSError as error:
            raise JobError(
                f"pools.{name}.judge.listen: nothing can listen on {settings.listen} ({error.strerror or error}); give "
                "another address or port"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def close(self) -> None:
        await self._serving
        assert self._runner is not None
        await self._runner.cleanup()
        self._listener.close()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[as_errors], client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    def _must_know(self, request: web.Request) -> None:
        shown = request.headers.get("Authorization", "")
        if self._token and not hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
            raise Refusal(401, "invalid_api_key", "show the token of ROLLART_JUDGE_TOKEN as a bearer token")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._must_know(request)
        body = await request.read()
        wanted = parsed(body)
        if wanted.stream:
            raise Refusal(400, "invalid_value", "stream: a judge answers as a whole; leave it out", "stream")
        asked = wanted.request
        try:
            prompt = self._tokenizer.render(asked.messages, fresh=True)
        except JobError as error:
            raise Refusal(400, "invalid_request", str(error)) from None
        room = self._context_tokens - len(prompt)
        if room < 1:
            raise Refusal(
                400, "context_length_exceeded", f"{len(prompt)} tokens or more do not fit in {self._context_tokens}"
            )
        session = f"other-{next(self._numbers)}"
        sampling = _sampling(body, min(room, asked.max_tokens or DEFAULT_TOKENS), asked.stop)
        try:
            completion = await self._judge.generate(
                GenerateRequest(
                    id=f"{session}/0",
                    session=session,
                    domain=f"judge of {self._name}",
                    turn=0,
                    prompt=(prompt,),
                    prompt_tokens=len(prompt),
                    sampling=sampling,
                    last=True,
                )
            )
        except RequestError as error:
            raise Refusal(400, "invalid_value", str(error)) from error
        except (EngineError, AnswerError) as error:
            raise Refusal(503, "unavailable", str(error)) from error
        message = self._tokenizer.parse(completion.tokens)
        tokens = completion.tokens if asked.logprobs else ()
        pieces = tuple(self._tokenizer.decode(completion.tokens[at : at + 1]) for at in range(len(tokens)))
        answer = ChatAnswer(message=message, completion=completion, prompt_tokens=len(prompt), pieces=pieces)
        return web.Response(body=whole(answer, wanted, f"chatcmpl-{session}"), content_type=JSON)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._must_know(request)
        one = request.match_info.get("model")
        return web.Response(
            body=orjson.dumps(models(self._name) if one is None else model(self._name)), content_type=JSON
        )


def _sampling(body: bytes, max_tokens: int, stop: tuple[str, ...]) -> Sampling:
    """What is asked for of it; `parsed` leaves this to whoever trains on the answer, and nobody does here."""
    raw = orjson.loads(body)
    temperature, seed = raw.get("temperature"), raw.get("seed")
    if not (temperature is None or (isinstance(temperature, int | float) and 0 <= temperature <= 10)):
        raise Refusal(400, "invalid_value", "temperature: give a number from 0 to 10", "temperature")
    if not (seed is None or isinstance(seed, int)):
        raise Refusal(400, "invalid_value", "seed: give a whole number", "seed")
    return Sampling(
        max_tokens=max_tokens, temperature=1.0 if temperature is None else float(temperature), stop=stop, seed=seed or 0
    )

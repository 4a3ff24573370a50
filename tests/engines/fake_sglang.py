"""A server that speaks SGLang's documented protocol over real HTTP on loopback; our embedded core computes.

What it does as SGLang does: events carry all tokens so far; `pause_generation` with mode `abort` ends what runs and
lets what comes wait; `abort_request`; `update_weights_from_disk` reads a Hugging Face directory; a client that goes
away aborts its request; a key is asked for. Nothing of SGLang itself runs here.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.errors import EngineError
from rollart.model.network import packed_logprobs
from rollart.types import Completion, GenerateRequest, Sampling

STREAM_INTERVAL = 4
KEY = "a-key"
TOKEN_S = 0.001
"""Each step takes at least so long, so that there is time to interrupt an answer."""


class FakeSglang:
    def __init__(self, core: EmbeddedEngine, *, incremental: bool = False, lose_updates: bool = False) -> None:
        self.core = core
        self.incremental = incremental
        self.lose_updates = lose_updates
        """Says that it loaded new weights, and does not."""
        self.spoil: Callable[[Any, int], tuple[Any, Any]] | None = None
        """Makes of a log-probability and its token what the server sends instead."""
        self.loads: list[str] = []
        self._ended: dict[str, Completion] = {}
        self._stepped = asyncio.Condition()
        self._go = asyncio.Event()
        self._go.set()
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeSglang"]:
        calls = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/flush_cache": self._flush,
        }
        routes = [Route(path, self._guarded(call), methods=["POST"]) for path, call in calls.items()]
        routes.append(Route("/health", self._health))
        routes.append(Route("/get_server_info", self._guarded(self._info)))
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        serve = asyncio.create_task(server.serve())
        steps = asyncio.create_task(self._steps())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            steps.cancel()
            server.should_exit = server.force_exit = True
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await asyncio.gather(serve, steps, return_exceptions=True)

    def _guarded(self, call: Any) -> Any:
        async def answer(request: Request) -> Response:
            if request.headers.get("authorization") != f"Bearer {KEY}":
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            response: Response = await call(request)
            return response

        return answer

    async def _steps(self) -> None:
        while True:
            if self.core.busy:
                self._ended.update(self.core.step())
                async with self._stepped:
                    self._stepped.notify_all()
            await asyncio.sleep(TOKEN_S)

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _info(self, request: Request) -> Response:
        return JSONResponse({"context_length": self.core.max_context})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if body.get("logprob_start_len") == 0:
            return JSONResponse(self._score(body["input_ids"]))
        await self._go.wait()
        parameters = body["sampling_params"]
        tokens = np.array(body["input_ids"], dtype=np.int32)
        asked = GenerateRequest(
            id=body["rid"],
            session=body["rid"],
            domain="",
            turn=0,
            prompt=(tokens,),
            prompt_tokens=len(tokens),
            sampling=Sampling(
                max_tokens=parameters["max_new_tokens"],
                temperature=parameters["temperature"],
                top_p=parameters["top_p"],
                top_k=max(parameters["top_k"], 0),
                seed=parameters.get("sampling_seed"),
            ),
            last=True,
        )
        try:
            self.core.add(asked)
        except EngineError as error:
            return JSONResponse({"error": {"message": str(error), "code": 400}}, status_code=400)
        return StreamingResponse(self._events(asked.id, len(tokens)), media_type="text/event-stream")

    async def _events(self, rid: str, prompt_tokens: int) -> AsyncIterator[str]:
        sent = 0
        try:
            while True:
                async with self._stepped:
                    while rid not in self._ended and self._count(rid) < sent + STREAM_INTERVAL:
                        await self._stepped.wait()
                done = self._ended.get(rid)
                if done is not None:
                    tokens, logprobs = done.tokens.tolist(), done.logprobs.tolist()
                else:
                    live = self.core.live[rid]
                    tokens, logprobs = live.sampled().tolist(), list(live.logprobs)
                rows: list[list[Any]] = [
                    [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
                ]
                if self.spoil is not None:
                    rows = [[*self.spoil(logprob, token), None] for logprob, token, _ in rows]
                meta: dict[str, Any] = {
                    "id": rid,
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": len(tokens),
                    "cached_tokens": 0,
                    "output_token_logprobs": rows[sent:] if self.incremental else rows,
                    "finish_reason": None if done is None else {"type": done.finish.value},
                }
                sent = len(tokens)
                yield f"data: {json.dumps({'text': '', 'output_ids': tokens, 'meta_info': meta})}\n\n"
                if done is not None:
                    yield "data: [DONE]\n\n"
                    return
        finally:
            self.core.abort(rid)
            self._ended.pop(rid, None)

    def _count(self, rid: str) -> int:
        live = self.core.live.get(rid)
        return 0 if live is None else len(live.logprobs)

    def _score(self, tokens: list[int]) -> dict[str, Any]:
        with torch.no_grad():
            logprobs = packed_logprobs(self.core.model, torch.tensor(tokens), [len(tokens)]).tolist()
        rows = [
            [None if at == 0 else logprob, token, None]
            for at, (logprob, token) in enumerate(zip(logprobs, tokens, strict=True))
        ]
        return {"meta_info": {"input_token_logprobs": rows, "finish_reason": {"type": "length"}}}

    async def _abort(self, request: Request) -> Response:
        self.core.abort((await request.json())["rid"])
        return Response()

    async def _pause(self, request: Request) -> Response:
        assert (await request.json())["mode"] == "abort"
        self._go.clear()
        for rid in list(self.core.live):
            self.core.abort(rid)
        return JSONResponse({"status": "ok", "message": "Generation paused."})

    async def _continue(self, request: Request) -> Response:
        self._go.set()
        return JSONResponse({"status": "ok", "message": "Generation continued."})

    async def _update(self, request: Request) -> Response:
        body = await request.json()
        self.loads.append(body["model_path"])
        try:
            if not self.lose_updates:
                self.core.swap(int(body["weight_version"]), _weights(Path(body["model_path"])))
        except Exception as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def _flush(self, request: Request) -> Response:
        self.core.kv.drop_parked()
        return Response()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights

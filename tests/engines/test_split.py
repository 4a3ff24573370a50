"""Prefill and decode on two servers: the configuration, and the two steps of a request over real HTTP.

The servers here only speak vLLM's protocol. No connector is run.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollart.engines.embedded.segments import Piece, Segment
from rollart.engines.http import Http
from rollart.engines.split import SplitServer, arguments, environment
from rollart.engines.vllm import VllmServer
from rollart.types import Finish, Sampling

TRANSFER = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_port": 5}
SEGMENT = Segment(id="a/0", prompt=[5, 6, 7], max_tokens=9, sampling=Sampling(), seed=4, eos=(2,), version=3)


class FakeVllm:
    def __init__(self, *, aborts: bool = False, holds: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._aborts, self._holds = aborts, holds

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task

    async def _answer(self, request: Request) -> Response:
        path, body = request.path_params["path"], await request.json()
        self.calls.append((path, body))
        if path == "reset_prefix_cache":
            return JSONResponse({"success": not self._holds})
        if path != "v1/completions":
            return JSONResponse({})
        if body.get("prompt_logprobs") is not None:
            rows = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
            return JSONResponse({"choices": [{"prompt_logprobs": rows}]})
        if not body["stream"]:
            return JSONResponse({"choices": [], "kv_transfer_params": None if self._aborts else TRANSFER})
        choice = {"token_ids": [8, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop"}
        return StreamingResponse(iter([f"data: {json.dumps({'choices': [choice]})}\n\n", "data: [DONE]\n\n"]))


async def with_pair(prefill: FakeVllm, decode: FakeVllm, work: Any) -> None:
    async with prefill.serving() as one, decode.serving() as other:
        server = SplitServer(VllmServer(Http(one, "k"), gives=True), VllmServer(Http(other, "k")))
        try:
            await work(server)
        finally:
            await server.close()


def test_the_prompt_is_computed_by_one_and_sampled_by_the_other() -> None:
    prefill, decode = FakeVllm(), FakeVllm()

    async def work(server: SplitServer) -> None:
        assert [piece async for piece in server.stream(SEGMENT)] == [Piece([8, 2], [-0.5, -0.25], Finish.STOP)]

    asyncio.run(with_pair(prefill, decode, work))
    [(_, first)], [(_, second)] = prefill.calls, decode.calls
    assert (first["max_tokens"], first["stream"], first["prompt"]) == (1, False, [5, 6, 7])
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_tokens"], second["prompt"], second["seed"]) == (9, [5, 6, 7], 4)
    assert second["kv_transfer_params"] == TRANSFER
    assert first["cache_salt"] == second["cache_salt"] == "version-3"


def test_a_prefill_cut_short_by_a_swap_reaches_no_decode() -> None:
    prefill, decode = FakeVllm(aborts=True), FakeVllm()

    async def work(server: SplitServer) -> None:
        assert [piece async for piece in server.stream(SEGMENT)] == [Piece([], [], Finish.ABORT)]

    asyncio.run(with_pair(prefill, decode, work))
    assert not decode.calls


def test_both_are_halted_loaded_and_asked_for_the_proof() -> None:
    prefill, decode = FakeVllm(holds=True), FakeVllm()

    async def work(server: SplitServer) -> None:
        await server.halt()
        await server.load(Path("/v"), 4)
        await server.resume()
        assert await server.score([5, 6]) == [[-1.0], [-1.0]]

    asyncio.run(with_pair(prefill, decode, work))
    for fake in (prefill, decode):
        assert [path for path, _ in fake.calls] == [
            *("pause", "collective_rpc", "reset_prefix_cache", "resume", "v1/completions")
        ]
        assert fake.calls[1][1] == {"method": "reload_weights", "kwargs": {"weights_path": "/v"}}


def test_each_server_has_its_devices_and_its_side_channel() -> None:
    assert arguments("NixlConnector") == [
        "--kv-transfer-config",
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
    ]
    assert environment(7001, range(2), None)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment(7001, range(2, 3), "4, 5,6")["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment(7001, range(1), None)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7001"

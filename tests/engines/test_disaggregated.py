"""Prefill and decode on servers of their own: how they are started, and the two steps of a request over real HTTP.

The servers here only speak vLLM's protocol. No connector is run.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollart.config.settings import EngineSettings, PrefillSettings
from rollart.engines.disaggregated import DisaggregatedServer
from rollart.engines.embedded.segments import Piece, Segment
from rollart.engines.http import Http
from rollart.engines.launch import ServerSettings, launch
from rollart.engines.vllm import VllmServer
from rollart.store.prefetch import FetchAhead
from rollart.types import Finish, Sampling
from tests.engines.remote import Versions

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
        if path == "collective_rpc":
            return JSONResponse({"results": [""]})
        if path != "v1/completions":
            return JSONResponse({})
        if body.get("prompt_logprobs") is not None:
            rows = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
            return JSONResponse({"choices": [{"prompt_logprobs": rows}]})
        if not body["stream"]:
            return JSONResponse({"choices": [], "kv_transfer_params": None if self._aborts else TRANSFER})
        choice = {"token_ids": [8, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop"}
        return StreamingResponse(iter([f"data: {json.dumps({'choices': [choice]})}\n\n", "data: [DONE]\n\n"]))


async def with_servers(prefill: list[FakeVllm], decode: list[FakeVllm], work: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(fake.serving()) for fake in [*prefill, *decode]]
        servers = [VllmServer(Http(url, "k"), gives=at < len(prefill)) for at, url in enumerate(urls)]
        server = DisaggregatedServer(servers[: len(prefill)], servers[len(prefill) :])
        try:
            await work(server)
        finally:
            await server.close()


def test_the_prompt_is_computed_by_one_and_sampled_by_the_other() -> None:
    prefill, decode = FakeVllm(), FakeVllm()

    async def work(server: DisaggregatedServer) -> None:
        assert [piece async for piece in server.stream(SEGMENT)] == [Piece([8, 2], [-0.5, -0.25], Finish.STOP)]

    asyncio.run(with_servers([prefill], [decode], work))
    [(_, first)], [(_, second)] = prefill.calls, decode.calls
    assert (first["max_tokens"], first["stream"], first["prompt"]) == (1, False, [5, 6, 7])
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_tokens"], second["prompt"], second["seed"]) == (9, [5, 6, 7], 4)
    assert second["kv_transfer_params"] == TRANSFER
    assert first["cache_salt"] == second["cache_salt"] == "version-3"


def test_a_prefill_cut_short_by_a_swap_reaches_no_decode() -> None:
    prefill, decode = FakeVllm(aborts=True), FakeVllm()

    async def work(server: DisaggregatedServer) -> None:
        assert [piece async for piece in server.stream(SEGMENT)] == [Piece([], [], Finish.ABORT)]

    asyncio.run(with_servers([prefill], [decode], work))
    assert not decode.calls


def test_all_are_halted_loaded_and_asked_for_the_proof() -> None:
    prefill, decode = FakeVllm(holds=True), FakeVllm()

    async def work(server: DisaggregatedServer) -> None:
        await server.stage([Path("/v/a.safetensors")], 4)
        await server.halt()
        await server.load(4)
        await server.resume()
        assert await server.score([5, 6]) == [[-1.0], [-1.0]]

    asyncio.run(with_servers([prefill], [decode], work))
    for fake in (prefill, decode):
        assert [path for path, _ in fake.calls] == [
            *("collective_rpc", "collective_rpc", "pause", "collective_rpc"),
            *("reset_prefix_cache", "resume", "v1/completions"),
        ]
        assert [fake.calls[at][1] for at in (0, 1, 3)] == [
            {"method": "rollart_stage", "kwargs": {"files": ["/v/a.safetensors"], "version": 4}},
            {"method": "rollart_staged", "kwargs": {"version": 4}},
            {"method": "rollart_load", "kwargs": {"version": 4}},
        ]


def test_a_session_stays_with_its_servers_and_sessions_are_spread() -> None:
    fakes = [FakeVllm() for _ in range(4)]

    async def work(server: DisaggregatedServer) -> None:
        for session in range(16):
            for turn in ("0", "1", "1+1"):
                segment = replace(SEGMENT, id=f"g{session}.0.0/{turn}")
                assert [piece async for piece in server.stream(segment)]
                await server.abort(segment.id)

    asyncio.run(with_servers(fakes[:2], fakes[2:], work))
    for side in (fakes[:2], fakes[2:]):
        seen = [{_session(body) for path, body in fake.calls if path == "v1/completions"} for fake in side]
        aborted = [{_session(body) for path, body in fake.calls if path == "abort_requests"} for fake in side]
        assert all(seen)
        assert not seen[0] & seen[1]
        assert aborted == seen


def _session(body: Any) -> str:
    name: str = body["request_id"] if "request_id" in body else body["request_ids"][0].removeprefix("cmpl-")
    return name.partition("/")[0]


@pytest.mark.parametrize(("visible", "devices"), [(None, ["0,1", "2,3", "4"]), ("7, 6,5,4,3", ["7,6", "5,4", "3"])])
def test_every_server_is_started_with_its_devices_and_a_side_channel(
    visible: str | None, devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two decode servers of two GPUs and one prefill server of one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "fake_vllm.py"} "$@"\n')
    python.chmod(0o755)
    versions = Versions(tmp_path)
    prefill = PrefillSettings(decoders=2, connector="MyConnector")
    settings = ServerSettings(
        engines=EngineSettings(type="vllm", gpus=2, python=str(python), prefill=prefill),
        engine_id="pool-0",
        model=versions.path,
        context_tokens=64,
        log_dir=tmp_path,
    )

    async def work() -> None:
        engine = await launch(settings, versions.store, FetchAhead(versions.store))
        await engine.close()

    asyncio.run(work())
    started = sorted(
        (json.loads(path.read_text()) for path in tmp_path.glob("[0-9]*.json")), key=lambda one: one["devices"]
    )
    assert [one["devices"] for one in started] == sorted(devices)
    assert len({one["side_port"] for one in started}) == 3
    for one in started:
        line = one["line"]
        assert line[line.index("--tensor-parallel-size") + 1] == str(len(one["devices"].split(",")))
        transfer = json.loads(line[line.index("--kv-transfer-config") + 1])
        assert transfer == {"kv_connector": "MyConnector", "kv_role": "kv_both"}
    assert sorted(path.name for path in tmp_path.glob("*.log")) == [
        f"pool-0-{name}.log" for name in ("decode-0", "decode-1", "prefill-0")
    ]

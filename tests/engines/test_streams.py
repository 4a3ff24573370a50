"""What a server streams is taken whole or not at all: no token goes missing without a word."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollart.engines.http import Http
from rollart.engines.remote import RemoteEngine, RemoteSettings
from rollart.engines.sglang import SglangServer
from rollart.engines.staged import StagedFiles
from rollart.engines.vllm import VllmServer
from rollart.errors import AnswerError, EngineError
from rollart.store.files import FileStore
from rollart.store.prefetch import FetchAhead
from rollart.types import Completion
from tests.engines.reference import request

SETTINGS: dict[str, Any] = {"engine_id": "e0", "max_context": 64, "vocab_size": 50, "eos": frozenset({2})}
DONE = "data: [DONE]"
STRANGE = "a\u2028b\x85c\x0cd"
"""Ends lines for Python's splitlines, and not in a stream of events."""


def of_vllm(tokens: list[int], finish: str | None = None, logprobs: int | None = None) -> str:
    count = len(tokens) if logprobs is None else logprobs
    choice = {
        "token_ids": tokens,
        "text": STRANGE,
        "logprobs": {"token_logprobs": [-0.5] * count},
        "finish_reason": finish,
    }
    return "data: " + json.dumps({"choices": [choice]}, ensure_ascii=False)


def counted(tokens: int) -> str:
    return "data: " + json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})


def of_sglang(tokens: list[int], total: int, finish: str | None = None) -> str:
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "completion_tokens": total,
        "finish_reason": finish and {"type": finish},
    }
    return "data: " + json.dumps({"text": STRANGE, "meta_info": meta}, ensure_ascii=False)


def generate(kind: str, lines: list[str]) -> Completion:
    """From a server that answers everything with these lines."""
    body = "".join(f"{line}\n\n" for line in lines).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + body)
        writer.close()

    async def work() -> Completion:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = Http(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", None)
        server = VllmServer(http) if kind == "vllm" else SglangServer(http)
        files = StagedFiles("e0", Path(), FileStore(Path("nothing")), FetchAhead(FileStore(Path("nothing"))))
        engine = RemoteEngine(server, RemoteSettings(**SETTINGS), files)  # type: ignore[arg-type]
        try:
            return await engine.generate(request([5, 6, 7], max_tokens=8))
        finally:
            await engine.close()
            listener.close()

    return asyncio.run(asyncio.wait_for(work(), 20))


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("vllm", [of_vllm([5, 6]), of_vllm([7], "length"), counted(3), DONE]),
        ("sglang", [of_sglang([5, 6], 2), of_sglang([7], 3, "length"), DONE]),
    ],
)
def test_a_whole_stream_is_taken_whatever_the_text_in_it(kind: str, lines: list[str]) -> None:
    got = generate(kind, lines)
    assert got.tokens.tolist() == [5, 6, 7]
    assert len(got.logprobs) == 3


@pytest.mark.parametrize(
    ("kind", "lines", "says"),
    [
        ("vllm", [of_vllm([5]), "data: {broken", of_vllm([7], "length"), counted(3)], "an event is not JSON"),
        ("vllm", [of_vllm([5]), "data: [6]", of_vllm([7], "length"), counted(3)], "an event is not a JSON object"),
        ("vllm", [of_vllm([5]), of_vllm([7], "length"), counted(3)], "counts 3 tokens and sent 2"),
        ("vllm", [of_vllm([5]), of_vllm([6, 7], "length", 1), counted(3)], "2 tokens with 1 log-probabilities"),
        ("sglang", [of_sglang([5], 1), "data: {broken", of_sglang([7], 3, "length")], "an event is not JSON"),
        ("sglang", [of_sglang([5], 1), of_sglang([7], 3, "length")], "counts 3 tokens and sent 2"),
    ],
)
def test_a_stream_that_lost_something_fails_its_request(kind: str, lines: list[str], says: str) -> None:
    """The request, and not the server: it answers others."""
    with pytest.raises(AnswerError, match=says):
        generate(kind, [*lines, DONE])


def test_a_stream_that_just_ends_loses_the_server() -> None:
    with pytest.raises(EngineError, match=r"ended request .* by itself"):
        generate("vllm", [of_vllm([5])])


def test_a_control_call_that_answers_broken_json_is_said() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n{bro")
        writer.close()

    async def work() -> None:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = Http(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", None)
        with pytest.raises(EngineError, match="/server_info: answered no JSON"):
            await http.get("/server_info")
        await http.close()
        listener.close()

    asyncio.run(asyncio.wait_for(work(), 20))

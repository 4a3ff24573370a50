"""OpenAI's own client against the gateway; what control would say is written by hand."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from rollart.errors import EnvError, JobError
from rollart.gateway import server
from rollart.gateway.openai import Refusal, parsed
from rollart.gateway.server import FOLDER, HttpDoor, HttpGateway
from rollart.types import ChatAnswer, ChatRequest, Completion, Finish, Message, Span, ToolCall, TrajectoryId
from rollart.workers import forward
from rollart.workers.forward import RELAY, Relay, forwarded

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {}}}},
    }
]


def answer(message: Message, *, finish: Finish = Finish.STOP) -> ChatAnswer:
    completion = Completion(
        tokens=np.array([7, 8], dtype=np.int32),
        logprobs=np.array([-0.25, -1.5], dtype=np.float32),
        spans=(Span(3, 2),),
        finish=finish,
        engine="e",
        cached_tokens=4,
    )
    return ChatAnswer(message=message, completion=completion, prompt_tokens=5, pieces=("wo", "rd"))


WORD = answer(Message(role="assistant", content="word", reasoning="hm"))
CALLS = answer(
    Message(
        role="assistant",
        content="",
        tool_calls=(
            ToolCall(id="call_0_0", name="add", arguments='{"a": 1}'),
            ToolCall(id="call_0_1", name="add", arguments='{"a": 2}'),
        ),
    )
)


@asynccontextmanager
async def a_door(says: ChatAnswer | None = WORD) -> AsyncIterator[tuple[HttpDoor, AsyncOpenAI, list[ChatRequest]]]:
    """A door whose requests are answered so, and a client before it."""
    gateway = HttpGateway(host="127.0.0.1", port=0, model="tiny")
    door = await gateway.open(TrajectoryId("g1", 0, 0))
    asked: list[ChatRequest] = []

    async def control() -> None:
        while True:
            call = await door.next()
            asked.append(call.request)
            if says is not None:
                call.answer(says)

    working = asyncio.create_task(control())
    try:
        async with AsyncOpenAI(base_url=door.endpoint.url, api_key=door.endpoint.key, max_retries=0) as client:
            yield door, client, asked
    finally:
        working.cancel()
        await gateway.close()


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for happens in the server
        await asyncio.sleep(0.01)


Session = Callable[[HttpDoor, AsyncOpenAI, list[ChatRequest]], Awaitable[None]]


def with_door(session: Session, says: ChatAnswer | None = WORD) -> None:
    async def main() -> None:
        async with a_door(says) as (door, client, asked):
            await session(door, client, asked)

    asyncio.run(main())


def test_a_completion_has_words_figures_and_log_probabilities() -> None:
    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        said = await client.chat.completions.create(
            model="gpt-x", messages=HELLO, max_tokens=9, stop="x", logprobs=True, temperature=0.1
        )
        assert asked == [
            ChatRequest(
                messages=(Message(role="user", content="hello"),),
                max_tokens=9,
                stop=("x",),
                logprobs=True,
                ignored=("temperature",),
            )
        ]
        choice = said.choices[0]
        assert (said.model, choice.message.content, choice.finish_reason) == ("gpt-x", "word", "stop")
        assert choice.message.model_extra == {"reasoning_content": "hm"}
        assert said.usage is not None
        assert (said.usage.prompt_tokens, said.usage.completion_tokens, said.usage.total_tokens) == (5, 2, 7)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [(one.token, one.logprob) for one in choice.logprobs.content] == [("wo", -0.25), ("rd", -1.5)]
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"

    with_door(session)


def test_tool_calls_and_what_they_gave_cross_both_ways() -> None:
    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        said = await client.chat.completions.create(model="", messages=HELLO, tools=TOOLS)
        message = said.choices[0].message
        assert said.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert message.tool_calls is not None
        got = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]  # type: ignore[union-attr]
        assert got == [("call_0_0", "add", '{"a": 1}'), ("call_0_1", "add", '{"a": 2}')]
        result: Any = {"role": "tool", "tool_call_id": "call_0_0", "content": [{"type": "text", "text": "2"}]}
        back: Any = message.model_dump(exclude_none=True)
        await client.chat.completions.create(model="", messages=[*HELLO, back, result], tools=TOOLS)
        first, second = asked
        assert first.tools == second.tools
        assert (first.tools[0].name, json.loads(first.tools[0].parameters)["type"]) == ("add", "object")
        assert first.tools[0].description == "Add."
        assert second.messages[1] == CALLS.message
        assert second.messages[2] == Message(role="tool", content="2", tool_call_id="call_0_0")

    with_door(session, CALLS)


@pytest.mark.parametrize("says", [WORD, CALLS], ids=["words", "calls"])
def test_a_stream_adds_up_to_the_same(says: ChatAnswer) -> None:
    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        content, finish, total, calls, logprobs = "", None, None, [], []
        stream = await client.chat.completions.create(
            model="", messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        async for chunk in stream:
            total = chunk.usage.total_tokens if chunk.usage else total
            for choice in chunk.choices:
                content += choice.delta.content or ""
                finish = choice.finish_reason or finish
                logprobs += [one.logprob for one in (choice.logprobs.content or [] if choice.logprobs else [])]
                for call in choice.delta.tool_calls or []:
                    assert call.function is not None
                    calls.append((call.index, call.id, call.function.name, call.function.arguments))
        message = says.message
        assert content == message.content
        assert finish == ("tool_calls" if message.tool_calls else "stop")
        assert (total, logprobs) == (7, [-0.25, -1.5])
        assert calls == [(at, one.id, one.name, one.arguments) for at, one in enumerate(message.tool_calls)]

    with_door(session, says)


def test_an_answer_that_was_cut_off_says_so() -> None:
    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        said = await client.chat.completions.create(model="", messages=HELLO)
        assert said.choices[0].finish_reason == "length"

    with_door(session, answer(Message(role="assistant", content="wor"), finish=Finish.LENGTH))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: give a list"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0]: give it one of the roles"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content: only text",
    ),
    ({"n": 2}, "n: only one choice"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs: only"),
    ({"response_format": {"type": "json_object"}}, "response_format: the model cannot be held"),
    ({"stop": [1]}, "stop: give a text"),
    ({"max_tokens": 0}, "max_tokens: 0 is no count"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]: only functions"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
        "messages[0].tool_calls[0].function.arguments: give the JSON",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9_999}}]}]},
        "messages[0].tool_calls[0].function.arguments: give the JSON",
    ),
    ({"messages": [{"role": "user", "content": ""}] * 50_001}, "messages: 50,001 are too many"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 1_001}]},
        "messages[0].tool_calls: give a list of at most 1,000",
    ),
    ({"tools": [{"function": {"name": "f"}}] * 1_001}, "tools: give a list of at most 1,000"),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"x": json.loads("[" * 500 + "]" * 500)}}}]},
        "tools[0].function.parameters: this schema is nested too deep",
    ),
]


@pytest.mark.parametrize(("change", "text"), BAD)
def test_what_cannot_be_given_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(Refusal) as caught:
        parsed(json.dumps({"messages": HELLO, **change}).encode())
    assert text in str(caught.value)
    assert caught.value.status == 400
    assert json.loads(caught.value.to_json())["error"]["param"] in text


def test_a_refusal_reaches_the_client_as_openai_would_say_it() -> None:
    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        with pytest.raises(openai.BadRequestError, match="n: only one choice") as caught:
            await client.chat.completions.create(model="", messages=HELLO, n=2)
        assert caught.value.code == "invalid_value"
        with pytest.raises(openai.NotFoundError, match="chat/completions and models"):
            await client.embeddings.create(model="", input="x")

    with_door(session)


def test_each_episode_has_its_own_key_and_it_ends_with_it() -> None:
    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        with pytest.raises(openai.AuthenticationError, match="no episode has this URL and key"):
            await client.with_options(api_key="another").chat.completions.create(model="", messages=HELLO)
        other = await door.gateway.open(TrajectoryId("g1", 1, 0))
        assert other.endpoint.url != door.endpoint.url
        assert other.endpoint.key != door.endpoint.key
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(base_url=other.endpoint.url).chat.completions.create(model="", messages=HELLO)
        door.close()
        with pytest.raises(openai.AuthenticationError, match="make the client inside"):
            await client.chat.completions.create(model="", messages=HELLO)
        assert not asked

    with_door(session)


def test_whoever_waits_when_the_episode_ends_is_told() -> None:
    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        waiting = asyncio.ensure_future(client.chat.completions.create(model="", messages=HELLO))
        await until(lambda: bool(asked))
        door.close()
        with pytest.raises(openai.AuthenticationError):
            await waiting

    with_door(session, None)


def test_a_client_that_hung_up_is_passed_over() -> None:
    async def main() -> None:
        gateway = HttpGateway(host="127.0.0.1", port=0, model="tiny")
        door = await gateway.open(TrajectoryId("g1", 0, 0))
        async with AsyncOpenAI(base_url=door.endpoint.url, api_key=door.endpoint.key, max_retries=0) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="", messages=HELLO, timeout=0.2)
            await until(lambda: not door.calls)
            asking = asyncio.ensure_future(client.chat.completions.create(model="second", messages=HELLO))
            call = await door.next()
            call.answer(WORD)
            assert (await asking).model == "second"
        await gateway.close()

    asyncio.run(main())


def test_a_flood_fills_its_own_door_and_is_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_WAITING", 4)
    monkeypatch.setattr(server, "MAX_REFUSED", 20)

    async def main() -> None:
        gateway = HttpGateway(host="127.0.0.1", port=0, model="tiny")
        flooded, quiet = [await gateway.open(TrajectoryId("g1", member, 0)) for member in range(2)]
        key = {"Authorization": f"Bearer {flooded.endpoint.key}"}
        async with httpx.AsyncClient() as http:
            url = f"{flooded.endpoint.url}/chat/completions"
            body = {"messages": HELLO}
            waiting = [asyncio.ensure_future(http.post(url, headers=key, json=body)) for _ in range(4)]
            await until(lambda: len(flooded.calls) == 4)
            refused = await asyncio.gather(*(http.post(url, headers=key, json=body) for _ in range(20)))
            assert {response.status_code for response in refused} == {429}
            for _ in range(4):
                (await flooded.next()).answer(WORD)
            with pytest.raises(EnvError, match="made 20 requests that were refused"):
                await flooded.next()
            assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}
        async with AsyncOpenAI(base_url=quiet.endpoint.url, api_key=quiet.endpoint.key) as client:
            asking = asyncio.ensure_future(client.chat.completions.create(model="", messages=HELLO))
            (await quiet.next()).answer(WORD)
            assert (await asking).choices[0].message.content == "word"
        await gateway.close()

    asyncio.run(main())


def test_connections_that_ask_nothing_make_room_for_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 20)

    async def session(door: HttpDoor, client: AsyncOpenAI) -> None:
        early = asyncio.ensure_future(client.chat.completions.create(model="early", messages=HELLO))
        await until(lambda: bool(door.calls))
        at = httpx.URL(door.endpoint.url)
        lines = [await asyncio.open_connection(at.host, at.port) for _ in range(50)]
        ends = [asyncio.ensure_future(reader.read()) for reader, _ in lines]
        await until(lambda: sum(end.done() for end in ends) >= 30)
        late = client.with_options(http_client=openai.DefaultAsyncHttpxClient())
        asking = asyncio.ensure_future(late.chat.completions.create(model="late", messages=HELLO))
        for _ in range(2):
            (await door.next()).answer(WORD)
        assert [(await one).model for one in (early, asking)] == ["early", "late"], "one under way is not closed"
        await late.close()
        for _, writer in lines:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)

    async def main() -> None:
        gateway = HttpGateway(host="127.0.0.1", port=0, model="tiny")
        door = await gateway.open(TrajectoryId("g1", 0, 0))
        async with AsyncOpenAI(base_url=door.endpoint.url, api_key=door.endpoint.key, max_retries=0) as client:
            await session(door, client)
        await gateway.close()

    asyncio.run(main())


def test_who_has_no_key_is_told_so_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REFUSED_S", 3600.0)

    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        guessing = asyncio.ensure_future(
            client.with_options(api_key="another").chat.completions.create(model="", messages=HELLO)
        )
        lost = asyncio.ensure_future(client.embeddings.create(model="", input="x"))
        await asyncio.sleep(0.05)
        assert await client.chat.completions.create(model="", messages=HELLO)
        assert not guessing.done()
        assert not lost.done()
        for one in (guessing, lost):
            one.cancel()
        await asyncio.gather(guessing, lost, return_exceptions=True)

    with_door(session)


def test_faults_of_ours_are_counted_as_a_flood_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes a page into the log."""
    monkeypatch.setattr(server, "MAX_REFUSED", 3)
    monkeypatch.setattr(server, "parsed", lambda body: 1 / 0)

    async def main() -> None:
        gateway = HttpGateway(host="127.0.0.1", port=0, model="tiny")
        door = await gateway.open(TrajectoryId("g1", 0, 0))
        async with httpx.AsyncClient(trust_env=False) as http:
            url, key = f"{door.endpoint.url}/chat/completions", {"Authorization": f"Bearer {door.endpoint.key}"}
            for _ in range(3):
                assert (await http.post(url, headers=key, json={"messages": HELLO})).status_code == 500
        with pytest.raises(EnvError, match="made 3 requests that were refused"):
            await asyncio.wait_for(door.next(), 5)
        await gateway.close()

    asyncio.run(main())


def test_on_another_machine_a_relay_leads_to_it_and_goes_with_its_process() -> None:
    """From the port inside a sandbox to the relay's socket, and from there to the server's address."""
    left = [Path(tempfile.gettempdir()) / f"{name}{2**22 + 1}-left" for name in (RELAY, FOLDER)]  # of no process
    for one in left:
        one.mkdir()
    relay = Relay()

    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        port = forwarded(relay.leading_to(door.endpoint.url))
        over = door.endpoint.url.replace(door.endpoint.url.split("/")[2], f"127.0.0.1:{port}")
        said = await client.with_options(base_url=over).chat.completions.create(model="", messages=HELLO)
        assert said.choices[0].message.content == "word"

    try:
        with_door(session)
        assert not [one for one in left if one.exists()]
    finally:
        relay.remove()
    assert not relay.path.exists()


def test_one_that_makes_many_connections_is_not_passed_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MAX_LINES", 3)

    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        port = forwarded(door.endpoint.socket)
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b"", "one too many"
        writer.close()
        for _, writer in lines:
            writer.close()
        over = client.with_options(
            base_url=door.endpoint.url.replace(door.endpoint.url.split("/")[2], f"127.0.0.1:{port}")
        )
        for _ in range(200):
            try:
                assert (await over.chat.completions.create(model="", messages=HELLO)).choices
                return
            except openai.APIConnectionError:
                await asyncio.sleep(0.05)
        raise AssertionError("there is no room again")

    with_door(session)


def test_the_same_server_is_on_a_unix_socket_and_that_on_a_port_again() -> None:
    async def session(door: HttpDoor, client: AsyncOpenAI, asked: list[ChatRequest]) -> None:
        port = forwarded(door.endpoint.socket)
        over = door.endpoint.url.replace(door.endpoint.url.split("/")[2], f"127.0.0.1:{port}")
        said = await client.with_options(base_url=over).chat.completions.create(model="", messages=HELLO)
        assert said.choices[0].message.content == "word"
        assert len(asked) == 1

    with_door(session)


def test_a_port_that_is_taken_is_an_error_that_names_the_key() -> None:
    async def main() -> None:
        one = HttpGateway(host="127.0.0.1", port=0, model="tiny")
        door = await one.open(TrajectoryId("g1", 0, 0))
        port = int(door.endpoint.url.split(":")[2].split("/")[0])
        with pytest.raises(JobError, match=f"endpoint: nothing can listen on 127.0.0.1 port {port}"):
            HttpGateway(host="127.0.0.1", port=port, model="tiny")
        await one.close()

    asyncio.run(main())

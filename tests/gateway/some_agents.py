"""Agents as people have them: they know OpenAI's client and nothing of us. And some that nobody would want."""

import contextlib
import os
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gateway.talk_tasks import LAST, SURE


def solve(question: str) -> str:
    """The conversation of talk_tasks, with the official client."""
    from openai import OpenAI

    with OpenAI() as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        for turn in range(2):
            choice = client.chat.completions.create(model="any", messages=messages).choices[0]
            messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": SURE}]
            assert turn == 0 or choice.message.content is not None
        return f"{LAST}{choice.message.content}"


def solve_in_a_box(question: str) -> str:
    """First it looks around for a network, and for other sockets."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        try:
            there.connect(("192.0.2.1", 53))
            raise AssertionError("there is a way out")
        except OSError:
            pass
    found = {place for place in os.listdir("/tmp") if not place.startswith("rollart-endpoint-")}
    code = Path(__file__).parts  # the box shows it, and so the folders above it
    assert found <= set(code[2:3] if code[1] == "tmp" else ()), found
    return solve(question)


async def solve_streaming(question: str) -> str:
    from openai import AsyncOpenAI

    async with AsyncOpenAI() as client:
        stream = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": question}], stream=True
        )
        words = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return LAST + "".join(words)


def solve_with_pydantic_ai(question: str) -> str:
    """An agent of a framework, with a tool, as its documentation has it."""
    from pydantic_ai import Agent

    agent = Agent(f"openai-chat:{os.environ['OPENAI_MODEL']}", system_prompt="Add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return LAST + agent.run_sync(question).output


def dies(question: str) -> str:
    _sign().touch()
    _post("{}")
    os._exit(3)


def raises(question: str) -> str:
    _sign().touch()
    raise KeyError("tool")


def hangs(question: str) -> str:
    _sign().touch()
    while True:
        time.sleep(60)


def floods(question: str) -> str:
    """From many threads, with nonsense, as fast as it can."""

    def flood() -> None:
        while True:
            _post('{"messages": []}')
            _sign().touch()

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(16)]
    for thread in threads:
        thread.start()
    threads[0].join()
    return ""


MOST_LINES = 900
"""A process may have 1,024 files."""


def connects(question: str) -> str:
    """As fast as it can, and never asks."""
    at = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    kept: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            line = socket.create_connection((at.hostname or "", at.port or 0), timeout=60)
            if len(kept) < MOST_LINES:
                kept.append(line)
            else:
                _sign().touch()


def bad_for(question: str) -> bool:
    return int(question.partition("+")[0]) % 2 == 1


def _half(bad: Callable[[str], str]) -> Callable[[str], str]:
    """Bad for half of the questions; for the others it waits until one of the bad has begun, and plays beside it."""

    def play(question: str) -> str:
        if bad_for(question):
            return bad(question)
        import openai  # noqa: F401

        while not _sign().exists():
            time.sleep(0.01)
        return solve(question)

    return play


half_dies, half_raises, half_hangs, half_floods, half_connects = map(_half, (dies, raises, hangs, floods, connects))


def _sign() -> Path:
    return Path(os.environ["BAD_HAS_BEGUN"])


def _post(body: str) -> None:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=body.encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    try:
        urllib.request.urlopen(request, timeout=60).read()
    except OSError:
        return

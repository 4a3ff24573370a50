"""Environments with tools: what the model is told, what its calls do, and whose fault is what."""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import pytest

import rollart.tasks.tools as tools
from rollart.errors import EnvError, JobError
from rollart.tasks.api import Said, as_observation, observe
from rollart.tasks.tools import Function, ToolEnvironment, as_function, written
from rollart.types import Observation


def add(a: int, b: float = 1.5, *, how: Literal["up", "down"] | None = None) -> float:
    """Add two numbers,
    and round.

    Args:
        a: the first
        b (float): the second,
            which may be broken
    Returns:
        their sum
    """
    return a + b


def fails() -> None:
    raise OSError("the page is away")


def breaks() -> None:
    raise EnvError("the database is gone")


def long() -> str:
    return "x" * 30_000


async def slow(text: str) -> str:
    await asyncio.sleep(0.2)
    return text


class Sums(ToolEnvironment):
    def tools(self) -> Sequence[Callable[..., Any] | Function]:
        return [add, fails, breaks, long, slow, self.remember]

    def remember(self, words: list[str]) -> dict[str, int]:
        return {"kept": len(words)}

    def start(self) -> Said | Awaitable[Said]:
        return "2 + 3?"

    def answer(self, text: str) -> Said | Awaitable[Said]:
        return observe(reward=float(text == "5"), done=True)


def done(value: Any) -> Observation:
    async def wait() -> Any:
        return await value

    return as_observation(asyncio.run(wait()) if inspect.isawaitable(value) else value)


def told(action: str) -> list[tuple[str, str, str]]:
    observation = done(Sums().step(action))
    assert not observation.done
    return [(message.role, message.tool_call_id, message.content) for message in observation.messages]


def test_a_function_is_told_by_its_types_and_docstring() -> None:
    tool = as_function(add).tool
    assert (tool.name, tool.description) == ("add", "Add two numbers, and round.")
    schema = json.loads(tool.parameters)
    assert schema["required"] == ["a"]
    assert schema["properties"]["a"] == {"type": "integer", "description": "the first"}
    assert schema["properties"]["b"]["description"] == "the second, which may be broken"
    assert schema["properties"]["how"]["anyOf"][0] == {"enum": ["up", "down"], "type": "string"}
    assert "title" not in json.dumps(schema)


def test_what_cannot_be_told_is_refused_by_name() -> None:
    def takes(*words: str) -> None: ...

    def holds(it: asyncio.Event) -> None: ...

    for function in (takes, holds):
        with pytest.raises(JobError, match=f"tool {function.__name__}: its parameters"):
            as_function(function)


def test_the_first_observation_brings_the_tools() -> None:
    observation = done(Sums().reset())
    assert [message.content for message in observation.messages] == ["2 + 3?"]
    assert [tool.name for tool in observation.tools] == ["add", "fails", "breaks", "long", "slow", "remember"]


def test_calls_are_run_and_answered_one_message_each() -> None:
    assert told(written("add", a=2, b=3) + written("remember", words=["a", "b"])) == [
        ("tool", "call_0", "5.0"),
        ("tool", "call_1", '{"kept": 2}'),
    ]
    assert told('{"name": "add", "parameters": {"a": 1}}') == [("tool", "call_0", "2.5")]


def test_calls_of_one_answer_run_at_the_same_time_where_they_can() -> None:
    began_s = time.monotonic()
    assert [text for _, _, text in told("".join(written("slow", text=str(n)) for n in range(8)))] == list("01234567")
    assert time.monotonic() - began_s < 1.0


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("<tool_call>{add(1)}</tool_call>", "error: this is not JSON: {add(1)}"),
        (written("subtract", a=1), "error: there is no tool subtract; there are add, fails"),
        (written("add", b=1), "error: a: Field required"),
        (written("add", a="x"), "error: a: Input should be a valid integer"),
        (written("add", a=1, c=1), "error: c: Extra inputs are not permitted"),
        (written("fails"), "error: OSError: the page is away"),
    ],
)
def test_a_mistake_of_the_model_is_said_to_it(action: str, text: str) -> None:
    [(role, _, content)] = told(action)
    assert role == "tool"
    assert content.startswith(text)


def test_a_tool_that_is_broken_ends_the_attempt() -> None:
    with pytest.raises(EnvError, match="the database is gone"):
        Sums().step(written("breaks"))


def test_what_is_too_long_is_cut_off() -> None:
    [(_, _, content)] = told(written("long"))
    assert content.endswith("10,000 more characters were cut off")
    assert len(content) < tools.MAX_RESULT_CHARS + 100


def test_words_without_a_call_are_the_answer() -> None:
    observation = done(Sums().step("<think>2 and 3</think>5"))
    assert (observation.reward, observation.done) == (1.0, True)

"""Environments in which the model calls tools: Python functions, and those of MCP servers (`mcp.py`).

    class Sums(ToolEnvironment):
        def __init__(self, question, result):
            self.question, self.result = question, result
        def tools(self):                    # functions; their type hints and docstrings are what the model is told
            return [add]
        def start(self):                    # the first observation
            return self.question
        def answer(self, text):             # the model spoke without a call: its answer
            return observe(reward=float(text.strip() == self.result), done=True)

A call that cannot be read, names no tool or has wrong arguments is the model's mistake: it is told so, and goes on. So
it is with a tool that raises; but one that raises EnvError ends the attempt, which is then tried again.
"""

import asyncio
import inspect
import json
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from rollart.chat import Answer, read
from rollart.errors import BoundaryError, JobError, text_of
from rollart.tasks.api import Environment, Said, as_observation
from rollart.types import Message, Observation, Tool, ToolCall

MAX_RESULT_CHARS = 20_000
"""Of what a tool returns; the rest is cut off, and the model is told."""
HOW = 'Write a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'


class Function(NamedTuple):
    """A tool, and what runs it."""

    tool: Tool
    run: Callable[[Mapping[str, object]], Any]
    """From the arguments of a call, which it checks: ValueError where they are wrong. May be awaitable."""


def as_function(function: Callable[..., Any]) -> Function:
    """A Python function as a tool. Raises JobError where its parameters have no types that JSON has."""
    import pydantic

    name = getattr(function, "__name__", type(function).__name__)
    about, described = _docstring(inspect.getdoc(function) or "")
    fields: dict[str, tuple[Any, Any]] = {}
    try:
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise TypeError(f"{parameter} cannot be given by name")
            annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (
                annotation,
                pydantic.Field(default, description=described.get(parameter.name)),
            )
        create: Callable[..., type[pydantic.BaseModel]] = pydantic.create_model  # its own type has no room for `fields`
        model = create(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        schema = _plain(model.model_json_schema())
    except (NameError, TypeError, ValueError, pydantic.PydanticUserError) as error:
        raise JobError(f"tool {name}: its parameters cannot be told to a model: {error}") from None

    def run(arguments: Mapping[str, object]) -> Any:
        try:
            checked = model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc'])) or name}: {one['msg']}" for one in error.errors()]
            raise ValueError("; ".join(wrong)) from None
        return function(**{key: getattr(checked, key) for key in fields})

    return Function(Tool(name=name, description=about, parameters=json.dumps(schema)), run)


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a function does, and what its parameters are, from a docstring in Google's style."""
    about, _, after = re.sub(r"\n(Returns|Raises|Yields|Examples?):.*", "", text, flags=re.S).partition("\nArgs:")
    described: dict[str, str] = {}
    name = ""
    for line in after.splitlines():
        if found := re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line):
            name, described[found[1]] = found[1], found[2].strip()
        elif name and line.strip():
            described[name] += f" {line.strip()}"
    return " ".join(about.split()), described


def _plain(schema: Any) -> Any:
    """Without the titles that pydantic gives everything: tokens that tell a model nothing."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _plain(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}


def written(name: str, /, **arguments: Any) -> str:
    """A call as a model would write it: for `scripted` players, and for tests."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class ToolEnvironment(Environment):
    """Tells the model of its tools, runs what it calls, and hands its answer on."""

    _functions: "dict[str, Function] | None" = None

    @abstractmethod
    def tools(self) -> Sequence[Callable[..., Any] | Function]:
        """What the model may call. Asked once."""

    @abstractmethod
    def start(self) -> Said | Awaitable[Said]:
        """The first observation."""

    @abstractmethod
    def answer(self, text: str) -> Said | Awaitable[Said]:
        """What the model's words, without a call, lead to. They may not be its last: return a string to go on."""

    def reset(self) -> Said | Awaitable[Said]:
        said = self.start()
        return self._awaited_start(said) if inspect.isawaitable(said) else self._with_tools(said)

    def step(self, action: str) -> Said | Awaitable[Said]:
        said: Answer = read(action)
        if said.wrong:
            return _told([(f"error: {said.wrong}. {HOW}", "")])
        if not said.calls:
            return self.answer(said.content)
        results = [self._run(call) for call in said.calls]
        if any(inspect.isawaitable(result) for result in results):
            return self._awaited_results(said.calls, results)
        return _told([(_text(result), call.id) for call, result in zip(said.calls, results, strict=True)])

    def _with_tools(self, said: Any) -> Observation:
        return replace(as_observation(said), tools=tuple(function.tool for function in self._known().values()))

    async def _awaited_start(self, said: Any) -> Observation:
        return self._with_tools(await said)

    async def _awaited_results(self, calls: Sequence[ToolCall], results: Sequence[Any]) -> Observation:
        """Those of one answer run at the same time."""
        texts = await asyncio.gather(*(_awaited(result) for result in results))
        return _told([(text, call.id) for call, text in zip(calls, texts, strict=True)])

    def _known(self) -> "dict[str, Function]":
        if self._functions is None:
            found = [one if isinstance(one, Function) else as_function(one) for one in self.tools()]
            self._functions = {one.tool.name: one for one in found}
        return self._functions

    def _run(self, call: ToolCall) -> Any:
        known = self._known()
        if call.name not in known:
            return f"error: there is no tool {call.name}; there are {', '.join(known) or 'none'}"
        try:
            return known[call.name].run(json.loads(call.arguments))
        except BoundaryError:
            raise
        except Exception as error:  # the boundary to the author's code: the model is told
            return _failed(error)


async def _awaited(result: Any) -> str:
    if not inspect.isawaitable(result):
        return _text(result)
    try:
        return _text(await result)
    except BoundaryError:
        raise
    except Exception as error:  # as in _run
        return _failed(error)


def _failed(error: Exception) -> str:
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"error: {name}{text_of(error)}"


def _text(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n... {len(text) - MAX_RESULT_CHARS:,} more characters were cut off"
    return text


def _told(results: Sequence[tuple[str, str]]) -> Observation:
    return Observation(
        messages=tuple(Message(role="tool", content=text, tool_call_id=call_id) for text, call_id in results)
    )

"""OpenAI's chat completions as our values and back. Pure: bytes in, values out; `server.py` moves them.

What a request may ask of the sampling is little: fewer tokens, more stops. Temperature and the like are the job's,
since it trains on what is sampled. What cannot be given (images, several choices, a forced format) is refused, with the
name of the parameter.
"""

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from rollart.types import ChatAnswer, ChatRequest, Finish, Json, JsonObject, Message, ParsedJson, Tool, ToolCall

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_STOPS = 16
MAX_MESSAGES = 50_000
"""More than fits any context. Everybody waits while they are read, and while a template renders them."""
MAX_TOOLS = 1_000
THE_JOBS = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "logit_bias")
"""Of the sampling; not taken from a request."""


class Refusal(Exception):
    """An answer that is an error, as OpenAI's clients read it."""

    def __init__(self, status: int, code: str, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param

    def to_json(self) -> bytes:
        error = {"message": str(self), "type": "invalid_request_error", "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


class ParsedRequest(NamedTuple):
    """A request, and how its answer is to look."""

    request: ChatRequest
    model: str
    stream: bool
    usage: bool
    """With the figures in a last chunk, where it streams."""


def parsed(body: bytes) -> ParsedRequest:
    """Raises Refusal that names the parameter."""
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise _wrong("messages", "the body is not an object")
    if (raw.get("n") or 1) != 1:
        raise _wrong("n", "only one choice is sampled; ask several times, or leave it out")
    if raw.get("top_logprobs"):
        raise _wrong("top_logprobs", "only the log-probability of the sampled token is known; leave it out")
    if _type_of(raw.get("response_format")) not in ("", "text"):
        raise _wrong("response_format", "the model cannot be held to a format; leave it out, or set it to text")
    tools = () if raw.get("tool_choice") == "none" else _tools(raw.get("tools"))
    request = ChatRequest(
        messages=_messages(raw.get("messages")),
        tools=tools,
        max_tokens=_max_tokens(raw),
        stop=_stops(raw.get("stop")),
        logprobs=bool(raw.get("logprobs")),
        ignored=tuple(param for param in THE_JOBS if raw.get(param) is not None),
    )
    options = raw.get("stream_options")
    usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return ParsedRequest(request, str(raw.get("model") or ""), bool(raw.get("stream")), usage)


def _wrong(param: str, text: str) -> Refusal:
    return Refusal(400, "invalid_value", f"{param}: {text}", param)


def _type_of(value: Any) -> str:
    return str(value.get("type") or "") if isinstance(value, dict) else ""


def _max_tokens(raw: ParsedJson) -> int | None:
    for param in ("max_completion_tokens", "max_tokens"):
        value = raw.get(param)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _wrong(param, f"{value!r} is no count of tokens; give 1 or more")
            return value
    return None


def _stops(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or len(found) > MAX_STOPS or not all(isinstance(one, str) and one for one in found):
        raise _wrong("stop", f"give a text, or up to {MAX_STOPS} of them")
    return tuple(found)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "give a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise _wrong("messages", f"{len(value):,} are too many; give at most {MAX_MESSAGES:,}")
    return tuple(_message(f"messages[{number}]", one) for number, one in enumerate(value))


def _message(param: str, value: Any) -> Message:
    role = ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
    if role is None:
        raise _wrong(param, f"give it one of the roles {', '.join(ROLES)}")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
        raise _wrong(f"{param}.tool_calls", f"give a list of at most {MAX_TOOLS:,}")
    return Message(
        role=role,
        content=_text(f"{param}.content", value.get("content")),
        reasoning=_text(f"{param}.reasoning_content", value.get("reasoning_content")) if role == "assistant" else "",
        tool_calls=tuple(_call(f"{param}.tool_calls[{number}]", one) for number, one in enumerate(calls)),
        tool_call_id=str(value.get("tool_call_id") or ""),
    )


def _text(param: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise _wrong(param, "only text is understood: a string, or parts of the type text")
    return "".join(part["text"] for part in parts)


def _call(param: str, value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(param, "only calls of functions are understood, each with a name")
    arguments = function.get("arguments") or "{}"
    try:
        if not isinstance(arguments, str) or not isinstance(json.loads(arguments), dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise _wrong(f"{param}.function.arguments", "give the JSON of an object, as a string") from None
    return ToolCall(id=str(value.get("id") or ""), name=function["name"], arguments=arguments)


def _tools(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise _wrong("tools", f"give a list of at most {MAX_TOOLS:,}")
    found = []
    for number, one in enumerate(value):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"tools[{number}]", "only functions are understood, each with a name")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise _wrong(f"tools[{number}].function.parameters", "give a JSON schema")
        try:
            text = orjson.dumps(parameters, option=orjson.OPT_SORT_KEYS).decode()
        except orjson.JSONEncodeError:
            raise _wrong(f"tools[{number}].function.parameters", "this schema is nested too deep") from None
        found.append(Tool(name=function["name"], description=str(function.get("description") or ""), parameters=text))
    return tuple(found)


# --- answers ----------------------------------------------------------------------------------------------------------


def whole(answer: ChatAnswer, wanted: ParsedRequest, answer_id: str) -> bytes:
    """The answer as one object."""
    message = answer.message
    said: dict[str, Json] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["content"] = message.content or None
        said["tool_calls"] = [_said_call(call) for call in message.tool_calls]
    choice = {
        "index": 0,
        "message": said,
        "finish_reason": _finish(answer),
        "logprobs": _logprobs(answer) if wanted.request.logprobs else None,
    }
    head = _head(wanted, answer_id, "chat.completion")
    return orjson.dumps({**head, "choices": [choice], "usage": _usage(answer)})


def chunks(answer: ChatAnswer, wanted: ParsedRequest, answer_id: str) -> Iterator[bytes]:
    """The answer as a stream of events. It is whole before the first is sent."""
    message = answer.message
    head = _head(wanted, answer_id, "chat.completion.chunk")
    logprobs = _logprobs(answer) if wanted.request.logprobs else None

    def chunk(delta: JsonObject, finish: str | None = None, logprobs: Json = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _event(orjson.dumps({**head, "choices": [choice]}))

    yield chunk({"role": "assistant", "content": ""}, logprobs=None if message.content else logprobs)
    if message.reasoning:
        yield chunk({"reasoning_content": message.reasoning})
    if message.content:
        yield chunk({"content": message.content}, logprobs=logprobs)
    for number, call in enumerate(message.tool_calls):
        yield chunk({"tool_calls": [{"index": number, **_said_call(call)}]})
    yield chunk({}, finish=_finish(answer))
    if wanted.usage:
        yield _event(orjson.dumps({**head, "choices": [], "usage": _usage(answer)}))
    yield _event(b"[DONE]")


def models(name: str) -> JsonObject:
    return {"object": "list", "data": [model(name)]}


def model(name: str) -> JsonObject:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rollart"}


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _head(wanted: ParsedRequest, answer_id: str, kind: str) -> JsonObject:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": wanted.model}


def _finish(answer: ChatAnswer) -> str:
    if answer.message.tool_calls:
        return "tool_calls"
    return "length" if answer.completion.finish is Finish.LENGTH else "stop"


def _said_call(call: ToolCall) -> JsonObject:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(answer: ChatAnswer) -> JsonObject:
    values = answer.completion.logprobs.tolist()
    content = [
        {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, value in zip(answer.pieces, values, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(answer: ChatAnswer) -> JsonObject:
    sampled = len(answer.completion.tokens)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.completion.cached_tokens},
    }

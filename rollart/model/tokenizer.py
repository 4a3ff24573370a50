"""The Tokenizer port over a Hugging Face directory: its chat template, one delta at a time.

Invariant: the deltas and the sampled answers, put one after the other, are the template's own rendering of the whole
conversation, wherever the model closed its turns itself (and the template does not rewrite old turns). Sampled
tokens are never made again from text.
How: the template is asked for `[user, assistant with a mark, new messages]`, and what follows the mark is the delta.
It begins with what closes the assistant's turn, of which the model has normally sampled the first token.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from rollart.chat import form_of, read
from rollart.errors import JobError
from rollart.types import NO_TOKENS, Message, Tokens, Tool

K = TypeVar("K")
V = TypeVar("V")

MARK = "XROLLARTX"
"""Stands for the model's answer in the probe conversation; plain letters survive any template."""
CACHE_BYTES = 64_000_000
"""Of each cache. Short tasks show the same texts again and again; a cached rendering costs a microsecond instead of
200."""
ENTRY_BYTES = 500
"""What an entry takes beside its text and tokens, about."""


class TextCache(Generic[K, V]):
    """What was used last, up to so many bytes: an entry may be a word or a whole book."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: K) -> V | None:
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """`num_bytes`: of key and value. One that is larger than the whole cache is not kept."""
        size = num_bytes + ENTRY_BYTES
        if size > self._max_bytes or key in self._entries:
            return
        self._entries[key] = (value, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed


class ChatTokenizer:
    """Renders messages to tokens and tokens to text, as the model directory says."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise JobError(f"model.path: {path} holds no tokenizer that transformers can load: {error}") from error
        if not self._tokenizer.chat_template:
            raise JobError(f"model.path: the tokenizer in {path} has no chat template; use an instruct model")
        closing = self._after_mark([_assistant(MARK)], add_generation_prompt=False)
        self._closing = self.encode(closing)
        if not len(self._closing):
            raise JobError(f"model.path: the chat template in {path} does not close the assistant's turn")
        self._rendered: TextCache[tuple[tuple[Message, ...], bool, bool, tuple[Tool, ...]], Tokens] = TextCache(
            CACHE_BYTES
        )
        self._form = form_of(str(self._tokenizer.chat_template))
        self._decoded: TextCache[bytes, str] = TextCache(CACHE_BYTES)

    @property
    def end_of_turn(self) -> int:
        """The token with which the model ends its answer."""
        return int(self._closing[0])

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer: the template's end of turn, where it is no plain text, and the end of text."""
        turn = self.end_of_turn if self.end_of_turn in self._tokenizer.added_tokens_decoder else None
        found = dict.fromkeys([turn, self._tokenizer.eos_token_id])
        return tuple(int(token) for token in found if token is not None)

    def render(
        self, messages: Sequence[Message], *, fresh: bool, after: Tokens | None = None, tools: Sequence[Tool] = ()
    ) -> Tokens:
        """Tokens to append for these messages, up to and with the start of the model's answer.

        Where not `fresh` they follow `after`, the model's last sampled tokens (None: it ended its turn itself), and
        first close its turn where it did not. The result is shared: do not write to it.
        """
        closed = fresh or after is None or (len(after) > 0 and int(after[-1]) == self.end_of_turn)
        key = (tuple(messages), fresh, closed, tuple(tools) if fresh else ())
        tokens = self._rendered.get(key)
        if tokens is None:
            tokens = self._render(*key)
            text = sum(len(message.role) + len(message.content) for message in key[0])
            text += sum(len(tool.parameters) + len(tool.description) for tool in key[3])
            self._rendered.put(key, tokens, tokens.nbytes + 4 * text)
        return tokens

    def decode(self, tokens: Tokens) -> str:
        """The text without special tokens: what an environment gets to read."""
        key = np.asarray(tokens, dtype=np.int32).tobytes()
        text = self._decoded.get(key)
        if text is None:
            ids = np.frombuffer(key, dtype=np.int32).tolist()
            text = str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            self._decoded.put(key, text, len(key) + 4 * len(text))
        return text

    def parse(self, tokens: Tokens) -> Message:
        """A sampled answer as a message. What is no call that can be read stays text."""
        answer = read(self.decode(tokens), self._form)
        return Message(role="assistant", content=answer.content, reasoning=answer.reasoning, tool_calls=answer.calls)

    def _render(self, messages: tuple[Message, ...], fresh: bool, closed: bool, tools: tuple[Tool, ...]) -> Tokens:
        if fresh and not messages:
            return NO_TOKENS
        said = [_as_dict(message) for message in messages]
        if fresh:
            tokens = self.encode(self._template(said, add_generation_prompt=True, tools=tools))
        else:
            tokens = self.encode(self._after_mark([_assistant(MARK), *said], add_generation_prompt=True))
            tokens = tokens[1:] if closed else tokens
        tokens.flags.writeable = False
        return tokens

    def _after_mark(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        probe = [{"role": "user", "content": "."}, *messages]
        _, mark, after = self._template(probe, add_generation_prompt=add_generation_prompt).partition(MARK)
        if not mark:
            raise JobError("the chat template drops what the assistant said; RollArt cannot play several turns with it")
        return after

    def _template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, tools: Sequence[Tool] = ()
    ) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=[_as_schema(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise JobError(f"the chat template refuses messages in the roles {roles}: {error}") from error

    def encode(self, text: str) -> Tokens:
        """The tokens of a text as it stands, with no template around it."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _as_dict(message: Message) -> dict[str, Any]:
    """As templates read it. A field that the message does not have is left out: some look only whether it is there."""
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        said["tool_call_id"] = message.tool_call_id
    return said


def _as_schema(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": function}

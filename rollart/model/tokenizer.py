"""The Tokenizer port over a Hugging Face directory: its chat template, one delta at a time.

Invariant: the deltas and the sampled answers, put one after the other, are the template's own rendering of the whole
conversation, wherever the model closed its turns itself (and the template does not rewrite old turns). Sampled
tokens are never made again from text.
How: the template is asked for `[user, assistant with a mark, new messages]`, and what follows the mark is the delta.
It begins with what closes the assistant's turn, of which the model has normally sampled the first token.
"""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from rollart.chat import form_of, read
from rollart.errors import JobError
from rollart.types import NO_TOKENS, Json, JsonObject, Message, Tokens, Tool

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

MARK = "XROLLARTX"
"""Stands for the model's answer in the probe conversation; plain letters survive any template."""
CACHE_BYTES = 64_000_000
"""Of each cache. Short tasks show the same texts again and again; a cached rendering costs a microsecond instead of
200."""
GENERATION = r"{%-?\s*(end)?generation\s*-?%}"
"""Marks of transformers' own in a template, which Jinja does not know."""
TOKENIZERS = frozenset({"bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now"})
"""What transformers gives every template."""
PIECE = 65_536
"""Characters of a text that are counted at a time, where it hardly fits the context."""
CHARACTERS = 8
"""Of a token, more than usual: a text of more for every token of the context is counted first."""
CUT = 4
"""Tokens that a cut through a text may add to it, at most."""
ENTRY_BYTES = 500
"""What an entry takes beside its text and tokens, about."""


class TextCache(Generic[K, V]):
    """What was used last, up to a number of bytes: an entry may be a word or a whole book."""

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

    def __init__(
        self,
        path: str | Path,
        template: str = "",
        arguments: Mapping[str, object] | None = None,
        context_tokens: int | None = None,
    ) -> None:
        """`template`: instead of the tokenizer's own, a file or the text itself; `arguments`: more that it reads. A
        text that is longer than `context_tokens` is not read to its end: its tokens are still too many."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise JobError(f"model.path: {path} holds no tokenizer that transformers can load: {error}") from error
        if template:
            self._tokenizer.chat_template = _template_text(template)
        if not self._tokenizer.chat_template:
            raise JobError(
                f"model.path: the tokenizer in {path} has no chat template; use an instruct model, or give one as "
                "model.chat_template"
            )
        self._context_tokens = context_tokens
        self._arguments = dict(arguments or {})
        if self._arguments:
            _refuse_arguments(self._arguments, self._tokenizer.chat_template)
        closing = self._after_mark([_assistant(MARK)], add_generation_prompt=False)
        self._closing = self.encode(closing)
        if not len(self._closing):
            given = "model.chat_template: the template" if template else f"model.path: the chat template in {path}"
            raise JobError(f"{given} does not close the assistant's turn; let it end what an assistant says by a token")
        self.rendered: TextCache[tuple[tuple[Message, ...], bool, bool, tuple[Tool, ...]], Tokens] = TextCache(
            CACHE_BYTES
        )
        self._told_of_lost_tools = False
        self._form = form_of(str(self._tokenizer.chat_template))
        self.decoded: TextCache[bytes, str] = TextCache(CACHE_BYTES)

    @property
    def end_of_turn(self) -> int:
        """The token with which the model ends its answer."""
        return int(self._closing[0])

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer: the template's end of turn, where it is not plain text, and the end of text."""
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
        tokens = self.rendered.get(key)
        if tokens is None:
            tokens = self._render(*key)
            text = sum(len(message.role) + len(message.content) for message in key[0])
            text += sum(len(tool.parameters) + len(tool.description) for tool in key[3])
            self.rendered.put(key, tokens, tokens.nbytes + 4 * text)
        return tokens

    def decode(self, tokens: Tokens) -> str:
        """The text without special tokens: what an environment gets to read."""
        key = np.asarray(tokens, dtype=np.int32).tobytes()
        text = self.decoded.get(key)
        if text is None:
            ids = np.frombuffer(key, dtype=np.int32).tolist()
            text = str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            self.decoded.put(key, text, len(key) + 4 * len(text))
        return text

    def parse(self, tokens: Tokens) -> Message:
        """A sampled answer as a message. What cannot be read as a call stays text."""
        answer = read(self.decode(tokens), self._form)
        return Message(role="assistant", content=answer.content, reasoning=answer.reasoning, tool_calls=answer.calls)

    def _render(self, messages: tuple[Message, ...], fresh: bool, closed: bool, tools: tuple[Tool, ...]) -> Tokens:
        if fresh and not messages:
            return NO_TOKENS
        said = [_as_dict(message) for message in messages]
        if fresh:
            text = self._template(said, add_generation_prompt=True, tools=tools)
            self._tell_of_lost_tools(text, tools)
            tokens = self.encode(text)
        else:
            tokens = self.encode(self._after_mark([_assistant(MARK), *said], add_generation_prompt=True))
            tokens = tokens[1:] if closed else tokens
        tokens.flags.writeable = False
        return tokens

    def _tell_of_lost_tools(self, text: str, tools: Sequence[Tool]) -> None:
        """Once: a model that is not told of its tools will hardly call them."""
        lost = [tool.name for tool in tools if tool.name not in text]
        if lost and not self._told_of_lost_tools:
            self._told_of_lost_tools = True
            log.warning(
                "model.path: its chat template has no place for tools, so the model is not told of %s; say in the "
                "prompt what they are and how they are called, or use a model that was trained with tools",
                ", ".join(lost),
            )

    def _after_mark(self, messages: list[JsonObject], *, add_generation_prompt: bool) -> str:
        probe: list[JsonObject] = [{"role": "user", "content": "."}, *messages]
        _, mark, after = self._template(probe, add_generation_prompt=add_generation_prompt).partition(MARK)
        if not mark:
            raise JobError("the chat template drops what the assistant said; RollArt cannot play several turns with it")
        return after

    def _template(self, messages: list[JsonObject], *, add_generation_prompt: bool, tools: Sequence[Tool] = ()) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=[_as_schema(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._arguments,
                )
            )
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise JobError(f"the chat template refuses messages in the roles {roles}: {error}") from error
        except RecursionError:
            raise JobError("the arguments of a call, or the schema of a tool, are nested too deep") from None

    def encode(self, text: str) -> Tokens:
        """The tokens of a text as it stands, with no template around it."""
        beginning = self._too_long(text)
        return self._encode(text) if beginning is None else beginning

    def _too_long(self, text: str) -> Tokens | None:
        """What is more than the context, of a text that is; megabytes would hold up everybody for seconds."""
        most = self._context_tokens
        if most is None or len(text) <= most * CHARACTERS:
            return None
        pieces: list[Tokens] = []
        num_tokens = 0
        for at in range(0, len(text), PIECE):
            pieces.append(self._encode(text[at : at + PIECE]))
            num_tokens += len(pieces[-1])
            if num_tokens > most + CUT * len(pieces):
                return np.concatenate(pieces)
        return None

    def _encode(self, text: str) -> Tokens:
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        except TypeError:  # halves of characters, as in names of files that are not UTF-8
            found = self._tokenizer.encode(
                text.encode("utf-8", "replace").decode(), add_special_tokens=False, verbose=False
            )
        return np.asarray(found, dtype=np.int32)


OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What templates read and we, or the tokenizer, fill in."""


def _template_text(given: str) -> str:
    """A template, or the file that holds it. Raises JobError."""
    from jinja2 import Environment, TemplateSyntaxError

    if "{" not in given:
        try:
            given = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(
                f"model.chat_template: {given} cannot be read ({error}); name a file of Jinja, or write the template"
            ) from None
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(re.sub(GENERATION, "", given))
    except TemplateSyntaxError as error:
        raise JobError(f"model.chat_template: line {error.lineno} is not Jinja ({error.message}); correct it") from None
    return given


def _refuse_arguments(arguments: Mapping[str, object], template: Any) -> None:
    """Those that the template does not read: nothing would come of them."""
    from jinja2 import Environment, meta

    text = str(template["default"] if isinstance(template, dict) and "default" in template else template)
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(re.sub(GENERATION, "", text))
    read = meta.find_undeclared_variables(parsed)
    for name in arguments:
        if name in OURS:
            raise JobError(f"model.chat_template_args.{name}: is filled in for every conversation; remove it")
        if name not in read:
            known = ", ".join(sorted(read - OURS - TOKENIZERS)) or "none beside the usual"
            raise JobError(
                f"model.chat_template_args.{name}: the chat template does not read it; it reads {known}; correct or "
                "remove it"
            )


def _assistant(content: str) -> JsonObject:
    return {"role": "assistant", "content": content}


def _as_dict(message: Message) -> JsonObject:
    """As templates read it. A field that the message does not have is left out: some look only whether it is there."""
    said: dict[str, Json] = {"role": message.role, "content": message.content}
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


def _as_schema(tool: Tool) -> JsonObject:
    function = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": function}

"""The Tokenizer port over a Hugging Face directory: its chat template, one delta at a time.

Invariant: the deltas and the sampled answers, put one after the other, are the template's own rendering of the whole
conversation, wherever the model closed its turns itself (and the template does not rewrite old turns). Sampled
tokens are never made again from text.
How: the template is asked for `[user, assistant with a mark, new messages]`, and what follows the mark is the delta.
It begins with what closes the assistant's turn, of which the model has normally sampled the first token.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rollart.errors import JobError
from rollart.types import NO_TOKENS, Message, Tokens

MARK = "XROLLARTX"
"""Stands for the model's answer in the probe conversation; plain letters survive any template."""
CACHED_RENDERINGS = 65_536
"""Short tasks show the same texts again and again; a cached rendering costs a microsecond instead of 200."""


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
        self._render = lru_cache(maxsize=CACHED_RENDERINGS)(self._render_now)
        self._decode = lru_cache(maxsize=CACHED_RENDERINGS)(self._decode_now)

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

    def render(self, messages: Sequence[Message], *, fresh: bool, after: Tokens | None = None) -> Tokens:
        """Tokens to append for these messages, up to and with the start of the model's answer.

        Where not `fresh` they follow `after`, the model's last sampled tokens (None: it ended its turn itself), and
        first close its turn where it did not. The result is shared: do not write to it.
        """
        closed = fresh or after is None or (len(after) > 0 and int(after[-1]) == self.end_of_turn)
        return self._render(tuple(messages), fresh, closed)

    def decode(self, tokens: Tokens) -> str:
        """The text without special tokens: what an environment gets to read."""
        return self._decode(np.asarray(tokens, dtype=np.int32).tobytes())

    def _decode_now(self, tokens: bytes) -> str:
        ids = np.frombuffer(tokens, dtype=np.int32).tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _render_now(self, messages: tuple[Message, ...], fresh: bool, closed: bool) -> Tokens:
        if fresh and not messages:
            return NO_TOKENS
        said = [{"role": message.role, "content": message.content} for message in messages]
        if fresh:
            tokens = self.encode(self._template(said, add_generation_prompt=True))
        else:
            tokens = self.encode(self._after_mark([_assistant(MARK), *said], add_generation_prompt=True))
            tokens = tokens[1:] if closed else tokens
        tokens.flags.writeable = False
        return tokens

    def _after_mark(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        probe = [{"role": "user", "content": "."}, *messages]
        _, mark, after = self._template(probe, add_generation_prompt=add_generation_prompt).partition(MARK)
        if not mark:
            raise JobError("the chat template drops what the assistant said; RollArt cannot play several turns with it")
        return after

    def _template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise JobError(f"the chat template refuses messages in the roles {roles}: {error}") from error

    def encode(self, text: str) -> Tokens:
        """The tokens of a text as it stands, with no template around it."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}

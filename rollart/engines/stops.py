"""Finds stop strings in what a request has said so far, without decoding everything at every token.

A token can complete a stop string only if its own text holds the string's last character, or is not whole text by
itself (a piece of a multi-byte character). Only then are the last few tokens decoded together and searched. How many
these are depends on the stop string alone, so an answer costs what its length does, whatever is in it. The tokens that
spell the stop string stay in the output.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Decode = Callable[[list[int]], str]

CONTEXT_TOKENS = 8
"""Tokens decoded beyond those that can hold the stop string: what a tokenizer's decoder may look back on."""
CHARACTER_TOKENS = 4
"""Most tokens that one character is spelt with: a token holds a byte at least."""
PARTIAL = "\ufffd"
"""What a decoder gives for bytes that are not a whole character."""


class StopFinder:
    """One per engine; remembers the text of each token it has seen."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._texts: dict[int, str] = {}

    def ends(self, sampled: Sequence[int] | npt.NDArray[np.integer[Any]], stops: tuple[str, ...]) -> bool:
        """Whether the newest token has completed one of the stop strings."""
        newest = self._text(int(sampled[-1]))
        candidates = [stop for stop in stops if stop and self._may_end(newest, stop)]
        if not candidates:
            return False
        longest = max(len(stop) for stop in candidates)
        first, num_chars = len(sampled) - 1, 0
        furthest = max(0, first - CHARACTER_TOKENS * longest)
        # The newest token may hold the end only: look back until the tokens before it could hold the rest.
        while first > furthest and num_chars < longest:
            first -= 1
            text = self._text(int(sampled[first]))
            num_chars += 0 if PARTIAL in text else len(text.strip())
        first = max(0, first - CONTEXT_TOKENS)
        text = self.decode([int(token) for token in sampled[first:]])
        return any(stop in text for stop in candidates)

    def _may_end(self, newest: str, stop: str) -> bool:
        last = stop[-1]
        return last in newest or PARTIAL in newest or last.isspace()

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text

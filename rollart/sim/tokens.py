"""Tokens that say nothing: a simulated model or environment says how many there are, and no more."""

from functools import cache

import numpy as np

from rollart.types import Logprobs, Tokens

_TOKENS: Tokens = np.zeros(1 << 20, dtype=np.int32)
_LOGPROBS: Logprobs = np.zeros(1 << 20, dtype=np.float32)


@cache
def blank_tokens(length: int) -> Tokens:
    """The same array for all that are so long: nobody changes it."""
    return _TOKENS[:length]


@cache
def blank_logprobs(length: int) -> Logprobs:
    return _LOGPROBS[:length]

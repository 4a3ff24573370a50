"""A tokenizer without an end token: with it every answer has as many tokens as it may."""

from collections.abc import Sequence
from typing import Any

END_OF_TURN = "up"
"""A plain word, which ends no answer."""


def endless_tokenizer(more: Sequence[str] = ()) -> Any:
    """That of the tiny model, `more` pieces being tokens of their own."""
    from rollart_recipes.tiny import tiny_tokenizer

    tokenizer: Any = tiny_tokenizer(more)
    tokenizer.chat_template = tokenizer.chat_template.replace(tokenizer.eos_token, END_OF_TURN)
    tokenizer.eos_token = None
    return tokenizer

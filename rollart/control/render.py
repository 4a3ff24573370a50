"""From observation to token delta. Tokens once sampled are never tokenised again.

A prefix is the growing list of token pieces that one engine session sees: context, completion, context, completion, ...
Where an agent rewrites history, a new prefix begins and the old one stays a sample of its own.
"""

from typing import NamedTuple

from rollart.ports import Tokenizer
from rollart.types import Completion, Observation, Tokens


class Prefix(NamedTuple):
    """What the model has seen and said so far in one session."""

    pieces: tuple[Tokens, ...] = ()
    length: int = 0

    def extended(self, context: Tokens, *, fresh: bool) -> "Prefix":
        """The prompt for the next completion."""
        return Prefix((context,), len(context)) if fresh else self._longer(context)

    def answered(self, completion: Completion) -> "Prefix":
        return self._longer(completion.tokens)

    def _longer(self, piece: Tokens) -> "Prefix":
        return Prefix((*self.pieces, piece), self.length + len(piece))


def delta(tokenizer: Tokenizer, observation: Observation, last: Completion | None) -> tuple[Tokens, bool]:
    """The tokens an observation adds, and whether a new prefix begins with them. `last` is the answer before it."""
    fresh = last is None or observation.fresh
    after = None if last is None else last.tokens
    return tokenizer.render(observation.messages, fresh=fresh, after=after, tools=observation.tools), fresh

"""From observation to token delta. Tokens once sampled are never tokenised again.

A prefix is the in_progress list of token pieces one engine session sees: context, completion, context, completion, ...
Where an agent rewrites history, a new prefix begins and the old one stays a sample of its own.
"""

from rollart.ports import Tokenizer
from rollart.types import Completion, Observation, Tokens


class Prefix:
    """What the model has seen and said so far in one session."""

    __slots__ = ("length", "pieces")

    def __init__(self) -> None:
        self.pieces: tuple[Tokens, ...] = ()
        self.length = 0

    def extended(self, context: Tokens, *, fresh: bool) -> "Prefix":
        """The prompt for the next completion."""
        longer = Prefix()
        longer.pieces = (context,) if fresh else (*self.pieces, context)
        longer.length = len(context) if fresh else self.length + len(context)
        return longer

    def answered(self, completion: Completion) -> "Prefix":
        longer = Prefix()
        longer.pieces = (*self.pieces, completion.tokens)
        longer.length = self.length + len(completion.tokens)
        return longer


def delta(tokenizer: Tokenizer, observation: Observation, last: Completion | None) -> tuple[Tokens, bool]:
    """The tokens an observation adds, and whether a new prefix begins with them. `last` is the answer before it."""
    fresh = last is None or observation.fresh
    after = None if last is None else last.tokens
    return tokenizer.render(observation.messages, fresh=fresh, after=after), fresh

"""Guesses at what a request says next, from what requests of its task said before.

Agents repeat themselves: the braces of a tool call, the words around an answer. The engine computes guessed tokens in
the same step as the known ones, draws every token as it would have drawn it alone (same logits, same random number),
and keeps guesses as far as they came out. So the answers are the same with and without guesses; only the number of
steps differs. A guess is made only where the last few times were alike: text that does not repeat costs nothing.
"""

from collections.abc import Iterator

from rollart.engines.embedded.sequence import Sequence

CONTEXT_TOKENS = 3
"""Tokens of the answer from which the next one is guessed."""
SURE = 3
"""Times in a row that the same token must have come next."""
MAX_CONTEXTS = 1 << 16

Context = tuple[str | int, ...]
"""A task's name and the last tokens of an answer, fewer at its beginning."""


class Drafts:
    """What came next, by context: the token, and how many times in a row."""

    def __init__(self) -> None:
        self._next: dict[Context, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._next)

    def learn(self, seq: Sequence, tokens: list[int]) -> None:
        """These were drawn just now, in this order."""
        context = seq.context
        for token in tokens:
            known, times = self._next.get(context, (token, 0))
            self._next[context] = (token, times + 1 if known == token else 1)
            context = shifted(context, token)
        seq.context = context
        if len(self._next) > MAX_CONTEXTS:
            self._next.clear()

    def guess(self, seq: Sequence, most: int) -> list[int]:
        """What it will probably say next, at most this many tokens."""
        return [token for token, _ in zip(self._likely(seq.context), range(most), strict=False)]

    def _likely(self, context: Context) -> Iterator[int]:
        while True:
            token, times = self._next.get(context, (0, 0))
            if times < SURE:
                return
            yield token
            context = shifted(context, token)


def shifted(context: Context, token: int) -> Context:
    """The context after one more token."""
    if len(context) <= CONTEXT_TOKENS:
        return (*context, token)
    return (context[0], *context[2:], token)

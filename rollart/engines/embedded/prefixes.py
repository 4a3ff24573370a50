"""Who begins with the same tokens: the members of a group have one prompt, and every task its instruction.

Prompts are known by their leading blocks: the key of a prefix is a hash over its blocks, and names the session that
came with it last. A key is a hint, never proof: whoever uses one compares the tokens themselves.
"""

from collections.abc import Callable, Iterator

from rollart.engines.embedded.sequence import Sequence

BLOCK_TOKENS = 16
"""Shorter prompts share nothing: computing them anew costs less than a copy."""
MAX_KEYS = 1 << 16


class Prefixes:
    """Session by prefix. `known` says whether the cache still has anything of a session."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        self._known = known
        self._sessions: dict[int, str] = {}

    def holders(self, seq: Sequence) -> Iterator[str]:
        """Other sessions that may begin like this one, the longest common beginning first."""
        for key in reversed(keys_of(seq)):
            session = self._sessions.get(key)
            if session is not None and session != seq.session:
                yield session

    def note(self, seq: Sequence, beyond: int = 0) -> None:
        """This sequence has, or will have, every prefix of its own that is longer than `beyond` tokens."""
        if len(self._sessions) > MAX_KEYS:
            self._sessions = {key: session for key, session in self._sessions.items() if self._known(session)}
        for key in keys_of(seq)[beyond // BLOCK_TOKENS :]:
            self._sessions[key] = seq.session


def keys_of(seq: Sequence) -> list[int]:
    """One key for each whole block of the prompt, in order; the first stands for one block, the last for all."""
    if seq.prefix_keys is None:
        key, seq.prefix_keys = 0, []
        prompt = seq.buffer[: seq.prompt_tokens]
        for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
            key = hash((key, prompt[end - BLOCK_TOKENS : end].tobytes()))
            seq.prefix_keys.append(key)
    return seq.prefix_keys

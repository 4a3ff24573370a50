"""What every side of `python -m benchmarks.engine` is asked to do: the same prompts, the same answer lengths.

Written down as plain lists, since one side lives in another interpreter.
"""

import random
from dataclasses import dataclass

PROMPT_TOKENS = 64
"""New prompt tokens of each turn."""
ANSWER_TOKENS = (16, 128)
"""Shortest and longest answer."""
STEP_TOKENS = 2_048
"""Tokens of one step, at the most, where a side takes such a setting. Ours is its default."""

Answers = list[list[list[int]]]
"""By session and turn: the tokens sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sessions that take their turns side by side; each turn's prompt is the history and a few new tokens."""

    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    """By session and turn: the new prompt tokens."""
    lengths: tuple[tuple[int, ...], ...]
    """By session and turn: how many tokens the answer has."""
    temperature: float = 1.0

    @property
    def sessions(self) -> int:
        return len(self.prompts)

    @property
    def turns(self) -> int:
        return len(self.prompts[0])

    @property
    def answer_tokens(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for session in self.prompts for prompt in session)

    def first_turns(self, turns: int) -> "Workload":
        return Workload(
            prompts=tuple(session[:turns] for session in self.prompts),
            lengths=tuple(session[:turns] for session in self.lengths),
            temperature=self.temperature,
        )

    def check(self, answers: Answers) -> None:
        """A side that did less (or more) than it was asked to has no figure."""
        did = [[len(answer) for answer in session] for session in answers]
        if did != [list(session) for session in self.lengths]:
            raise ValueError(f"answers of {did} tokens, asked for {self.lengths}")


def build_workload(
    *,
    sessions: int,
    turns: int,
    vocab: int,
    seed: int = 0,
    edition: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
    answer_tokens: tuple[int, int] = ANSWER_TOKENS,
    temperature: float = 1.0,
) -> Workload:
    """`edition` changes the prompts but not the lengths: the same work again, and nothing of it in a prefix cache."""
    words = [random.Random(f"{seed}/{session}/{edition}/words") for session in range(sessions)]
    ends = [random.Random(f"{seed}/{session}/lengths") for session in range(sessions)]
    return Workload(
        prompts=tuple(
            tuple(tuple(rng.randrange(1, vocab) for _ in range(prompt_tokens)) for _ in range(turns)) for rng in words
        ),
        lengths=tuple(tuple(rng.randint(*answer_tokens) for _ in range(turns)) for rng in ends),
        temperature=temperature,
    )

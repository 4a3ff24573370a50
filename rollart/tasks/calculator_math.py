"""Arithmetic in several steps, `(a+b)*c` or `(a-b)*c`, with a calculator that does one operation per call.

Few turns, longer answers: two calls, then the answer. Reward 1 for the right number, else 0; a second reading of
the same words by `score` needs nothing but the episode, so it runs as well behind a URL.
"""

import random
import re
from collections.abc import Sequence

from rollart.tasks.api import Environment, Episode, TaskSet, observe
from rollart.types import Observation, Payload, Task

INSTRUCTION = (
    "Work it out with the calculator, one operation at a time, as in: calc 2+3. "
    "When you know the result, say it, as in: answer 5.\n"
)
MAX_CALLS = 8
_CALL = re.compile(r"\bcalc\s+(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})(?!\d)", re.IGNORECASE)
_ANSWER = re.compile(r"\banswer\s+(-?\d{1,18})(?!\d)", re.IGNORECASE)


class Calculator(Environment):
    """One problem. An answer ends it; a call is answered with a number; anything else with how to go on."""

    def __init__(self, question: str) -> None:
        self._question = question
        self._calls = 0
        self._over = False

    def reset(self) -> Observation:
        return observe(f"{INSTRUCTION}{self._question}\n")

    def step(self, action: str) -> Observation:
        if self._over:
            return observe(done=True)
        said = _answer_in(action)
        if said is not None:
            self._over = True
            return observe(reward=float(said == _value_of(self._question)), done=True)
        self._calls += 1
        call = _CALL.search(action)
        text = f"{_calculate(*call.groups())}\n" if call else "say calc or answer\n"
        return observe(text, truncated=self._calls >= MAX_CALLS)


class CalculatorTasks(TaskSet):
    """Problems with a and b below 100 and c below 10; no negative results."""

    quick = True

    def draw(self, rng: random.Random) -> Payload:
        a, b, c = rng.randint(1, 99), rng.randint(1, 99), rng.randint(2, 9)
        sign = rng.choice("+-")
        if sign == "-" and a < b:
            a, b = b, a
        return {"question": f"({a}{sign}{b})*{c}"}

    def environment(self, task: Task) -> Calculator:
        return Calculator(task.payload["question"])

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return _next_step(task.payload["question"], observations, steps=2)

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """Usually takes the first result for the answer."""
        early = len(observations) == 2 and rng.random() < EARLY_SHARE
        return _next_step(task.payload["question"], observations, steps=1 if early else 2)


EARLY_SHARE = 0.75


def score(episode: Episode) -> float:
    """1 where the model's last words are the right answer."""
    return float(_answer_in(episode.answer) == _value_of(episode.task.payload["question"]))


def _answer_in(text: str) -> int | None:
    """The number the model says is the answer; a call in the same breath counts for nothing."""
    found = _ANSWER.findall(text)
    return int(found[-1]) if found else None


def _calculate(left: str, sign: str, right: str) -> int:
    match sign:
        case "+":
            return int(left) + int(right)
        case "-":
            return int(left) - int(right)
        case _:
            return int(left) * int(right)


def _parts(question: str) -> tuple[str, str, str, str]:
    found = re.fullmatch(r"\((\d+)([-+])(\d+)\)\*(\d+)", question)
    if found is None:
        raise ValueError(f"not a problem of this task set: {question}")
    a, sign, b, c = found.groups()
    return a, sign, b, c


def _value_of(question: str) -> int:
    a, sign, b, c = _parts(question)
    return _calculate(a, sign, b) * int(c)


def _next_step(question: str, observations: Sequence[str], *, steps: int) -> str:
    a, sign, b, c = _parts(question)
    done = len(observations) - 1
    last = observations[-1].strip()
    if done >= steps:
        return f"answer {last}"
    return f"calc {a}{sign}{b}" if done == 0 else f"calc {last}*{c}"

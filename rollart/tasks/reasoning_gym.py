"""Problems from reasoning-gym, scored by its own scorer: one turn each. `ChainSum` by default.

Another of its data sets is two lines in your own file:

    from rollart.tasks.reasoning_gym import ReasoningGym
    class Sudoku(ReasoningGym): dataset = "mini_sudoku"

reasoning-gym takes more than a second to import, so it is imported when the first problem is drawn.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rollart.tasks.api import Environment, Episode, TaskSet, observe
from rollart.types import Observation, Task


class Asking(Environment):
    """One question, one answer."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self._payload = payload
        self._over = False

    def reset(self) -> str:
        return str(self._payload["question"])

    def step(self, action: str) -> Observation:
        reward = 0.0 if self._over else _score(self._payload, action)
        self._over = True
        return observe(reward=reward, done=True)


class ReasoningGym(TaskSet):
    """One data set of reasoning-gym. The question is what makes a problem the same problem."""

    dataset: ClassVar[str] = ""

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        seed = rng.getrandbits(31)
        return {"dataset": self.dataset, "seed": seed, "question": str(_entry(self.dataset, seed)["question"])}

    def key(self, payload: Mapping[str, Any]) -> Any:
        return [payload["dataset"], payload["question"]]

    def environment(self, task: Task) -> Asking:
        return Asking(task.payload)

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return str(_entry(task.payload["dataset"], task.payload["seed"])["answer"])


class ChainSum(ReasoningGym):
    """Sums of a few small numbers."""

    dataset = "chain_sum"


def score(episode: Episode) -> float:
    """The data set's own score of the last words, between 0 and 1."""
    return _score(episode.task.payload, episode.answer)


def _entry(dataset: str, seed: int) -> Mapping[str, Any]:
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, seed=seed, size=1)[0]  # type: ignore[no-any-return]


def _score(payload: Mapping[str, Any], answer: str) -> float:
    import reasoning_gym

    entry = _entry(payload["dataset"], payload["seed"])
    return float(reasoning_gym.get_score_answer_fn(payload["dataset"])(answer.strip(), entry))

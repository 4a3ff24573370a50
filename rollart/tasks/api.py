"""What a task file is written with: `TaskSet`, `Environment`, `Episode`.

A task set is data, an environment and a reward function. A whole one, ready for a job file's `use: my_task.py`:

    from rollart.tasks.api import Environment, Episode, TaskSet, observe

    class Echo(Environment):
        def __init__(self, word):
            self.word = word
        def reset(self):
            return f"Say {self.word}."
        def step(self, action):
            return observe(reward=float(action.strip() == self.word), done=True)

    class EchoTasks(TaskSet):
        def draw(self, rng):                           # one problem, as JSON values
            return {"word": rng.choice(["yes", "no", "perhaps"])}
        def environment(self, task):                   # a new environment for it
            return Echo(task.payload["word"])
        def scripted(self, task, observations, rng):   # the right answer, for `rollart task check`
            return task.payload["word"]

    def score(episode: Episode) -> float:              # optional; without it, the sum of the steps' rewards
        return episode.reward

Problems are split into training, warm-up and held-out ones by the hash of the problem itself, whatever the seed:
what is held out in one job is never trained on in another. This module imports nothing heavy.
"""

import hashlib
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal, Self

import msgspec

from rollart.errors import JobError
from rollart.types import JsonObject, Message, Observation, Payload, Task, Tool

Split = Literal["train", "warmup", "held_out"]
Reward = float | Mapping[str, float]
"""What a reward function returns: the reward, or its named parts, of which the reward is the sum."""
Said = Observation | str
"""What `reset` and `step` return; a string is a user message, and the episode goes on."""

HELD_OUT_PERCENT = 20
WARMUP_PERCENT = 20
"""Shares of the problems, by hash; the rest is for training."""
MAX_DRAWS = 2000
"""Draws before we say that a split seems to be empty."""


def observe(
    text: str = "", *, reward: float = 0.0, done: bool = False, truncated: bool = False, role: str = "user"
) -> Observation:
    """An observation of at most one message."""
    messages = (Message(role=role, content=text),) if text else ()
    return Observation(messages=messages, reward=reward, done=done, truncated=truncated)


class Environment(ABC):
    """One problem, played once: `reset`, then `step` until done. Each method may be `async`."""

    @abstractmethod
    def reset(self) -> Said | Awaitable[Said]:
        """The first observation."""

    @abstractmethod
    def step(self, action: str) -> Said | Awaitable[Said]:
        """What the model's answer leads to."""

    def close(self) -> Awaitable[None] | None:
        """Free everything. Called once, at any time."""
        return None


class TaskSet(ABC):
    """An endless, seeded sequence of problems of one domain. Subclasses write `draw` and `environment`."""

    quick = False
    """True where environments are plain Python that answers at once: an in-process host then calls them directly,
    without a thread for each. One that blocks or hangs would stop the whole job."""

    def __init__(self, *, seed: int = 0, domain: str = "") -> None:
        self.seed = seed
        self.domain = domain or type(self).__name__

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Open what problems are drawn from; called where they are drawn, before a job starts, and not where they are
        played. Raise JobError for what is wrong with an argument, as `tasks.args.<name>: ...; <the fix>`."""

    @abstractmethod
    def draw(self, rng: random.Random) -> Payload:
        """One problem, from this generator's numbers only. JSON values only."""

    @abstractmethod
    def environment(self, task: Task) -> Environment:
        """A new environment for this problem; randomness only from `task.seed`."""

    def key(self, payload: Payload) -> Any:
        """What makes a problem the same problem; equal keys fall into the same split. Default: the whole payload."""
        return payload

    def cache_key(self, task: Task) -> str:
        """What this problem's environment has in common with others, and is slow to make: a data file, a package."""
        return ""

    def fill_cache(self, key: str) -> None:  # noqa: B027 - most have none
        """Fill caches of this process for environments of this key. Called in workers that are started ahead
        (`tasks.N.warm`); an environment must do without as well."""

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """The right answer to the last of the observations' texts so far."""
        raise NotImplementedError

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """A well-formed but poor answer: what a model is warmed up on before it learns from rewards."""
        return self.scripted(task, observations, rng)

    def task(self, index: int) -> Task:
        """The training problem at this position."""
        return self._task("train", index, f"{self.domain}/{index}")

    def held_out(self, index: int) -> Task:
        """The same for evaluation; its problems are in no training or warm-up task of any seed."""
        return self._task("held_out", index, f"{self.domain}/held_out/{index}")

    def warmup(self, index: int) -> Task:
        """The same for warming a model up."""
        return self._task("warmup", index, f"{self.domain}/warmup/{index}")

    def split(self, payload: Payload) -> Split:
        """Where a problem belongs, by the hash of its key."""
        text = json.dumps(self.key(payload), sort_keys=True)
        bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
        if bucket < HELD_OUT_PERCENT:
            return "held_out"
        return "warmup" if bucket < HELD_OUT_PERCENT + WARMUP_PERCENT else "train"

    def _task(self, split: Split, index: int, task_id: str) -> Task:
        rng = random.Random(f"{self.seed}/{self.domain}/{split}/{index}")
        for _ in range(MAX_DRAWS):
            payload = self.draw(rng)
            if self.split(payload) == split:
                return Task(id=task_id, domain=self.domain, index=index, payload=payload, seed=rng.getrandbits(31))
        raise JobError(
            f"task set {self.domain}: {MAX_DRAWS} draws gave no {split} problem. It has too few different problems: "
            "let draw() give more, or write task() and held_out() yourself"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTurn:
    """One round as a reward function sees it."""

    context: str
    """What the model was shown since its last answer, as text."""
    text: str
    """What the model said."""
    tokens: int
    """How many tokens it sampled."""
    reward: float
    """What the environment gave for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished trajectory as a reward function sees it, here or behind a URL.

    As JSON: `{"id": "g7.3.0", "status": "done", "task": {"id", "domain", "index", "payload", "seed"},
    "turns": [{"context", "text", "tokens", "reward"}]}`.
    """

    id: str
    """Unique; a repeated call for the same id must give the same reward."""
    status: str
    """`done`, or `truncated`: turns, tokens or context ran out."""
    task: Task
    turns: tuple[EpisodeTurn, ...]

    @property
    def reward(self) -> float:
        """The sum of what the environment gave."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def answer(self) -> str:
        """The model's last words."""
        return self.turns[-1].text if self.turns else ""

    def to_json(self) -> JsonObject:
        # Bytes and dates stay what they are: as text they would be other values, and nobody would know.
        found: JsonObject = msgspec.to_builtins(self, enc_hook=_plain, builtin_types=(bytes, bytearray, datetime, date))
        return found

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Raises ValueError where this is not an episode."""
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not an episode: {error}") from error


def score(episode: Episode) -> float:
    """The reward function of a task file that has none: the sum of the steps' rewards."""
    return episode.reward


def text_of(observation: Observation) -> str:
    """The words of an observation, as players get them."""
    return "\n".join(message.content for message in observation.messages)


def as_observation(value: object) -> Observation:
    """What `reset` or `step` returned, checked. Raises ValueError that says what is wrong with it."""
    if isinstance(value, str):
        return observe(value)
    if not isinstance(value, Observation):
        raise ValueError(f"returned {_short(value)}; return an Observation (see observe()) or a string")
    if not isinstance(value.messages, tuple) or not all(isinstance(message, Message) for message in value.messages):
        raise ValueError(f"returned messages that are {_short(value.messages)}; give a tuple of Message")
    for message in value.messages:
        if not isinstance(message.content, str) or not isinstance(message.role, str):
            raise ValueError(f"returned a message that is not text: {_short(message.content)}")
    if not isinstance(value.tools, tuple) or not all(isinstance(tool, Tool) for tool in value.tools):
        raise ValueError(f"returned tools that are {_short(value.tools)}; give a tuple of Tool")
    reward = _number(value.reward)
    if reward is None:
        raise ValueError(f"returned the reward {_short(value.reward)}; give a finite number")
    if not isinstance(value.info, Mapping):
        raise ValueError(f"returned the info {_short(value.info)}; give a mapping")
    done, truncated, fresh = bool(value.done), bool(value.truncated), bool(value.fresh)
    return msgspec.structs.replace(value, reward=reward, done=done, truncated=truncated, fresh=fresh)


def as_reward(value: object) -> tuple[float, dict[str, float]]:
    """What a reward function returned, checked: the reward and its named parts. Raises ValueError."""
    if not isinstance(value, Mapping):
        return _finite(value), {}
    parts = {str(name): _finite(number) for name, number in value.items()}
    return math.fsum(parts.values()), parts


def _finite(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise ValueError(f"the reward function returned {_short(value)}; return a finite number, or a dict of them")
    return number


def _number(value: Any) -> float | None:
    """A finite number as a float; truth values, numpy's and torch's scalars are welcome. None for all else."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _plain(value: Any) -> Any:
    """Numpy's and torch's scalars, which user code likes to put in a payload. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a {type(value).__name__} is no JSON value; keep numbers, texts, lists and dicts in a task's payload"
    )


def _short(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "..."

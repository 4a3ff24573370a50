"""The logic of `rollart task check FILE`: plays a task set with a random and a scripted agent, says what is wrong.

Nothing is assumed of the code under test: calls run in a thread with a time limit, and what it raises is a finding. The
command runs it in a child process, whose death is a finding as well (`died`).
The result is a list of plain sentences; an empty one means that nothing was found. One episode comes with it.
"""

import asyncio
import contextlib
import inspect
import io
import json
import queue
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollart.errors import JobError
from rollart.tasks.api import Episode, EpisodeTurn, TaskSet, as_observation, as_reward, text_of
from rollart.tasks.load import load_reward, load_task_set, reward_of
from rollart.types import Observation, Task
from rollart.workers.server import describe

EPISODES = 8
MAX_TURNS = 200
CALL_LIMIT_S = 20.0
PREPARE_LIMIT_S = 600.0
"""Of `prepare()`, which may download what the task needs."""
SLOW_STEP_S = 1.0
COMPARED_TASKS = 100
SCRIPTED_SUCCESS = 0.9
"""What a scripted player should reach of the highest reward seen."""
WORDS = ("yes", "no", "up", "down", "left", "right", "42", "calc 1+1", "answer 0", "", "lorem ipsum " * 20)
"""What the random agent says when it does not repeat words of the observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong (`error`), or that its author should know (`warning`)."""

    level: Literal["error", "warning"]
    text: str


@dataclass(slots=True, kw_only=True)
class TrialEpisode:
    """One episode as the check saw it."""

    task: Task
    observations: list[Observation] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    who: str = ""
    """Played it."""
    slowest_s: float = 0.0
    ended: bool = False
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """What the reward function gave, where it came to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check found, and one episode to look at."""

    findings: list[Finding]
    example: TrialEpisode | None
    """Of the scripted player, else of the random agent; where the check broke off, the one it broke off in."""


Player = Callable[[Task, Sequence[str], random.Random], str]


class Broken(Exception):
    """The code under test failed so that this part of the check cannot go on."""


Note = Callable[[str], object]
"""Is told what is about to be called, and at the end nothing: what it heard last is where a process died."""


def check_task(
    use: str,
    args: Mapping[str, object] | None = None,
    *,
    seed: int = 0,
    call_limit_s: float = CALL_LIMIT_S,
    note: Note | None = None,
) -> Checked:
    """What is wrong with the task set `module`, `module:name` or `file.py`."""
    note = note or (lambda where: None)
    checked = _Check(use, args or {}, seed, call_limit_s, note).run()
    note("")
    return checked


def died(where: str, code: int) -> Finding:
    """What is said of a task whose check took its process with it. `code` is negative for a signal, as Popen has it."""
    return Finding(
        level="error",
        text=f"{where} ended its process ({how_it_ended(code)}), not only the episode: os._exit, native code that "
        "crashed, or too much memory. Raise an error instead; in training every such end costs the attempt and a new "
        "process.",
    )


def how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class _Check:
    def __init__(self, use: str, args: Mapping[str, object], seed: int, call_limit_s: float, note: Note) -> None:
        self._use = use
        self._args = args
        self._note = note
        self._seed = seed
        self._call_limit_s = call_limit_s
        self._findings: dict[str, Finding] = {}
        """By text: the same fault in every episode is said once."""
        self._example: TrialEpisode | None = None
        self._start_thread()

    def run(self) -> Checked:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                task_set = self._load("loading it", self._seed)
                self._call("prepare()", task_set.prepare, limit_s=max(self._call_limit_s, PREPARE_LIMIT_S))
                self._data(task_set)
                random_plays = self._play_all(task_set, _random_player, "the random agent")
                scripted_plays = self._scripted(task_set)
                self._determinism(task_set, random_plays + scripted_plays)
                self._example = (scripted_plays or random_plays)[0]
                self._rewards(random_plays, scripted_plays)
            except Broken as broken:
                self._error(str(broken))
            finally:
                self._jobs.put(None)
        if printed.getvalue():
            first = printed.getvalue().strip().splitlines()[0][:60] if printed.getvalue().strip() else ""
            self._warn(f"It prints to stdout ({first!r} ...). Use logging, or stderr: thousands of episodes will run.")
        return Checked(findings=list(self._findings.values()), example=self._example)

    def _load(self, where: str, seed: int) -> TaskSet:
        return self._call(where, load_task_set, self._use, self._args, seed=seed)  # type: ignore[no-any-return]

    def _data(self, task_set: TaskSet) -> None:
        """Tasks: the same for the same seed, JSON, different from each other, held out properly."""
        again = self._load("loading it again", self._seed)
        other = self._load("loading it with another seed", self._seed + 1)
        count = COMPARED_TASKS
        tasks = self._tasks(task_set, "task", count)
        if tasks != self._tasks(again, "task", count):
            self._error(
                "task(index) differs between two task sets of the same seed. Draw only from the rng you are given."
            )
        elif _payloads(tasks) == _payloads(self._tasks(other, "task", count)):
            self._warn("The seed changes nothing: two seeds give the same tasks. Draw from the rng you are given.")
        try:
            held_out = self._tasks(task_set, "held_out", count)
        except Broken as broken:
            if not isinstance(broken.__cause__, JobError):
                raise
            self._warn(f"It cannot be evaluated: {broken}")  # a job that evaluates nothing needs no held-out tasks
            held_out = []
        for task in (*tasks, *held_out):
            try:
                same = json.loads(json.dumps(task.payload)) == task.payload
            except (TypeError, ValueError):
                same = False
            if not same:
                self._error(
                    "A task's payload is not made of JSON values (strings as keys, lists, no tuples or objects)."
                )
                return
        keys = {_key(task_set, task) for task in tasks}
        shared = keys & {_key(task_set, task) for task in held_out}
        if shared:
            self._error(
                f"{len(shared)} held-out problems are also training problems, for example {min(shared)[:80]}. "
                "Evaluation would measure memory. Leave the split to TaskSet, or split by a hash of the problem."
            )
        if len(keys) == 1:
            self._warn(f"All of the first {count} tasks are the same problem.")

    def _tasks(self, task_set: TaskSet, method: str, count: int) -> list[Task]:
        def draw() -> list[Task]:
            return [getattr(task_set, method)(index) for index in range(count)]

        return self._call(f"{method}(index)", draw)  # type: ignore[no-any-return]

    def _play_all(self, task_set: TaskSet, player: Player, who: str) -> list[TrialEpisode]:
        return [self._play(task_set, task_set.task(index), player, who) for index in range(EPISODES)]

    def _scripted(self, task_set: TaskSet) -> list[TrialEpisode]:
        try:
            return self._play_all(task_set, task_set.scripted, "the scripted player")
        except Broken as broken:
            if not isinstance(broken.__cause__, NotImplementedError):
                raise
            self._warn("It has no scripted player, so nobody has shown that it can be won. Write scripted().")
            return []

    def _play(self, task_set: TaskSet, task: Task, player: Player, who: str) -> TrialEpisode:
        """One episode. Breaks the whole check where going on makes no sense."""
        play = self._example = TrialEpisode(task=task, who=who)
        rng = random.Random(f"{self._seed}/{task.id}/{who}")
        env = self._call("environment(task)", task_set.environment, task)
        texts: list[str] = []
        try:
            observation = self._observe(play, "reset()", env.reset)
            for _ in range(MAX_TURNS):
                if observation.done or observation.truncated:
                    play.ended = True
                    break
                texts.append(text_of(observation))
                if not texts[-1].strip():
                    self._error("An observation has no text although the episode goes on: the model is asked nothing.")
                action = self._call(f"{who}", player, task, texts, rng)
                if not isinstance(action, str):
                    raise Broken(f"scripted() returned a {type(action).__name__}, not a string.")
                play.actions.append(action)
                observation = self._observe(play, "step(action)", env.step, action)
            if not play.ended:
                raise Broken(
                    f"It did not end within {MAX_TURNS} turns of {who}. Return done or truncated at some turn."
                )
            elif len(play.observations) == 1:
                self._error("The episode is over at reset(), before the model has said anything.")
            elif who == "the random agent":
                self._after_the_end(env, play)
        finally:
            self._call("close()", env.close)
        return play

    def _observe(self, play: TrialEpisode, where: str, method: Callable[..., Any], *arguments: Any) -> Observation:
        began_s = time.monotonic()
        value = self._call(where, method, *arguments)
        play.slowest_s = max(play.slowest_s, time.monotonic() - began_s)
        try:
            observation = as_observation(value)
        except ValueError as error:
            raise Broken(f"{where} {error}.") from error
        play.observations.append(observation)
        return observation

    def _after_the_end(self, env: Any, play: TrialEpisode) -> None:
        """A step after the end may raise, or say again that it is over; it must not go on or pay."""
        if not play.observations[-1].done:
            return
        try:
            observation = as_observation(self._call("a step after done", env.step, "again"))
        except (Broken, ValueError):
            return
        if not observation.done:
            self._warn("step() after done goes on as if nothing had happened. Return done again, or raise.")
        elif observation.reward != 0:
            self._warn("step() after done pays a reward again. Return 0, or raise.")

    def _determinism(self, task_set: TaskSet, plays: Sequence[TrialEpisode]) -> None:
        for play in plays:
            replay = self._play(task_set, play.task, _repeat(play.actions), "the replay")
            if replay.observations != play.observations:
                self._error(
                    "It is not deterministic: the same task and the same actions led to something else the second "
                    "time. Take randomness from task.seed, and share nothing between environments."
                )
                return
        slowest_s = max((play.slowest_s for play in plays), default=0.0)
        if slowest_s > SLOW_STEP_S:
            self._warn(f"It is slow: a reset or step took {slowest_s:.1f} s. Thousands of them make one training step.")

    def _rewards(self, random_plays: Sequence[TrialEpisode], scripted_plays: Sequence[TrialEpisode]) -> None:
        name = self._call("finding its reward function", reward_of, self._use)
        function = self._call("loading its reward function", load_reward, name)
        random_scores = [self._score(function, play) for play in random_plays]
        scripted_scores = [self._score(function, play) for play in scripted_plays]
        if not scripted_scores or any(finding.level == "error" for finding in self._findings.values()):
            return  # with such faults the rewards say little
        best = max(*random_scores, *scripted_scores)
        mean = sum(scripted_scores) / len(scripted_scores)
        won = sum(score >= SCRIPTED_SUCCESS * best for score in scripted_scores)
        if max(scripted_scores) <= min(random_scores) and max(scripted_scores) == min(scripted_scores):
            self._error("The scripted player earns no more than the random agent: the reward teaches nothing.")
        elif won < SCRIPTED_SUCCESS * len(scripted_scores):
            self._error(
                f"The scripted player fails: it earned the best reward ({best:g}) in {won} of {len(scripted_scores)} "
                f"episodes, {mean:.2g} on average. The script is wrong, or some tasks cannot be won."
            )
        if random_scores and min(random_scores) == max(random_scores) == best:
            self._warn("The random agent always earns the best reward: there is nothing to learn.")

    def _score(self, function: Callable[[Episode], Any], play: TrialEpisode) -> float:
        turns = zip(play.observations, play.actions, play.observations[1:], strict=False)
        episode = Episode(
            id=play.task.id,
            status="done" if play.ended else "truncated",
            task=play.task,
            turns=tuple(
                EpisodeTurn(context=text_of(before), text=action, tokens=len(action.split()), reward=after.reward)
                for before, action, after in turns
            ),
        )
        scores = [self._call("score(episode)", function, Episode.from_json(episode.to_json())) for _ in range(2)]
        try:
            (first, parts), (second, _) = (as_reward(score) for score in scores)
        except ValueError as error:
            raise Broken(f"score(episode): {error}.") from error
        if first != second:
            self._error("score(episode) gives another reward when it is asked again. A retried call must not matter.")
        play.reward, play.parts = first, parts
        return first

    def _call(
        self, where: str, function: Callable[..., Any], *arguments: Any, limit_s: float | None = None, **named: Any
    ) -> Any:
        """Its value, within the time limit. Raises Broken with the sentence to show."""
        self._note(where)
        limit_s = limit_s or self._call_limit_s
        self._jobs.put(lambda: function(*arguments, **named))
        try:
            value, error = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._start_thread()  # the old one hangs, and is left behind
            raise Broken(f"{where} did not return within {limit_s:g} s.") from None
        if isinstance(error, JobError):
            raise Broken(str(error)) from error
        if error is not None:
            raise Broken(f"{where} raised {describe(error)}.") from error
        return value

    def _start_thread(self) -> None:
        jobs = self._jobs = queue.SimpleQueue[Callable[[], Any] | None]()
        answers = self._answers = queue.SimpleQueue[tuple[Any, BaseException | None]]()

        def work() -> None:
            with asyncio.Runner() as runner:  # one loop for all calls: async environments may keep things on it
                while (job := jobs.get()) is not None:
                    try:
                        value = job()
                        answers.put((runner.run(_awaited(value)) if inspect.isawaitable(value) else value, None))
                    except BaseException as error:  # the boundary to user code
                        answers.put((None, error))

        threading.Thread(target=work, daemon=True).start()

    def _error(self, text: str) -> None:
        self._findings.setdefault(text, Finding(level="error", text=text))

    def _warn(self, text: str) -> None:
        self._findings.setdefault(text, Finding(level="warning", text=text))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _random_player(task: Task, observations: Sequence[str], rng: random.Random) -> str:
    """Something the environment does not expect, or a word it said itself."""
    return rng.choice([*WORDS, *observations[-1].split()[-20:]])


def _repeat(actions: Sequence[str]) -> Player:
    """A player that says the same again."""
    left: Iterator[str] = iter(actions)
    return lambda task, observations, rng: next(left, "")


def _payloads(tasks: Sequence[Task]) -> list[Any]:
    return [task.payload for task in tasks]


def _key(task_set: TaskSet, task: Task) -> str:
    return json.dumps(task_set.key(task.payload), sort_keys=True)

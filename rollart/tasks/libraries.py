"""Environments of gymnasium, reasoning-gym, gem, textarena, verifiers and OpenEnv servers as task sets.

`use: gem:game:GuessTheNumber-v0-easy` is enough: what stands before the first colon is the library, the rest the name
that it knows. `args` are the library's own, beside the few that are named here. `python` is another interpreter, which
has the library: the environment then runs there, in a child of the process that would have played it, so that
whatever limits or ends that process ends it too. `guest.py` has what is done to each library.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rollart.chat import spoken
from rollart.errors import JobError, install
from rollart.tasks import guest
from rollart.tasks.api import Environment, Split, TaskSet, observe
from rollart.tasks.order import shuffled
from rollart.types import Message, Observation, Payload, Task

HELD_OUT_SHARE = 5
"""One in this many of a taskset's tasks is held out, where they are counted and not drawn."""


MAX_CHARACTERS = 2**26
"""Of one answer; a longer one is nonsense."""
EXIT_S = 1.0
"""How long an interpreter that closed its output may take to have an exit status."""


class Guest:
    """Another interpreter that runs `guest.py`. One call at a time; when it dies, the call under way says so."""

    def __init__(self, python: str) -> None:
        found = shutil.which(python)
        if found is None:
            raise JobError(f"tasks.args.python: {python} is not a program that can be run here; correct the path")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.process = subprocess.Popen(
            [found, "-I", guest.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in variables.items() if name != "VIRTUAL_ENV"},
            encoding="utf-8",
        )
        self._number = 0
        self._end = weakref.finalize(self, _end, self.process)  # at the latest with this process

    def ask(self, method: str, *arguments: Any) -> Any:
        """Raises RuntimeError with what it raised, or with how it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._number += 1
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([self._number, method, arguments]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline(MAX_CHARACTERS)
        try:
            number, well, value = json.loads(line)
            if number != self._number:
                raise ValueError
        except (ValueError, TypeError):
            raise RuntimeError(f"the interpreter that has its library {self._how_it_ended(line)}") from None
        if not well:
            raise RuntimeError(value)
        return value

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        self._end()

    def _how_it_ended(self, line: str) -> str:
        if line:
            self.end()
            return "answered nonsense and was ended"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)
        code = self.process.poll()
        self.end()
        if code is None:
            return "closed its output and was ended"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


class Guests:
    """Interpreters that wait for their next environment: an import of such a library takes seconds."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Guest]] = {}
        self._lock = threading.Lock()

    def take(self, python: str) -> Guest:
        with self._lock:
            waiting = self._idle.setdefault(python, [])
            while waiting:
                found = waiting.pop()
                if found.alive:
                    return found
                found.end()
        return Guest(python)

    def give_back(self, python: str, used: Guest) -> None:
        with self._lock:
            self._idle.setdefault(python, []).append(used)

    def end(self) -> None:
        with self._lock:
            idle, self._idle = [one for many in self._idle.values() for one in many], {}
        for one in idle:
            one.end()


GUESTS = Guests()


class Game:
    """One environment of a library, here or in another interpreter."""

    def __init__(self, library: str, name: str, args: Mapping[str, object], python: str) -> None:
        self._python = python
        self._guest: Guest | None = None
        self._here: Any = None
        if not python:
            self._here = guest.LIBRARIES[library](name, **args)
            return
        self._guest = GUESTS.take(python)
        try:
            self._guest.ask("open", library, name, dict(args))
        except BaseException:
            self._drop()
            raise

    def ask(self, method: str, *arguments: Any) -> Any:
        if self._guest is None:
            return getattr(self._here, method)(*arguments)
        try:
            return self._guest.ask("ask", method, arguments)
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        """Its interpreter waits for the next one, unless it did not even close."""
        if self._python and self._guest is None:
            return
        self.ask("close")
        if self._guest is not None:
            used, self._guest = self._guest, None
            GUESTS.give_back(self._python, used)

    def _drop(self) -> None:
        used, self._guest = self._guest, None
        if used is not None:
            used.end()


class GameEnvironment(Environment):
    """One episode of a game."""

    def __init__(self, game: Game, seed: int) -> None:
        self._game = game
        self._seed = seed
        self._over = False

    def reset(self) -> Observation:
        return self._as_observation(self._game.ask("reset", self._seed))

    def step(self, action: str) -> Observation:
        return observe(done=True) if self._over else self._as_observation(self._game.ask("step", spoken(action)))

    def close(self) -> None:
        self._game.close()

    def _as_observation(self, value: guest.Said) -> Observation:
        self._over = value["done"] or value["truncated"]
        return Observation(
            messages=tuple(Message(role=one["role"], content=one["content"]) for one in value["messages"]),
            reward=value["reward"],
            done=value["done"],
            truncated=value["truncated"],
        )


class Library(TaskSet):
    """Environments that a seed tells apart. Which seeds are held out, their hash decides."""

    library: ClassVar[str]
    extra: ClassVar[str]

    def __init__(self, *, id: str, python: str = "", seed: int = 0, domain: str = "", **args: Any) -> None:
        super().__init__(seed=seed, domain=domain)
        self._id, self._python, self._args = id, python, args

    def prepare(self) -> None:
        """Open one, and reset it. Raises JobError."""
        game = self._game()
        try:
            game.ask("reset", 0)
        except Exception as error:  # the boundary to the library
            raise JobError(
                f"tasks.use: {self.library}:{self._id} cannot be reset ({error}); correct it{self._listed()}"
            ) from None
        finally:
            with contextlib.suppress(Exception):
                game.close()

    def draw(self, rng: random.Random) -> Payload:
        return {"seed": rng.getrandbits(31)}

    def environment(self, task: Task) -> GameEnvironment:
        return GameEnvironment(self._game(), int(task.payload["seed"]))

    def _game(self) -> Game:
        try:
            return Game(self.library, self._id, self._args, self._python)
        except JobError:
            raise
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != guest.LIBRARIES[self.library].package:
                raise JobError(
                    f"tasks.use: {self.library}:{self._id} needs the package {error.name}: pip install {error.name}, "
                    "or put its folder into PYTHONPATH"
                ) from None
            raise JobError(
                f"tasks.use: {self.library}:{self._id} needs {error.name}: {install(self.extra)}; or, where it cannot "
                "stand beside the others, name the interpreter that has it, as args: {python: ./venv/bin/python}"
            ) from None
        except Exception as error:  # the boundary to the library
            where = f" in {self._python}" if self._python else ""
            args = {name: value for name, value in self._args.items() if value}
            given = f", args {args}" if args else ""
            if str(error).startswith(f"{ModuleNotFoundError.__name__}: "):
                fix = f"; install it there: {self._python} -m pip install {guest.LIBRARIES[self.library].distribution}"
            else:
                fix = self._listed()
            raise JobError(
                f"tasks.use: {self.library}:{self._id}{given} cannot be opened{where}: {error}{fix}"
            ) from None

    def _listed(self) -> str:
        """How to find out which names there are."""
        return f" (`rollart envs{f' --python {self._python}' if self._python else ''}` lists what there is)"


class Gymnasium(Library):
    """`gymnasium:FrozenLake-v1`, or `gymnasium:package.module:Name-v0` for one that a package of yours registers."""

    library, extra = "gymnasium", "tasks"

    def __init__(
        self, *, id: str, actions: list[str] | None = None, instruction: str = "", python: str = "", **args: Any
    ) -> None:
        """`actions`: what the model calls them, in the order of their numbers."""
        super().__init__(id=id, python=python, actions=actions or [], instruction=instruction, **args)

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """Any of the actions that the first observation names, or that `actions` do."""
        listed = re.match(r"Answer with one of: (.+)\.", observations[0])
        names = self._args["actions"] or (listed.group(1).split(", ") if listed else [])
        if not names:
            raise NotImplementedError
        return str(rng.choice(names))


class ReasoningGym(Library):
    """`reasoning_gym:chain_sum`; `args` configure the data set. The same question is the same problem."""

    library, extra = "reasoning_gym", "tasks"
    _drawing: Game | None = None

    def draw(self, rng: random.Random) -> Payload:
        seed = rng.getrandbits(31)
        return {"seed": seed, "question": str(self._drawn("question", seed))}

    def key(self, payload: Payload) -> Any:
        return [self._id, payload["question"]]

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return str(self._drawn("solution", task.payload["seed"]))

    def _drawn(self, method: str, seed: int) -> Any:
        self._drawing = self._drawing or self._game()
        return self._drawing.ask(method, seed)


class Gem(Library):
    """`gem:game:GuessTheNumber-v0-easy`."""

    library, extra = "gem", "gem"


class TextArena(Library):
    """`textarena:GuessTheNumber-v0`: games for one player."""

    library, extra = "textarena", "textarena"


class OpenEnv(Library):
    """`openenv:http://127.0.0.1:8000`: any OpenEnv server; each environment is a session of its own there."""

    library, extra = "openenv", "openenv"

    def __init__(
        self,
        *,
        id: str,
        field: str = "",
        show: str = "",
        reset: dict[str, object] | None = None,
        python: str = "",
        seed: int = 0,
        domain: str = "",
    ) -> None:
        """`field`: of the action, the one that the answer fills; without it the answer is the action, as JSON. `show`:
        the field of an observation that the model sees; without it all, as JSON. `reset`: more to reset with."""
        super().__init__(id=id, python=python, seed=seed, domain=domain, field=field, show=show, reset=reset or {})


class Verifiers(Library):
    """`verifiers:TASKSET`: a taskset of verifiers v1, whose tasks are counted: every one once an epoch."""

    library, extra = "verifiers", "verifiers"
    _count = 0

    def prepare(self) -> None:
        super().prepare()
        self._task("train", 0, "")

    def _task(self, split: Split, index: int, task_id: str) -> Task:
        if not self._count:
            game = self._game()
            self._count = int(game.ask("count"))
            game.close()
        numbers = [
            at for at in range(self._count) if (at % HELD_OUT_SHARE == HELD_OUT_SHARE - 1) == (split == "held_out")
        ]
        if not numbers:
            raise JobError(f"tasks.use: verifiers:{self._id} has {self._count} tasks, too few to hold some out")
        epoch, position = divmod(index, len(numbers))
        number = numbers[shuffled(position, len(numbers), f"{self.seed}/{self.domain}/{split}/{epoch}")]
        rng = random.Random(f"{self.seed}/{self.domain}/{split}/{index}")
        payload = {"seed": number}
        return Task(id=task_id, domain=self.domain, index=index, payload=payload, seed=rng.getrandbits(31))


def installed(python: str = "") -> dict[str, guest.Found]:
    """Of each library: its version and the names of its environments, here or in another interpreter."""
    if not python:
        return guest.installed()
    try:
        other = Guest(python)
    except JobError as error:
        raise JobError(str(error).replace("tasks.args.python", "--python", 1)) from None
    try:
        found: dict[str, guest.Found] = other.ask("installed")
        return found
    except RuntimeError as error:
        raise JobError(f"--python: {python} is no Python that lists its libraries: {error}; name another") from None
    finally:
        other.end()

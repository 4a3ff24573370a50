"""Environments of other people's libraries behind one face: open, reset, step, close, in plain values.

The one file of ours that runs in another interpreter (`args: {python: ...}`), so it needs the standard library only
(Python 3.9 or newer) and the library that is asked for. There it is started as a program, and speaks JSON, one line a
message, over what were its standard input and output: `[number, method, arguments]` in, `[number, true, value]` or
`[number, false, text]` out. What a library prints goes to standard error. It ends with its parent, whatever it does.

`rollart/tasks/libraries.py` is the other side. It calls the same classes directly where no interpreter is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import re
import sys
import threading
from collections.abc import Sequence
from typing import Any, TypedDict


class Said(TypedDict):
    """What `reset` and `step` return."""

    messages: list[dict[str, str]]
    """Each with a role and a content."""
    reward: float
    done: bool
    truncated: bool


class Found(TypedDict):
    """Of a library: its version and the names of its environments, or why there are none."""

    version: str | None
    names: list[str]
    why: str


COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
MAX_MISSES = 10
"""Answers without an action in them before an episode is given up."""


class GymnasiumGame:
    """Any environment whose actions are a few, or a text, and whose observations can be written down."""

    package, distribution = "gymnasium", "gymnasium"

    def __init__(self, name: str, actions: Sequence[str] = (), instruction: str = "", **make: Any) -> None:
        gymnasium = importlib.import_module("gymnasium")
        module, _, name = name.rpartition(":")
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(name)
        modes = getattr(_entry(spec.entry_point), "metadata", {}).get("render_modes", [])
        self._drawn = "ansi" in modes
        if self._drawn:
            make.setdefault("render_mode", "ansi")
        self._env = gymnasium.make(name, disable_env_checker=True, **make)
        space = self._env.action_space
        self._text = type(space).__name__ == "Text"
        if not self._text and type(space).__name__ != "Discrete":
            self._env.close()
            raise ValueError(
                f"its actions are {space}; only Discrete and Text can be said by a model: write a task file"
            )
        first = 0 if self._text else int(space.start)
        names = list(actions) or ([] if self._text else [str(first + at) for at in range(int(space.n))])
        if not self._text and len(names) != space.n:
            self._env.close()
            raise ValueError(f"it has {space.n} actions, and `actions` names {len(names)}")
        self._actions = {name.lower(): first + at for at, name in enumerate(names)}
        self._instruction = instruction or ("" if self._text else f"Answer with one of: {', '.join(names)}.")

    def reset(self, seed: int) -> Said:
        observation, _ = self._env.reset(seed=seed)
        self._misses = 0
        return _said("\n".join(part for part in (self._instruction, self._shown(observation)) if part))

    def step(self, text: str) -> Said:
        action = text if self._text else self._meant(text)
        if action is None:
            self._misses += 1
            return _said(self._instruction, truncated=self._misses >= MAX_MISSES)
        observation, reward, done, truncated, _ = self._env.step(action)
        return _said(self._shown(observation), float(reward), bool(done), bool(truncated))

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: Any) -> str:
        if self._drawn:
            return re.sub(r"\x1b\[([0-9;]+)m(.)\x1b\[0m", _uncoloured, str(self._env.render())).strip("\n")
        plain = _plain(observation)
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=str)

    def _meant(self, text: str) -> int | None:
        """The action that is named last."""
        names = "|".join(sorted(map(re.escape, self._actions), key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(?:{names})(?!\w)", text.lower())
        return self._actions[found[-1]] if found else None

    @staticmethod
    def names() -> list[str]:
        """Those that are text, and those of other packages."""
        found = []
        for name, spec in importlib.import_module("gymnasium").registry.items():
            point = spec.entry_point
            module = point.__module__ if callable(point) else str(point).partition(":")[0]
            package = module.partition(".")[0]
            if "toy_text" in module or (package != "gymnasium" and importlib.util.find_spec(package) is not None):
                found.append(name)
        return found


class ReasoningGymGame:
    """One question, scored by the data set's own scorer."""

    package, distribution = "reasoning_gym", "reasoning-gym"

    def __init__(self, name: str, **config: Any) -> None:
        self._name, self._config = name, config
        self._library = importlib.import_module("reasoning_gym")

    def question(self, seed: int) -> str:
        return str(self._entry(seed)["question"])

    def solution(self, seed: int) -> str:
        return str(self._entry(seed)["answer"])

    def reset(self, seed: int) -> Said:
        self._problem = self._entry(seed)
        return _said(str(self._problem["question"]))

    def step(self, text: str) -> Said:
        scorer = self._library.get_score_answer_fn(self._name)
        return _said("", float(scorer(text.strip(), self._problem)), done=True)

    def close(self) -> None:
        pass

    def _entry(self, seed: int) -> Any:
        return self._library.create_dataset(self._name, **{**self._config, "seed": seed, "size": 1})[0]

    @staticmethod
    def names() -> list[str]:
        return list(importlib.import_module("reasoning_gym.factory").DATASETS)


class GemGame:
    """gem's games and question sets."""

    package, distribution = "gem", "gem-llm"

    def __init__(self, name: str, **make: Any) -> None:
        gem = importlib.import_module("gem")
        known = self.names()
        if name not in known:
            near = [other for other in known if other.startswith(name)]
            raise ValueError(f"gem has no {name}" + (f"; it has {', '.join(near[:6])}" if near else ""))
        self._env = gem.make(name, **make)

    def reset(self, seed: int) -> Said:
        observation, info = self._env.reset(seed=seed)
        return _said(f"{observation}{info.get('suffix', '')}")

    def step(self, text: str) -> Said:
        observation, reward, done, truncated, info = self._env.step(text)
        return _said(f"{observation}{info.get('suffix', '')}", float(reward), bool(done), bool(truncated))

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    @staticmethod
    def names() -> list[str]:
        importlib.import_module("gem")
        return list(importlib.import_module("gem.envs.registration").ENV_REGISTRY)


class TextArenaGame:
    """textarena's games for one player."""

    package, distribution = "textarena", "textarena"

    def __init__(self, name: str, **make: Any) -> None:
        self._env = importlib.import_module("textarena").make(name, **make)
        self._seen = ""

    def reset(self, seed: int) -> Said:
        try:
            self._env.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ValueError(f"it is no game for one player ({error}); name one that is") from None
        return _said(self._new(""))

    def step(self, text: str) -> Said:
        done, _ = self._env.step(text)
        if not done:
            return _said(self._new(text))
        rewards, _ = self._env.close()
        return _said("", float((rewards or {}).get(0, 0.0)), done=True)

    def close(self) -> None:
        pass

    def _new(self, said: str) -> str:
        """What is new since the answer. The game shows all that was said so far, every time."""
        _, shown = self._env.get_observation()
        shown = shown if isinstance(shown, str) else "\n".join(str(part[1]) for part in shown)
        new = shown[len(self._seen) :] if self._seen and shown.startswith(self._seen) else shown
        self._seen = shown
        echo = re.match(rf"\s*\[[^\]\n]*\]\s*\[?{re.escape(said)}\]?", new) if said else None
        new = (new[echo.end() :] if echo else new).strip()
        return new or shown

    @staticmethod
    def names() -> list[str]:
        importlib.import_module("textarena")
        registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        return [name for name in registry if not name.endswith(("-raw", "-train"))]


class VerifiersGame:
    """Tasksets of verifiers v1 whose tasks are one prompt and one answer, scored by their own rewards."""

    package, distribution = "verifiers", "verifiers"

    def __init__(self, name: str, **config: Any) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self._vf = importlib.import_module("verifiers.v1")
        played = loaders.environment_class(name)
        if played is not self._vf.SingleAgentEnv:
            raise ValueError(
                f"it is played by {played.__name__}, which runs agents of its own; only single prompts are"
            )
        found = loaders.taskset_class(name)(loaders.taskset_config_type(name)(id=name, **config))
        kind = found.task_type()
        if kind.NEEDS_CONTAINER or kind.toolsets(found.config.task) or found.toolsets(found.config):
            raise ValueError("its tasks need tools or a container; only single prompts are played")
        if found.INFINITE:
            raise ValueError("it is endless; give it a config that ends")
        self._tasks = list(found)
        if not self._tasks:
            raise ValueError("it has no tasks")

    def count(self) -> int:
        return len(self._tasks)

    def question(self, seed: int) -> str:
        return str(self._tasks[seed].data.prompt_text)

    def reset(self, seed: int) -> Said:
        self._task = self._tasks[seed]
        data = self._task.data
        self._system = [self._vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        given = [self._vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
        self._prompt = [*self._system, *given]
        shown = [{"role": one.role, "content": str(one.content)} for one in self._prompt]
        return {**_said(""), "messages": shown}

    def step(self, text: str) -> Said:
        vf = self._vf
        messages = [*self._prompt, vf.AssistantMessage(content=text)]
        last = len(messages) - 1
        nodes = [
            vf.MessageNode(parent=at - 1 if at else None, message=message, sampled=at == last)
            for at, message in enumerate(messages)
        ]
        task = vf.TraceTask(type=type(self._task).__name__, data=self._task.data, key=self._task.key)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        trace = vf.Trace(task=task, agent=agent, nodes=nodes, is_completed=True, ok=True)
        asyncio.run(self._task.score(trace))
        if trace.errors:
            raise ValueError(f"scoring failed: {trace.errors[-1].message}")
        return _said("", float(trace.reward), done=True)

    def close(self) -> None:
        pass

    @staticmethod
    def names() -> list[str]:
        """Tasksets of packages that are installed and need verifiers."""
        found = []
        for one in importlib.metadata.distributions():
            if any(re.match(r"verifiers\b", needed) for needed in one.requires or []):
                found.append(str(one.metadata["Name"]))
        return sorted(found)


class OpenEnvGame:
    """A session with an OpenEnv server, over its websocket: one connection is one environment."""

    package, distribution = "websockets", "websockets"

    def __init__(self, name: str, field: str = "", show: str = "", reset: dict[str, object] | None = None) -> None:
        client = importlib.import_module("websockets.sync.client")
        url = re.sub(r"^http", "ws", name).rstrip("/")
        self._field, self._show, self._reset = field, show, dict(reset or {})
        url = url if url.endswith("/ws") else f"{url}/ws"
        self._open = contextlib.ExitStack()
        self._link = self._open.enter_context(client.connect(url, max_size=2**26, open_timeout=30))

    def reset(self, seed: int) -> Said:
        return self._observed("reset", {"seed": seed, **self._reset})

    def step(self, text: str) -> Said:
        if self._field:
            return self._observed("step", {self._field: text})
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            return _said("Answer with the action as a JSON object.")
        return self._observed("step", action)

    def close(self) -> None:
        self._link.send(json.dumps({"type": "close"}))
        self._open.close()

    def _observed(self, kind: str, data: dict[str, object]) -> Said:
        self._link.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._link.recv())
        if answer.get("type") != "observation":
            raise RuntimeError(f"the server says: {json.dumps(answer.get('data'))[:400]}")
        seen = answer["data"]
        shown = {name: value for name, value in seen["observation"].items() if name != "metadata"}
        if self._show:
            if self._show not in shown:
                raise ValueError(f"an observation has no {self._show!r}; it has {', '.join(shown)}")
            shown = shown[self._show]
        text = shown if isinstance(shown, str) else json.dumps(shown)
        return _said(text, float(seen.get("reward") or 0.0), bool(seen.get("done")))

    @staticmethod
    def names() -> list[str]:
        return []


LIBRARIES: dict[str, type[Any]] = {
    "gymnasium": GymnasiumGame,
    "reasoning_gym": ReasoningGymGame,
    "gem": GemGame,
    "textarena": TextArenaGame,
    "verifiers": VerifiersGame,
    "openenv": OpenEnvGame,
}


def installed() -> dict[str, Found]:
    return {name: _look(library) for name, library in LIBRARIES.items()}


def _look(library: Any) -> Found:
    if importlib.util.find_spec(library.package) is None:
        return {"version": None, "names": [], "why": f"{library.distribution} is not installed"}
    try:
        version = importlib.metadata.version(library.distribution)
        return {"version": version, "names": sorted(library.names()), "why": ""}
    except Exception as error:  # whatever an import of theirs raises
        return {"version": None, "names": [], "why": f"{type(error).__name__}: {error}"}


def _said(text: str, reward: float = 0.0, done: bool = False, truncated: bool = False) -> Said:
    messages = [{"role": "user", "content": text}] if text else []
    return {"messages": messages, "reward": reward, "done": done, "truncated": truncated}


def _plain(value: Any) -> Any:
    """An observation in values that JSON has; single-precision numbers with the digits that they have."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", None):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):
        number = value.item()
        return float(str(value)) if isinstance(number, float) else number
    return value


def _uncoloured(found: re.Match[str]) -> str:
    """A letter that is drawn on colour, where the player is mostly, as [x]; one in colour as x(blue)."""
    codes, letter = found.group(1).split(";"), found.group(2)
    if any(code.startswith("4") and len(code) == 2 for code in codes):
        return f"[{letter}]"
    names = [COLOURS[int(code) - 30] for code in codes if code.startswith("3") and len(code) == 2 and code < "38"]
    return f"{letter}({names[0]})" if names else letter


def _entry(point: Any) -> Any:
    if callable(point):
        return point
    module, _, name = str(point).partition(":")
    return getattr(importlib.import_module(module), name, None)


class _Service:
    """One environment at a time, as the parent asks."""

    def __init__(self) -> None:
        self._game: Any = None

    def open(self, library: str, name: str, args: dict[str, object]) -> None:
        self._game = LIBRARIES[library](name, **args)

    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        return getattr(self._game, method)(*arguments)

    def installed(self) -> dict[str, Found]:
        return installed()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is not an answer
    calls: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            calls.put(line)
        os._exit(0)  # the parent has gone

    threading.Thread(target=listen, daemon=True).start()
    service = _Service()
    while True:
        number, method, arguments = json.loads(calls.get())
        try:
            answer = [number, True, getattr(service, method)(*arguments)]
            line = json.dumps(answer)
        except Exception as error:  # the boundary to the library
            line = json.dumps([number, False, f"{type(error).__name__}: {error}"])
        answers.write(line + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

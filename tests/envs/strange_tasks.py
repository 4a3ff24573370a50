"""Environments that misbehave on request: the payload's `kind` says how. Loaded by the hosts under test."""

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Message, Observation, Task

FOR_EVER_S = 3600.0


async def shout(shown: str) -> str:
    """An agent."""
    return f"{shown.upper()} {os.environ['OPENAI_API_KEY']}"


def mumble(shown: str) -> int:
    """No agent: it says nothing."""
    return len(shown)


def leave(shown: str) -> None:
    """Neither a word nor a step."""


def play_through(shown: str, step: Callable[[str], str | None]) -> None:
    """An agent that steps by itself."""
    said: str | None = shown
    while said is not None:
        said = step(said)


def play_once(shown: str, step: Callable[[str], str | None]) -> None:
    step("one")


class Strange(Environment):
    """Counts to two. Where `kind` is not "count", something happens at the first step, or earlier.

    A step makes the file `begun` of the payload first, where it names one."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.payload = payload
        self.kind = payload["kind"]
        self.count = 0
        if self.kind == "hang in open":
            time.sleep(FOR_EVER_S)
        if self.kind == "raise in open":
            raise ValueError("no such problem")

    def reset(self) -> Observation | str:
        if self.kind == "hang in reset":
            time.sleep(FOR_EVER_S)
        return f"count {self.payload.get('name', '')}"

    def step(self, action: str) -> Any:
        self.count += 1
        if "begun" in self.payload:
            Path(self.payload["begun"]).touch()
        match self.kind:
            case "hang":
                time.sleep(FOR_EVER_S)
            case "spin":
                while True:
                    pass
            case "hold":
                re.match(r"(a+)+$", "a" * 64 + "b")  # never returns, and never lets another thread run
            case "raise":
                raise KeyError("lost my keys")
            case "leave":
                sys.exit(3)
            case "die":
                print("these are my last words", file=sys.stderr, flush=True)  # noqa: T201
                os._exit(7)
            case "grandchild":
                child = subprocess.Popen(["sleep", str(FOR_EVER_S)])
                return observe(str(child.pid))
            case "nothing":
                return None
            case "not a number":
                return observe("x", reward=float("nan"))
            case "no message":
                return Observation(messages=("hello",))  # type: ignore[arg-type]
            case "unsendable":
                return Observation(messages=(Message(role="user", content="x"),), info={"it": object()})
            case "babble":
                os.write(int(sys.argv[2]), b"\x00\x00\x00\x05hello")
            case "print":
                print("x" * 1_000_000)  # noqa: T201
                sys.stderr.write("y" * 1_000_000)
            case "wait":
                while not Path(self.payload["go"]).exists():
                    time.sleep(0.001)
            case "pid":
                return observe(str(os.getpid()))
        return observe(f"{action} {self.count}", reward=0.5, done=self.count == 2)

    def close(self) -> None:
        if self.kind == "raise in close":
            raise OSError("stuck door")


class Gentle(Environment):
    """The same with async methods."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.count = 0

    async def reset(self) -> str:
        async with self.lock:
            await asyncio.sleep(0)
        return "count "

    async def step(self, action: str) -> Observation:
        async with self.lock:
            await asyncio.sleep(0)
            self.count += 1
        return observe(f"{action} {self.count}", reward=0.5, done=self.count == 2)

    async def close(self) -> None:
        await asyncio.sleep(0)


class StrangeTasks(TaskSet):
    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"kind": "count", "name": str(rng.random())}

    def environment(self, task: Task) -> Environment:
        return Gentle() if task.payload["kind"] == "async" else Strange(task.payload)

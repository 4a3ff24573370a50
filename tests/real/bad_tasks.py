"""Environments that are broken in every way there is; the payload's `kind` says which."""

import os
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

from rollart.tasks.api import Environment, TaskSet, observe
from rollart.types import Task

INLINE = ("hang", "hang in reset", "raise", "raise in open", "leave", "nothing", "not a number", "print")
PROCESS = (*INLINE, "die", "babble")
FAILING = frozenset(PROCESS) - {"print"}


class Bad(Environment):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "raise in open":
            raise ValueError("no such problem")

    def reset(self) -> str:
        if self.kind == "hang in reset":
            time.sleep(3600)
        return "go"

    def step(self, action: str) -> Any:
        match self.kind:
            case "hang":
                time.sleep(3600)
            case "raise":
                raise KeyError("lost my keys")
            case "leave":
                sys.exit(3)
            case "nothing":
                return None
            case "not a number":
                return observe("x", reward=float("nan"))
            case "die":
                os._exit(7)
            case "babble":
                os.write(int(sys.argv[1]), b"\x00\x00\x00\x05hello")
            case "print":
                sys.stdout.write("x" * 1_000_000)
                sys.stderr.write("y" * 1_000_000)
        return observe("more", reward=float(len(action) % 2), done=True)


class BadTasks(TaskSet):
    kinds: tuple[str, ...] = PROCESS

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        return {"kind": rng.choice(self.kinds), "number": rng.randrange(10**9)}

    def environment(self, task: Task) -> Environment:
        return Bad(task.payload["kind"])


class InlineTasks(BadTasks):
    kinds = INLINE

"""Runs a task set in a child process first: one that ends its process ends only that one.

The child keeps a note of what it is about to call, and empties it at the end: what the note says when the child is gone
is where it died. `fatal_call` is asked by `launch/checks.py` before a task set is loaded where the job runs; what is
merely raised is of no interest there: it is met again. `rollart task check` runs the whole check so.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rollart.tasks.check import how_it_ended
from rollart.tasks.load import load_task_set


class Noted(NamedTuple):
    """A child that has ended."""

    where: str
    """What it was calling; empty where it came to its end."""
    code: int
    output: str


def run_noted(
    module: str, *words: str, limit_s: float | None = None, variables: Mapping[str, str] | None = None
) -> Noted:
    """`python -m MODULE WORDS NOTE`, with our path and these environment variables. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory(prefix="rollart-trial-") as folder:
        note = Path(folder) / "note"
        note.write_text("its start")
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        done = subprocess.run(
            [sys.executable, "-P", "-m", module, *words, str(note)],
            env={**os.environ, "PYTHONPATH": path, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=limit_s,
            check=False,
        )
        return Noted(note.read_text(), done.returncode, done.stdout.decode(errors="replace"))


def fatal_call(
    use: str, args: Mapping[str, object], *, seed: int, domain: str, draws: int, held_out: bool, limit_s: float
) -> str | None:
    """Which call of this task set ends its process, and how; None where none does, or not within the limit."""
    try:
        words = (use, json.dumps(args), str(seed), domain, str(draws), str(int(held_out)))
        child = run_noted(__name__, *words, limit_s=limit_s)
    except subprocess.TimeoutExpired:
        return None
    return f"{child.where} ended its process ({how_it_ended(child.code)})" if child.where else None


def main(
    use: str, args: Mapping[str, object], seed: int, domain: str, draws: int, note: Path, *, held_out: bool
) -> None:
    """In the child of `fatal_call`. What is printed here is thrown away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    with contextlib.suppress(Exception, SystemExit):
        note.write_text("loading it")
        task_set = load_task_set(use, args, seed=seed, domain=domain)
        calls = [("task", task_set.task), *([("held_out", task_set.held_out)] if held_out else [])]
        for name, call in calls:
            for index in range(draws):
                note.write_text(f"{name}({index})")
                with contextlib.suppress(Exception, SystemExit):
                    call(index)
    note.write_text("")


if __name__ == "__main__":
    _, named, given, number, name_of_task, count, also_held_out, path = sys.argv
    main(named, json.loads(given), int(number), name_of_task, int(count), Path(path), held_out=also_held_out == "1")

"""Runs a task set's code in a child process first: code that ends its process ends only that one.

The child writes what it is about to call into a note, and nothing at the end: what the note says afterwards is the call
that ended it. `rollart task check` runs the whole check so, `launch/checks.py` the loading and the first draws of a
task set. What is merely raised is of no interest to the latter: the job meets it again.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.tasks.check import how_it_ended
from rollart.tasks.load import load_task_set

NOTE = "ROLLART_TASK_NOTE"
"""In the child's environment: the path of its note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended."""

    code: int
    during: str
    """The call that ended it; empty where none did."""
    output: bytes


def in_child(
    words: Sequence[str],
    *,
    limit_s: float | None = None,
    quiet: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """`python -m WORDS`, with these environment variables beside ours. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory(prefix="rollart-task-") as folder:
        note = Path(folder) / "note"
        note.write_text("its start")
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        done = subprocess.run(
            [sys.executable, "-P", "-m", *words],
            env={**os.environ, "PYTHONPATH": path, NOTE: str(note), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            timeout=limit_s,
            check=False,
        )
        return Ended(code=done.returncode, during=note.read_text(), output=done.stdout)


def fatal_call(use: str, *, seed: int, domain: str, draws: int, held_out: bool, limit_s: float) -> str | None:
    """Which call of this task set ends its process, and how; None where none does, or not within the limit."""
    try:
        words = [__name__, use, str(seed), domain, str(draws), str(int(held_out))]
        ended = in_child(words, limit_s=limit_s, quiet=True)
    except subprocess.TimeoutExpired:
        return None
    return f"{ended.during} ended its process ({how_it_ended(ended.code)})" if ended.during else None


def main(note: Path, use: str, seed: int, domain: str, draws: int, *, held_out: bool) -> None:
    """In the child."""
    with contextlib.suppress(Exception, SystemExit):
        note.write_text("loading it")
        task_set = load_task_set(use, seed=seed, domain=domain)
        calls = [("task", task_set.task), *([("held_out", task_set.held_out)] if held_out else [])]
        for name, call in calls:
            for index in range(draws):
                note.write_text(f"{name}({index})")
                with contextlib.suppress(Exception, SystemExit):
                    call(index)
    note.write_text("")


if __name__ == "__main__":
    _, named, number, name_of_task, count, also_held_out = sys.argv
    main(Path(os.environ[NOTE]), named, int(number), name_of_task, int(count), held_out=also_held_out == "1")

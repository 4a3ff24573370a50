"""Loads a task set and draws its first tasks in a child process first: one that ends its process ends only that one.

`fatal_call` is called by `launch/checks.py` before the task set is loaded where the job runs. What is merely raised is
of no interest here: it is met again there.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rollart.tasks.check import how_it_ended
from rollart.tasks.load import load_task_set


def fatal_call(use: str, *, seed: int, domain: str, draws: int, held_out: bool, limit_s: float) -> str | None:
    """Which call of this task set ends its process, and how; None where none does, or not within the limit."""
    with tempfile.TemporaryDirectory(prefix="rollart-trial-") as folder:
        note = Path(folder) / "note"
        note.write_text("its start")
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    __name__,
                    str(note),
                    use,
                    str(seed),
                    domain,
                    str(draws),
                    str(int(held_out)),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        where = note.read_text()
    return f"{where} ended its process ({how_it_ended(done.returncode)})" if where else None


def main(note: Path, use: str, seed: int, domain: str, draws: int, *, held_out: bool) -> None:
    """In the child. The note says what is being called, and at the end nothing: see `rollart.tasks.check`."""
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
    _, path, named, number, name_of_task, count, also_held_out = sys.argv
    main(Path(path), named, int(number), name_of_task, int(count), held_out=also_held_out == "1")

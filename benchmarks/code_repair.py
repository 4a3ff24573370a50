"""Whether the problems of `code_repair` are what they should be: `python -m benchmarks.code_repair --tasks 200 --json`.

All problems of the catalogue, in an order of their own; `--skip` begins later in it, so that all can be played in
parts. Each is played by the scripted player, who undoes the mutation, in an environment of its own, and by players who
edit at random; hidden tests score both. `undone` and `random` are the means: 1 and 0. `found` counts problems whose
failing test really failed before the repair.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollart.tasks.api import Episode, EpisodeTurn, text_of
from rollart.tasks.code_repair import CodeRepair, Workspace, score
from rollart.types import Task


def undone(tasks: CodeRepair, task: Task) -> tuple[float, bool]:
    """The scripted player's score, and whether the test failed before."""
    rng = random.Random(task.id)
    environment = tasks.environment(task)
    try:
        seen = [environment.reset()]
        turns = []
        done = False
        while not done:
            action = tasks.scripted(task, seen, rng)
            turns.append(_turn(action))
            observation = environment.step(action)
            seen.append(text_of(observation))
            done = observation.done
    finally:
        environment.close()
    return score(Episode(id=task.id, status="done", task=task, turns=tuple(turns))), "the test passes" not in seen[1]


def at_random(task: Task, edits: int = 3) -> float:
    """The score of one who edits lines of the right file without knowing which, with lines that are there elsewhere."""
    rng = random.Random(f"{task.id}/random")
    name = task.payload["file"]
    lines = Workspace(task.payload).changed[name].splitlines()
    turns = []
    for _ in range(edits):
        number = rng.randint(1, len(lines))
        turns.append(_turn(f"edit {name} {number} {number}\n{rng.choice(lines)}"))
    return score(Episode(id=task.id, status="done", task=task, turns=tuple(turns)))


def _turn(action: str) -> EpisodeTurn:
    return EpisodeTurn(context="", text=action, tokens=1, reward=0.0)


def measure(count: int, skip: int, workers: int) -> dict[str, Any]:
    tasks = CodeRepair(domain="code_repair")
    problems = tasks.problems()
    ordered = random.Random(0).sample(problems, len(problems))[skip : skip + count]
    drawn = [
        Task(id=f"code_repair/{number}", domain="code_repair", index=number, payload=payload)
        for number, payload in enumerate(ordered, skip)
    ]

    def play(task: Task) -> tuple[float, bool, float, float]:
        began_s = time.monotonic()
        value, found = undone(tasks, task)
        return value, found, time.monotonic() - began_s, at_random(task)

    with ThreadPoolExecutor(workers) as pool:
        played = []
        for number, one in enumerate(pool.map(play, drawn), 1):
            played.append(one)
            if number % 20 == 0:
                sys.stderr.write(f"{number} of {len(drawn)}\n")
    return {
        "problems": len(problems),
        "levels": dict(sorted(Counter(row["level"] for row in problems).items())),
        "packages": dict(Counter(row["file"].partition("/")[0] for row in problems)),
        "files": len({row["file"] for row in problems}),
        "skipped": skip,
        "tried": len(drawn),
        "tried_of": dict(Counter(f"{row['file'].partition('/')[0]} level {row['level']}" for row in ordered)),
        "found": sum(found for _, found, _, _ in played),
        "undone": statistics.fmean(value for value, _, _, _ in played),
        "random": statistics.fmean(value for _, _, _, value in played),
        "not_undone": [str(task.payload) for task, one in zip(drawn, played, strict=True) if one[0] != 1.0],
        "solved_at_random": [str(task.payload) for task, one in zip(drawn, played, strict=True) if one[3] != 0.0],
        "episode_s": round(statistics.median(seconds for _, _, seconds, _ in played), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=200, help="problems that are played (default: 200)")
    parser.add_argument("--skip", type=int, default=0, help="of the order, so many are left out first")
    parser.add_argument("--workers", type=int, default=2, help="played at a time (default: 2)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = measure(args.tasks, args.skip, args.workers)
    print(json.dumps(figures, indent=2) if args.json else "\n".join(f"{k:>18}  {v}" for k, v in figures.items()))


if __name__ == "__main__":
    main()

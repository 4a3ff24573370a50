"""FrozenLake (gymnasium's, 4x4, not slippery) as text: many short turns, one word each.

Maps are drawn by gymnasium's own generator and split by the map's hash; the walk, which has no chance in it, is made
here, as gymnasium's takes ten times as long as all else that a turn does in the environment. The grid is shown again
after each move; every row ends with a newline, so that a tokenizer may hold a row as one token. Reward 1 at the goal,
else 0.
"""

import random
import re
from collections.abc import Sequence

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from rollart.tasks.api import Environment, Episode, TaskSet, observe
from rollart.types import Observation, Payload, Task

INSTRUCTION = (
    "You are P on a frozen lake. Walk to G, never onto a hole O. Answer with one word: up, down, left or right.\n"
)
STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Rows down and columns to the right."""
MOVES = tuple(STEPS)
SIZE = 4
ICE_SHARE = 0.8
MAX_MOVES = 16
"""The straight way is 6 moves; this leaves room for detours."""
_MOVE = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)
_SHOWN = {"S": ".", "F": ".", "H": "O", "G": "G"}


class FrozenLake(Environment):
    """One walk. An answer without a move in it costs a turn and moves nothing; of several moves the last counts."""

    def __init__(self, rows: Sequence[str]) -> None:
        self._rows = ["".join(_SHOWN[cell] for cell in row) for row in rows]
        self._row = self._column = 0
        """The start is in this corner of every map."""
        self._moves = 0
        self._over = False

    def reset(self) -> Observation:
        return observe(INSTRUCTION + self._shown())

    def step(self, action: str) -> Observation:
        if self._over:
            return observe(done=True)
        moves = _MOVE.findall(action)
        self._moves += 1
        if moves:
            down, right = STEPS[moves[-1].lower()]
            self._row = min(max(self._row + down, 0), SIZE - 1)
            self._column = min(max(self._column + right, 0), SIZE - 1)
        cell = self._rows[self._row][self._column]
        if cell in "OG":
            self._over = True
            return observe(reward=float(cell == "G"), done=True)
        return observe(self._shown(), truncated=self._moves >= MAX_MOVES)

    def _shown(self) -> str:
        """The map, and where on it the walk is."""
        rows, line = list(self._rows), self._rows[self._row]
        rows[self._row] = f"{line[: self._column]}P{line[self._column + 1 :]}"
        return "".join(f"{line}\n" for line in rows)


class FrozenLakeTasks(TaskSet):
    """Random maps that have a way to the goal."""

    quick = True

    def draw(self, rng: random.Random) -> Payload:
        return {"map": generate_random_map(size=SIZE, p=ICE_SHARE, seed=rng.getrandbits(31))}

    def environment(self, task: Task) -> FrozenLake:
        return FrozenLake(task.payload["map"])

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """A shortest way."""
        grid, place = _read(observations[-1])
        return min(_safe_moves(grid, place), key=lambda move: _distance(grid, move[1]))[0]

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """A random walk that avoids holes but looks for no goal."""
        grid, place = _read(observations[-1])
        return rng.choice(_safe_moves(grid, place))[0]


def score(episode: Episode) -> float:
    """1 for a walk that reached the goal."""
    return episode.reward


Place = tuple[int, int]


def _read(text: str) -> tuple[list[str], Place]:
    """The grid at the end of an observation, and where P stands."""
    grid = text.split("\n")[-SIZE - 1 : -1]
    return grid, next((row, line.index("P")) for row, line in enumerate(grid) if "P" in line)


def _safe_moves(grid: Sequence[str], place: Place) -> list[tuple[str, Place]]:
    """Moves that lead to another cell, and not into a hole."""
    moves = [(name, (place[0] + down, place[1] + right)) for name, (down, right) in STEPS.items()]
    return [
        (name, (row, column))
        for name, (row, column) in moves
        if 0 <= row < SIZE and 0 <= column < SIZE and grid[row][column] != "O"
    ]


def _distance(grid: Sequence[str], start: Place) -> int:
    """Moves from here to the goal."""
    seen, front, moves = {start}, [start], 0
    while front:
        if any(grid[row][column] == "G" for row, column in front):
            return moves
        front = [place for old in front for _, place in _safe_moves(grid, old) if place not in seen]
        front = list(dict.fromkeys(front))
        seen.update(front)
        moves += 1
    return SIZE * SIZE

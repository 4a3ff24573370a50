"""FrozenLake (gymnasium's, 4x4, not slippery) as text: many short turns, one word each.

Maps are drawn by gymnasium's own generator and split by the map's hash. The grid is shown again after each move;
every row ends with a newline, so that a tokenizer may hold a row as one token. Reward 1 at the goal, else 0.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from rollart.tasks.api import Environment, Episode, TaskSet, observe
from rollart.types import Observation, Payload, Task

INSTRUCTION = (
    "You are P on a frozen lake. Walk to G, never onto a hole O. Answer with one word: up, down, left or right.\n"
)
MOVES = ("left", "down", "right", "up")
"""In gymnasium's order."""
SIZE = 4
ICE_SHARE = 0.8
MAX_MOVES = 16
"""The straight way is 6 moves; this leaves room for detours."""
_MOVE = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)
_SHOWN = {"S": ".", "F": ".", "H": "O", "G": "G"}


class FrozenLake(Environment):
    """One walk. An answer without a move in it costs a turn and moves nothing; of several moves the last counts."""

    def __init__(self, rows: Sequence[str], seed: int = 0) -> None:
        self._rows = ["".join(_SHOWN[cell] for cell in row) for row in rows]
        self._env: Any = FrozenLakeEnv(desc=list(rows), is_slippery=False)
        self._seed = seed
        self._place = 0
        self._moves = 0
        self._over = False

    def reset(self) -> Observation:
        place, _ = self._env.reset(seed=self._seed)
        self._place = int(place)
        return observe(INSTRUCTION + self._grid())

    def step(self, action: str) -> Observation:
        if self._over:
            return observe(done=True)
        moves = _MOVE.findall(action)
        self._moves += 1
        reward = 0.0
        if moves:
            place, gain, self._over, _, _ = self._env.step(MOVES.index(moves[-1].lower()))
            self._place, reward = int(place), float(gain)
        if self._over:
            return observe(reward=reward, done=True)
        return observe(self._grid(), truncated=self._moves >= MAX_MOVES)

    def _grid(self) -> str:
        row, column = divmod(self._place, SIZE)
        rows = list(self._rows)
        rows[row] = f"{rows[row][:column]}P{rows[row][column + 1 :]}"
        return "".join(f"{line}\n" for line in rows)


class FrozenLakeTasks(TaskSet):
    """Random maps that have a way to the goal."""

    quick = True

    def draw(self, rng: random.Random) -> Payload:
        return {"map": generate_random_map(size=SIZE, p=ICE_SHARE, seed=rng.getrandbits(31))}

    def environment(self, task: Task) -> FrozenLake:
        return FrozenLake(task.payload["map"], task.seed)

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
    steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    moves = [(name, (place[0] + down, place[1] + right)) for name, (down, right) in steps.items()]
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

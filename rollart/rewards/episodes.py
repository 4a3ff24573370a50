"""From a trajectory, which holds tokens, to an episode, which holds words: what reward functions are given.

The JSON of an episode is in `rollart.tasks.api.Episode`. A reward answers `{"reward": 1.0, "parts": {...}}`, or just
a number; both are read by `score_from_json`.
"""

from collections.abc import Callable
from typing import Any

from rollart.tasks.api import Episode, EpisodeTurn, as_reward
from rollart.types import JsonObject, Score, Tokens, Trajectory

Decode = Callable[[Tokens], str]


def episode_of(trajectory: Trajectory, decode: Decode) -> Episode:
    """What a reward function may know of a trajectory."""
    return Episode(
        id=str(trajectory.id),
        status=str(trajectory.status),
        task=trajectory.task,
        turns=tuple(
            EpisodeTurn(
                context=decode(turn.context),
                text=decode(turn.completion.tokens),
                tokens=len(turn.completion.tokens),
                reward=turn.reward,
            )
            for turn in trajectory.turns
        ),
    )


def reward_to_json(value: object) -> JsonObject:
    """What a reward function returned, as JSON. Raises ValueError for nonsense."""
    reward, parts = as_reward(value)
    return {"reward": reward, "parts": parts}


def score_from_json(value: Any, *, cold_start_s: float = 0.0) -> Score:
    """The answer of a reward function. Raises ValueError for nonsense."""
    if isinstance(value, dict) and "reward" in value:
        reward, _ = as_reward(value["reward"])
        _, parts = as_reward(dict(value.get("parts") or {}))
    else:
        reward, parts = as_reward(value)
    return Score(value=reward, parts=parts, cold_start_s=cold_start_s)

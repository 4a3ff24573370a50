"""Reward functions that behave and misbehave: `said` is what the model's last words are."""

import os
import time

from rollart.tasks.api import Episode, Reward


def score(episode: Episode) -> Reward:
    match episode.task.payload["kind"]:
        case "sum":
            return episode.reward
        case "parts":
            return {"right": float(episode.answer == "b"), "short": 0.25}
        case "seen":
            assert [turn.context for turn in episode.turns] == ["x", "xx"]
            assert [turn.tokens for turn in episode.turns] == [1, 1]
            assert (episode.status, episode.id, episode.task.seed) == ("done", "g1.2.3", 7)
            return 1
        case "raise":
            raise LookupError("no reference answer")
        case "hang":
            time.sleep(3600)
        case "not a number":
            return float("inf")
        case "text":
            return "good"  # type: ignore[return-value]
        case "die":
            os._exit(9)
    return 0.0

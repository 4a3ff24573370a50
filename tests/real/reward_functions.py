"""Reward functions that a server of the tests runs: each pays what `slow_tasks.score` pays, or nothing."""

import time
import zlib

from rollart.tasks.api import Episode, Reward

SCORE_S = 0.3
"""So long that calls are under way when the server is killed."""


def slowly(episode: Episode) -> Reward:
    time.sleep(SCORE_S)
    return episode.reward


def moody(episode: Episode) -> Reward:
    """Fails for the same third of all trajectories, whenever it is asked."""
    match zlib.crc32(episode.id.encode()) % 6:
        case 0:
            raise LookupError("the table of answers is not there")
        case 1:
            return float("nan")
        case _:
            return episode.reward

"""The reward function of `benchmarks.rewards`: waits as a verifier does, with a heavy tail, and fails now and then.

It takes its seconds from the episode (`payload`), drawn anew at each call, so a second call need not be slow again.
"""

import random
import time

from rollart.tasks.api import Episode

time.sleep(0.8)  # what a verifier loads before it can answer: its tables, a proof checker

_DICE = random.Random()


def score(episode: Episode) -> float:
    payload = episode.task.payload
    time.sleep(min(payload["most_s"], _DICE.lognormvariate(payload["mu"], payload["sigma"])))
    if _DICE.random() < payload["errors"]:
        raise RuntimeError("the verifier lost its way")
    return float(payload["number"] % 7)

"""The game of `slow_tasks`, scored by a function that never comes back and never lets go of the interpreter."""

import re

from rollart.tasks.api import Episode
from tests.real.slow_tasks import SlowTasks


class StuckTasks(SlowTasks):
    pass


def score(episode: Episode) -> float:
    return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))

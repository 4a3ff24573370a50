"""When each trajectory and each task last moved, and how long one usually takes from move to move.

A trajectory moves when its environment, the model or its reward answers. Kept by the env manager, read by the watchdog.
Invariant: holds the attempts under way, and none that ended.
"""

import asyncio

from rollart.policy.stalls import Part

WEIGHT = 0.05
"""Of the newest gap in the running mean of a task's gaps."""


class Mover:
    """One attempt under way."""

    __slots__ = ("key", "moved_s", "pace")

    def __init__(self, key: str, pace: "Pace", moved_s: float) -> None:
        self.key = key
        self.pace = pace
        self.moved_s = moved_s


class Pace:
    """Of one task."""

    __slots__ = ("live", "moved_s", "task", "usual_s")

    def __init__(self, task: str) -> None:
        self.task = task
        self.live = 0
        self.moved_s = 0.0
        self.usual_s = 0.0


class Movement:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._live: dict[Mover, None] = {}
        self._paces: dict[str, Pace] = {}

    def begin(self, key: str, task: str) -> Mover:
        now_s = self._loop.time()
        pace = self._paces.get(task)
        if pace is None:
            pace = self._paces[task] = Pace(task)
        if not pace.live:
            pace.moved_s = now_s  # it had nothing to move
        pace.live += 1
        mover = Mover(key, pace, now_s)
        self._live[mover] = None
        return mover

    def moved(self, mover: Mover) -> None:
        now_s = self._loop.time()
        pace = mover.pace
        gap_s = now_s - mover.moved_s
        mover.moved_s = pace.moved_s = now_s
        pace.usual_s = gap_s if not pace.usual_s else pace.usual_s + WEIGHT * (gap_s - pace.usual_s)

    def end(self, mover: Mover) -> None:
        mover.pace.live -= 1
        del self._live[mover]

    def parts(self, engine_of: dict[str, str]) -> list[Part]:
        """Tasks and trajectories as they stand. `engine_of`: the engine that an attempt's call is in."""
        now_s = self._loop.time()
        tasks = [
            Part(
                kind="task",
                name=pace.task,
                still_s=now_s - pace.moved_s if pace.live else 0.0,
                usual_s=pace.usual_s,
            )
            for pace in self._paces.values()
        ]
        trajectories = [
            Part(
                kind="trajectory",
                name=mover.key,
                still_s=now_s - mover.moved_s,
                usual_s=mover.pace.usual_s,
                among=mover.pace.task,
                within=(mover.pace.task, engine_of.get(mover.key, "")),
            )
            for mover in self._live
        ]
        return tasks + trajectories

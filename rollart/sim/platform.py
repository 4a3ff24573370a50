"""The instances of a platform that runs reward functions: which call finds one warm, starts one, or waits for one.

Calls are served in the order in which they come, as far as the quota reaches. Those of other jobs are not events: they
are worked out when one of ours asks what is free.
"""

import heapq
import math
from collections import deque

from rollart.config.sim import SimRewardSettings
from rollart.sim.dice import Dice


class Platform:
    def __init__(self, sim: SimRewardSettings, dice: Dice, name: str, now_s: float) -> None:
        """`name`: of these calls of others, among all random draws."""
        self._sim = sim
        self._dice = dice
        self._name = name
        self._busy: list[float] = []
        """When each instance at work is free; a heap."""
        self._warm: deque[float] = deque()
        """Since when each idle instance is; the latest last."""
        self._others = 0
        self._other_s = now_s
        if sim.others_per_s:
            self._next_other()

    def take(self, now_s: float, busy_s: float) -> tuple[float, float]:
        """(when the call starts, of what follows the seconds in which an instance starts)."""
        while self._sim.others_per_s and self._other_s <= now_s:
            self._serve(self._other_s, self._dice.draw(self._sim.others_s, f"{self._name}/others/{self._others}/s"))
            self._next_other()
        return self._serve(now_s, busy_s)

    def stop(self) -> None:
        """It is down, and its instances with it."""
        self._busy.clear()
        self._warm.clear()

    def _serve(self, at_s: float, busy_s: float) -> tuple[float, float]:
        """The instance used last, which is the warmest; a new one where none is warm; else the first that is free."""
        start_s, cold_s = at_s, 0.0
        while self._busy and self._busy[0] <= at_s:
            self._warm.append(heapq.heappop(self._busy))
        while self._warm and self._warm[0] < at_s - self._sim.idle_s:
            self._warm.popleft()
        if self._warm:
            self._warm.pop()
        elif self._sim.quota is None or len(self._busy) < self._sim.quota:
            cold_s = self._sim.cold_start_s
        else:
            start_s = heapq.heappop(self._busy)
        heapq.heappush(self._busy, start_s + cold_s + busy_s)
        return start_s, cold_s

    def _next_other(self) -> None:
        """They come at random: the time between two of them is exponential."""
        self._others += 1
        chance = self._dice.uniform(f"{self._name}/others/{self._others}")
        self._other_s -= math.log(chance) / self._sim.others_per_s

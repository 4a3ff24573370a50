"""What every RewardBackend must do: one suite, run against each adapter."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollart.ports import RewardBackend
from rollart.types import Score, Trajectory


@dataclass
class RewardBench:
    backend: RewardBackend
    trajectory: Callable[[int], Trajectory]
    """Number n, always the same."""
    places: int
    """Calls it works on at a time."""


class RewardContract(ABC):
    @abstractmethod
    def play(self, work: Callable[[RewardBench], Awaitable[None]]) -> None: ...

    def test_a_score_is_a_finite_number(self) -> None:
        async def work(bench: RewardBench) -> None:
            score = await bench.backend.score(bench.trajectory(0))
            assert isinstance(score, Score)
            assert math.isfinite(score.value)
            assert score.cold_start_s >= 0

        self.play(work)

    def test_the_same_trajectory_earns_the_same_whenever_it_is_asked_for(self) -> None:
        async def work(bench: RewardBench) -> None:
            first = [(await bench.backend.score(bench.trajectory(number))).value for number in range(6)]
            again = await asyncio.gather(*(bench.backend.score(bench.trajectory(number)) for number in range(6)))
            assert [score.value for score in again] == first

        self.play(work)

    def test_more_calls_than_places_are_all_answered(self) -> None:
        async def work(bench: RewardBench) -> None:
            calls = (bench.backend.score(bench.trajectory(number)) for number in range(3 * bench.places))
            assert len(await asyncio.gather(*calls)) == 3 * bench.places

        self.play(work)

    def test_a_call_given_up_leaves_its_place(self) -> None:
        async def work(bench: RewardBench) -> None:
            calls = [
                asyncio.ensure_future(bench.backend.score(bench.trajectory(number)))
                for number in range(2 * bench.places)
            ]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await bench.backend.score(bench.trajectory(0))

        self.play(work)

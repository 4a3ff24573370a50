"""What affinity is told: which groups live where, and what trajectories needed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollart.control.affinity import AffinityDriver, needs
from rollart.control.fleet import engines_up
from rollart.types import Completion, Finish, Span, Status, Task, Trajectory, TrajectoryId, Turn


class Told:
    """An affinity that writes down what it is told, and wants pool `a`, then `b`."""

    def __init__(self) -> None:
        self.living: list[dict[str, int]] = []
        self.seen_of: list[str] = []
        self.up: dict[str, int] = {}

    def first(self) -> None:
        return None

    def place(self, task: str, living: Any = None) -> tuple[str, ...]:
        self.living.append(dict(living or {}))
        return ("a", "b")

    def seen(self, task: str, profile: Any) -> None:
        self.seen_of.append(task)

    def engines(self, up: dict[str, int]) -> None:
        self.up = up


@pytest.fixture
def told() -> Told:
    return Told()


def affinity(told: Any) -> AffinityDriver:
    return AffinityDriver(told, SimpleNamespace(emit=lambda event: 0))  # type: ignore[arg-type]


def test_a_group_lives_on_its_pool_until_it_left(told: Told) -> None:
    place = affinity(told)
    for _ in range(2):
        place.admit("lake")
    place.left("lake", "a")
    place.admit("lake")
    place.admit("maths")
    assert told.living == [{}, {"a": 1}, {"a": 1}, {}]


def trajectory(status: Status, *turns: tuple[int, int, bool]) -> Trajectory:
    """Turns of (context tokens, answer tokens, fresh)."""
    return Trajectory(
        id=TrajectoryId("g0", 0, 0),
        task=Task(id="lake/0", domain="lake", index=0),
        turns=tuple(
            Turn(
                context=np.zeros(context, dtype=np.int32),
                fresh=fresh,
                completion=Completion(
                    tokens=np.zeros(answer, dtype=np.int32),
                    logprobs=np.zeros(answer, dtype=np.float32),
                    spans=(Span(0, answer),),
                    finish=Finish.STOP,
                    engine="a-0",
                ),
                generate_s=1.0,
            )
            for context, answer, fresh in turns
        ),
        status=status,
        born=0,
        oldest=0,
        started_s=10.0,
        ended_s=20.0,
    )


@pytest.mark.parametrize(
    ("status", "measured"),
    [(Status.DONE, True), (Status.TRUNCATED, True), (Status.STALE, True), (Status.ABORTED, False)],
)
def test_a_trajectory_that_was_cancelled_says_nothing_of_its_task(status: Status, measured: bool, told: Told) -> None:
    affinity(told).measure(trajectory(status, (5, 2, True)))
    affinity(told).measure(trajectory(status))
    assert told.seen_of == ["lake"] * measured


def test_a_rewritten_history_is_a_prompt_of_its_own() -> None:
    profile = needs(trajectory(Status.DONE, (10, 2, True), (3, 2, False), (8, 2, True)))
    assert (profile.new_tokens, profile.prompt_tokens, profile.decode_tokens) == (21, 10 + 15 + 8, 6)
    assert profile.context_tokens == (12 + 17 + 10) / 3
    assert profile.elsewhere_s == 10.0 - 3.0


def test_an_engine_counts_while_it_is_up_though_it_may_be_suspended() -> None:
    pools: Any = {"a": [SimpleNamespace(up=True, serving=False), SimpleNamespace(up=False, serving=False)], "b": []}
    assert engines_up(pools) == {"a": 1, "b": 0}


def test_affinity_is_told_which_engines_are_up(told: Told) -> None:
    affinity(told).engines_changed({"a": 1, "b": 0}, -1)
    assert told.up == {"a": 1, "b": 0}

"""Which parts stand still while their peers move, and when that is told."""

import pytest

from rollart.policy.stalls import MOST, Lag, Part, lagging, to_name


def engines(*still_s: float) -> list[Part]:
    return [Part(kind="engine", name=f"e{number}", still_s=age) for number, age in enumerate(still_s)]


def names(parts: list[Part], least_s: float = 100.0) -> list[str]:
    return [lag.part.name for lag in lagging(parts, least_s)]


@pytest.mark.parametrize(
    ("still_s", "found"),
    [
        ((500.0, 10.0, 20.0), ["e0"]),
        ((500.0, 10.0), ["e0"]),
        ((90.0, 0.0, 0.0), []),  # not for long enough
        ((500.0, 60.0, 70.0), []),  # not far longer than its peers
        ((500.0,), []),  # it has none
        ((500.0, 500.0, 500.0), []),  # all stand still: that is a stall of the whole
        ((500.0, 600.0, 1.0, 2.0, 3.0), ["e1", "e0"]),  # the longest first
        ((500.0, 600.0, 1.0), ["e1", "e0"]),  # half of the others move
        ((500.0, 600.0, 700.0, 1.0), []),  # most stand still
    ],
)
def test_a_part_lags_that_has_not_moved_for_far_longer_than_its_peers(
    still_s: tuple[float, ...], found: list[str]
) -> None:
    assert names(engines(*still_s)) == found


def test_what_is_usual_for_its_kind_is_no_lag() -> None:
    def slow(usual_s: float) -> list[Part]:
        return [
            Part(kind="task", name="slow", still_s=500.0, usual_s=usual_s),
            Part(kind="task", name="fast", still_s=1.0, usual_s=1.0),
        ]

    assert names(slow(49.0)) == ["slow"]
    assert names(slow(51.0)) == []


def test_the_last_of_its_kind_is_held_against_what_was_usual() -> None:
    assert names([Part(kind="trajectory", name="t", still_s=500.0, usual_s=2.0, among="a")]) == ["t"]
    assert names([Part(kind="trajectory", name="t", still_s=500.0, usual_s=200.0, among="a")]) == []


def test_a_part_that_has_nothing_to_do_is_a_peer_that_does_not_stand_still() -> None:
    assert names(engines(500.0, 0.0)) == ["e0"]


def test_trajectories_are_held_against_those_of_their_task() -> None:
    def part(name: str, task: str, still_s: float) -> Part:
        return Part(kind="trajectory", name=name, still_s=still_s, among=task, within=(task, ""))

    slow = [part("s0", "slow", 300.0), part("s1", "slow", 250.0), part("s2", "slow", 200.0)]
    fast = [part("f0", "fast", 300.0), part("f1", "fast", 1.0), part("f2", "fast", 2.0)]
    assert names([*slow, *fast]) == ["f0"]


def test_what_a_named_engine_or_task_explains_is_not_named_beside_it() -> None:
    parts = engines(500.0, 1.0, 1.0)
    parts += [Part(kind="trajectory", name=f"t{number}", still_s=1.0) for number in range(5)]
    parts += [Part(kind="trajectory", name="in e0", still_s=500.0, within=("a", "e0"))]
    parts += [Part(kind="trajectory", name="in e1", still_s=500.0, within=("a", "e1"))]
    assert names(parts) == ["e0", "in e1"]


def lags(*still_s: float) -> list[Lag]:
    return [Lag(part=part, peers_s=1.0) for part in engines(*still_s)]


def told(found: list[Lag], named: dict[str, float] | None = None, quiet_s: float = 1e9) -> list[str]:
    return [lag.part.name for lag in to_name(found, named or {}, quiet_s, 100.0)]


def test_a_part_is_named_again_when_it_has_stood_still_for_twice_as_long() -> None:
    assert told(lags(150.0)) == ["e0"]
    assert told(lags(290.0), {"e0": 150.0}) == []
    assert told(lags(300.0), {"e0": 150.0}) == ["e0"]


def test_few_are_named_at_a_time() -> None:
    assert len(told(lags(*[500.0] * 10))) == MOST


def test_trajectories_are_named_now_and_then_only() -> None:
    slow = [Lag(part=Part(kind="trajectory", name="t", still_s=500.0), peers_s=1.0)]
    assert told(slow + lags(500.0), quiet_s=900.0) == ["e0"]
    assert told(slow + lags(500.0), quiet_s=1100.0) == ["t", "e0"]

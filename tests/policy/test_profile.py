"""Profiles: a long average that noise does not move, and that a real change replaces at once."""

import random
from dataclasses import replace

import pytest

from rollart.policy.profile import MEMORY, UNKNOWN, WINDOW, Meter, TaskProfile


def needed(decode: float, new: float = 1000.0, turns: float = 4.0) -> TaskProfile:
    return TaskProfile(
        prompt_tokens=2 * new,
        new_tokens=new,
        cached_tokens=new,
        prefill_tokens=new,
        decode_tokens=decode,
        decode_squares=decode**2,
        turns=turns,
        context_tokens=new + decode,
        elsewhere_s=1.0,
    )


def test_the_first_trajectories_count_evenly_and_later_ones_by_memory() -> None:
    profile = UNKNOWN
    for tokens in (100, 200, 300):
        profile = profile.seen(needed(tokens))
    assert profile.decode_tokens == pytest.approx(200)
    assert profile.decode_spread == pytest.approx((2 / 3) ** 0.5 * 100 / 200)
    for _ in range(300):
        profile = profile.seen(needed(200))
    assert profile.seen(needed(1200)).decode_tokens == pytest.approx(
        profile.decode_tokens + (1200 - profile.decode_tokens) / MEMORY
    )
    assert profile.trajectories == 303


def test_the_slowest_of_more_members_takes_longer() -> None:
    even, uneven = needed(100), replace(needed(100), decode_squares=20_000.0)
    assert even.straggle(8) == 1.0
    assert 1.0 == uneven.straggle(1) < uneven.straggle(4) < uneven.straggle(16)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_change(seed: int) -> None:
    rng, meter = random.Random(seed), Meter()
    changes = [
        meter.add(needed(rng.lognormvariate(7, 0.6), rng.lognormvariate(8, 0.5), rng.randint(1, 9)))
        for _ in range(100 * WINDOW)
    ]
    assert not any(changes)


@pytest.mark.parametrize("seed", range(5))
def test_a_change_is_seen_within_two_windows_and_the_old_average_forgotten(seed: int) -> None:
    rng, meter = random.Random(seed), Meter()
    for _ in range(10 * WINDOW):
        meter.add(needed(rng.lognormvariate(5, 0.6)))
    assert any(meter.add(needed(rng.lognormvariate(7, 0.6))) for _ in range(2 * WINDOW))
    for _ in range(WINDOW):
        meter.add(needed(rng.lognormvariate(7, 0.6)))
    assert meter.profile.decode_tokens == pytest.approx(1313, rel=0.35)


def waves(meter: Meter, steps: int, size: int) -> tuple[list[float], int]:
    """Steps of a task that does not change; in each, short trajectories end first. The average after every
    trajectory of the last two steps, and how often the task was taken for changed."""
    averages: list[float] = []
    changes = 0
    for step in range(steps):
        rng = random.Random(step)
        for decode in sorted(rng.lognormvariate(7, 0.6) for _ in range(size)):
            changes += meter.add(needed(decode))
            if step >= steps - 2:
                averages.append(meter.profile.decode_tokens)
    return averages, changes


def test_short_ones_that_end_first_are_no_change_and_do_not_move_the_average() -> None:
    averages, changes = waves(Meter(200), 12, 200)
    assert changes == 0
    assert max(averages) < 1.15 * min(averages)
    assert waves(Meter(), 12, 200)[1] > 10, "what a step holds must be known"


def test_a_certain_but_small_change_is_none() -> None:
    meter = Meter()
    for _ in range(10 * WINDOW):
        meter.add(needed(1000))
    assert not any(meter.add(needed(1050)) for _ in range(4 * WINDOW))

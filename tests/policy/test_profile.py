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
        profile.decode_tokens + MEMORY * (1200 - profile.decode_tokens)
    )
    assert profile.trajectories == 303


def test_the_slowest_of_more_members_takes_longer() -> None:
    even, uneven = needed(100), replace(needed(100), decode_squares=20_000.0)
    assert even.straggle(8) == 1.0
    assert 1.0 == uneven.straggle(1) < uneven.straggle(4) < uneven.straggle(16)

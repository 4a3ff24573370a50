"""When weights change, and how many engines at a time."""

import pytest

from rollart.policy.swap import SwapPlan, may_start, plan, waves


@pytest.mark.parametrize(
    ("name", "before", "after", "published", "drains"),
    [
        ("after_batch", True, False, False, False),
        ("drain", True, False, False, True),
        ("between_batches", False, True, False, False),
        ("when_published", False, False, True, False),
    ],
)
def test_each_setting_taken_apart(name: str, before: bool, after: bool, published: bool, drains: bool) -> None:
    assert plan(name, 3) == SwapPlan(
        before_step=before, after_step=after, when_published=published, drains=drains, rolling=3
    )


def test_waves_hold_every_engine_once_in_order() -> None:
    engines = ["a", "b", "c", "d", "e"]
    assert waves(engines, 0) == [engines]
    assert waves(engines, 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert waves(engines, 9) == [engines]
    assert waves([], 0) == []
    assert waves([], 2) == []


def test_a_step_starts_only_when_the_engines_are_at_most_one_version_behind() -> None:
    assert may_start(0, 0)
    assert may_start(3, 2)
    assert may_start(3, 3)
    assert not may_start(3, 1)

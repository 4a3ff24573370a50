"""A group's books: how old it is."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollart.config.settings import TaskSettings
from rollart.control.groups import GroupInProgress, Member
from rollart.types import Task


def member(*, running: int | None = None, scored: int | None = None) -> Member:
    """One whose attempt under way, or whose scored trajectory, was born under that version."""
    found: Any = Member()
    found.attempt = SimpleNamespace(born=running)
    found.trajectory = SimpleNamespace(born=scored) if scored is not None else None
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("members", "born"),
    [
        ([member(running=3), member(running=1), member(running=2)], 1),
        ([member(running=3), member(scored=1), member(running=2)], 1),
        ([member(running=1), member(scored=3)], 1),
        ([member(running=None), member(running=2)], 2),
        ([member(running=None), member(running=None)], None),
    ],
)
def test_a_group_is_as_old_as_its_oldest_member_under_way_or_scored(members: list[Member], born: int | None) -> None:
    task = Task(id="a/0", domain="a", index=0)
    assert GroupInProgress("g0", task, TaskSettings(name="a"), members, 0.0).born == born

"""What is too old, and how many groups may live."""

import pytest

from rollart.policy.admission import Slots, is_stale


@pytest.mark.parametrize(
    ("born", "serving", "bound", "stale"),
    [(None, 9, 0, False), (3, 3, 0, False), (2, 3, 0, True), (2, 3, 1, False), (1, 3, 1, True), (0, 3, 3, False)],
)
def test_too_old_means_more_versions_behind_than_the_bound(
    born: int | None, serving: int, bound: int, stale: bool
) -> None:
    assert is_stale(born, serving, bound) is stale


def test_a_slot_is_free_at_once_when_its_group_dies_untrained() -> None:
    slots = Slots(2)
    slots.admit("a")
    slots.admit("b")
    assert (slots.alive, slots.room) == (2, 0)
    slots.died("a")
    assert (slots.alive, slots.room) == (1, 1)


def test_a_trained_groups_slot_is_free_at_the_first_swap_after_it_was_taken_and_not_before() -> None:
    slots = Slots(3)
    for name in ("a", "b", "c"):
        slots.admit(name)
    assert slots.swapped() == 0, "none was taken yet"
    slots.taken(["a", "b"])
    assert slots.room == 0
    assert slots.swapped() == 2
    assert (slots.alive, slots.room) == (1, 2)
    assert slots.swapped() == 0, "freed once"


def test_to_admit_beyond_the_slots_is_a_programming_error() -> None:
    slots = Slots(1)
    slots.admit("a")
    with pytest.raises(AssertionError, match="no slot for b"):
        slots.admit("b")

"""Shares at admission and at consumption; what is given out again; what starves."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.mix import STARVING_WINDOW, Mix, oldest_first, shares
from rollart.types import MixState


def mix(target: dict[str, float], size: int = 4, tolerance: float = 0.25) -> Mix:
    return Mix(target, size, tolerance)


HALVES = {"a": 0.5, "b": 0.5}
QUARTERS = {"a": 0.75, "b": 0.25}


def test_weights_divide_what_quotas_leave() -> None:
    found = shares({"a": 1.0, "b": 3.0, "c": 5.0}, {"a": None, "b": None, "c": 2}, 8)
    assert found == pytest.approx({"a": 0.75 * 0.25, "b": 0.75 * 0.75, "c": 0.25})
    assert shares({"a": 2.0}, {}, 4) == {"a": 1.0}
    assert shares({"a": 1.0, "b": 1.0}, {"a": 3, "b": 1}, 4) == {"a": 0.75, "b": 0.25}


def test_admission_keeps_the_shares_and_walks_each_task_set_in_order() -> None:
    tasks = mix(QUARTERS)
    given_out = [tasks.next() for _ in range(40)]
    assert Counter(name for name, _ in given_out) == {"a": 30, "b": 10}
    assert [index for name, index in given_out if name == "b"] == list(range(10))
    for end in range(4, 41, 4):
        assert Counter(name for name, _ in given_out[:end])["b"] == end // 4


def test_the_first_group_is_of_the_task_with_the_largest_share() -> None:
    assert mix({"small": 0.25, "large": 0.75}).next() == ("large", 0)


def test_admission_makes_up_for_groups_that_died() -> None:
    tasks = mix(HALVES)
    for _ in range(4):
        tasks.next()
    tasks.died("a", 0, again=False)
    assert tasks.next()[0] == "a"


def test_returned_tasks_come_before_new_ones() -> None:
    tasks = mix({"a": 1.0})
    assert [tasks.next()[1] for _ in range(3)] == [0, 1, 2]
    tasks.died("a", 1, again=True, stale=True)
    tasks.died("a", 0, again=True)
    tasks.died("a", 2, again=False)
    assert [tasks.next()[1] for _ in range(3)] == [1, 0, 3]


def test_a_batch_is_the_one_nearest_to_the_shares() -> None:
    assert mix(HALVES).pick({"a": 9, "b": 9}) == {"a": 2, "b": 2}
    assert mix(QUARTERS).pick({"a": 9, "b": 9}) == {"a": 3, "b": 1}
    assert mix(QUARTERS, size=3).pick({"a": 9, "b": 9}) == {"a": 2, "b": 1}


def test_a_batch_may_differ_from_the_shares_within_the_tolerance_and_no_further() -> None:
    tasks = mix(HALVES, size=8)
    assert tasks.pick({"a": 9, "b": 2}) == {"a": 6, "b": 2}
    assert tasks.pick({"a": 9, "b": 1}) is None
    assert tasks.pick({"a": 9}) is None


def test_a_batch_may_always_be_one_group_off() -> None:
    """A tolerance of less than a group would let a batch wait forever for the one group that is missing."""
    assert mix({"a": 0.5, "b": 0.5}, size=4, tolerance=0.0).pick({"a": 3, "b": 1}) == {"a": 3, "b": 1}
    assert mix({"a": 0.5, "b": 0.5}, size=4, tolerance=0.0).pick({"a": 4, "b": 0}) is None


def test_what_one_batch_owes_the_next_one_pays() -> None:
    tasks = mix(HALVES, size=8)
    tasks.consumed({"a": 6, "b": 2})
    assert tasks.pick({"a": 9, "b": 9}) == {"a": 2, "b": 6}
    assert tasks.pick({"a": 9, "b": 3}) is None


def test_too_few_ready_groups_are_no_batch_unless_it_may_be_short() -> None:
    tasks = mix(HALVES)
    assert tasks.pick({"a": 1, "b": 1}) is None
    assert tasks.pick({"a": 2, "b": 1}, relaxed=True) is None
    assert tasks.pick({"a": 2, "b": 1}, relaxed=True, short=True) == {"a": 2, "b": 1}
    assert tasks.pick({}, relaxed=True, short=True) is None
    assert tasks.pick({"a": 9}, relaxed=True) == {"a": 4}


def test_a_resumed_mix_gives_out_what_the_first_one_would_have() -> None:
    tasks = mix(QUARTERS)
    for _ in range(12):
        tasks.next()
    tasks.died("a", 3, again=True)
    tasks.consumed({"a": 3, "b": 1})
    again = mix(QUARTERS)
    again.restore(tasks.state())
    for name, count in (("a", 5), ("b", 2)):
        for _ in range(count):
            again.readmitted(name)
    assert [again.next() for _ in range(20)] == [tasks.next() for _ in range(20)]
    assert again.state() == tasks.state()


def test_a_quota_is_kept_in_every_batch_exactly() -> None:
    target = shares({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1, "b": None, "c": None}, 4)
    tasks = Mix(target, 4, 0.5, {"a": 1})
    assert tasks.pick({"b": 9, "c": 9}) is None, "not without the one"
    for _ in range(5):
        picked = tasks.pick({"a": 9, "b": 9, "c": 9})
        assert picked is not None
        assert picked["a"] == 1, "and never two"
        tasks.consumed(picked)
    assert tasks.pick({"b": 9}, relaxed=True) == {"b": 4}


def test_a_task_trained_on_since_the_checkpoint_is_never_given_out_again() -> None:
    tasks = mix({"a": 1.0})
    tasks.restore({"a": MixState(cursor=4, returned=(1, 2), consumed=2, skip=(9,))})
    tasks.trained_before("a", 2)  # was to be given out again
    tasks.trained_before("a", 3)  # was alive at the checkpoint
    tasks.trained_before("a", 5)  # was given out since
    assert tasks.state()["a"] == MixState(cursor=4, returned=(1,), consumed=5, skip=(5, 9))
    assert [tasks.next()[1] for _ in range(6)] == [1, 4, 6, 7, 8, 10]


def test_a_task_that_nearly_always_goes_stale_is_named_with_the_bound_it_needs() -> None:
    tasks = mix(HALVES)
    tasks.took_s("a", 35.0)
    tasks.took_s("a", 10.0)

    def end(name: str, stale: bool) -> None:
        tasks.next()
        tasks.died(name, 0, again=False, stale=stale)

    for number in range(STARVING_WINDOW):
        assert tasks.starving(10.0) == [], "not before enough have ended"
        end("a", stale=number % 5 > 0)
    assert tasks.starving(10.0) == [("a", 4)]
    assert tasks.starving(0.0) == [("a", 1)]
    tasks.consumed({"a": 1})
    assert tasks.starving(10.0) == [("a", 4)], "the oldest of the window was no stale one"
    tasks.consumed({"a": 1})
    assert tasks.starving(10.0) == []


def test_the_oldest_are_taken_first_and_of_equals_the_first() -> None:
    assert oldest_first([(2, "x"), (1, "y"), (2, "z"), (1, "w")], 3) == ["y", "w", "x"]


@settings(max_examples=150, deadline=None)
@given(
    weights=st.lists(st.floats(0.05, 10.0), min_size=1, max_size=5),
    size=st.integers(1, 12),
    bound=st.integers(0, 3),
    spare=st.integers(0, 3),
    tolerance=st.floats(0.0, 0.5),
    seed=st.integers(0, 10_000),
)
def test_shares_hold_at_consumption_within_the_tolerance_and_nothing_ever_deadlocks(
    weights: list[float], size: int, bound: int, spare: int, tolerance: float, seed: int
) -> None:
    """Groups become ready in any order or die; slots are filled again; batches are taken when they can be.

    A batch is forced (`relaxed`) only where all slots hold ready groups, as the rollout driver does it.
    """
    rng = random.Random(seed)
    names = [f"t{number}" for number in range(len(weights))]
    target = shares(dict(zip(names, weights, strict=True)), {}, size)
    tasks = Mix(target, size, tolerance)
    slots = (bound + 1) * size + spare
    growing: list[tuple[str, int]] = []
    ready: Counter[str] = Counter()
    consumed: Counter[str] = Counter()
    slack = max(1.0, tolerance * size)
    relaxed_before = False
    for _ in range(400):
        while len(growing) + ready.total() < slots:
            growing.append(tasks.next())
        picked = tasks.pick(ready)
        if picked is None and not growing:
            picked = tasks.pick(ready, relaxed=True)
            assert picked is not None, "all slots are ready, and still no batch: a deadlock"
            relaxed_before = True
        if picked is not None:
            assert sum(picked.values()) == size
            assert all(ready[name] >= count for name, count in picked.items())
            tasks.consumed(picked)
            ready.subtract(picked)
            consumed.update(picked)
            if not relaxed_before:
                for name in names:
                    assert abs(consumed[name] - target[name] * consumed.total()) <= slack + 1.0 + 1e-6
            continue
        name, index = growing.pop(rng.randrange(len(growing)))
        if rng.random() < 0.2:
            tasks.died(name, index, again=rng.random() < 0.5, stale=True)
        else:
            ready[name] += 1
    assert consumed.total()


THREE = {"a": 0.5, "b": 0.3, "c": 0.2}


def test_the_share_of_a_task_that_is_out_goes_to_the_others() -> None:
    tasks = mix(THREE, size=10)
    tasks.put_out(["a"])
    assert Counter(tasks.next()[0] for _ in range(50)) == {"b": 30, "c": 20}
    assert tasks.pick({"b": 30, "c": 20}) == {"b": 6, "c": 4}, "and nobody waits for it"


def test_a_task_that_is_out_is_given_out_when_asked_for_by_name() -> None:
    tasks = mix(THREE)
    assert [tasks.draw("a"), tasks.draw("a")] == [0, 1]
    tasks.put_out(["a", "b", "c"])
    assert tasks.empty
    assert tasks.draw("a") == 2
    tasks.put_out([])
    assert not tasks.empty


def test_a_task_that_comes_back_has_its_share_and_is_owed_nothing() -> None:
    tasks = mix(HALVES, size=8)
    tasks.put_out(["a"])
    for _ in range(20):
        assert {tasks.next()[0] for _ in range(8)} == {"b"}
        tasks.consumed({"b": 8})
    tasks.put_out([])
    assert tasks.pick({"a": 9, "b": 9}) == {"a": 4, "b": 4}
    assert Counter(tasks.next()[0] for _ in range(8)) == {"a": 4, "b": 4}


def test_what_is_ready_of_a_task_that_is_out_is_used_up_and_not_waited_for() -> None:
    tasks = mix(HALVES, size=8)
    tasks.put_out(["a"])
    picked = tasks.pick({"a": 2, "b": 9})
    assert picked is not None
    assert picked.get("a", 0) > 0
    assert tasks.pick({"b": 8}) == {"b": 8}


def test_quotas_give_way_only_where_nobody_else_is_left() -> None:
    quotas = {"a": 2, "b": 1, "c": None}
    target = shares({"a": 1.0, "b": 1.0, "c": 1.0}, quotas, 6)
    tasks = Mix(target, 6, 0.0, quotas)
    tasks.put_out(["a"])
    assert tasks.pick({"b": 9, "c": 9}) == {"b": 1, "c": 5}
    tasks.put_out(["c"])
    assert tasks.pick({"a": 9, "b": 9}) == {"a": 4, "b": 2}, "two to one, as before"
    tasks.put_out(["b", "c"])
    assert tasks.pick({"a": 9}) == {"a": 6}
    tasks.put_out([])
    assert tasks.pick({"a": 9, "b": 9, "c": 9}) == {"a": 2, "b": 1, "c": 3}


def test_an_index_that_could_not_be_drawn_is_passed_over_and_leaves_no_group_alive() -> None:
    tasks = mix(HALVES)
    first = tasks.next()
    tasks.not_drawn(first[0])
    again = tasks.next()
    assert again == (first[0], first[1] + 1), "as if it had never been given out"

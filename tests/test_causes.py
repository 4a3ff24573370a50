"""Reasons are counted by cause, whatever ids and numbers they hold, and in bounded memory."""

import pytest

from rollart.causes import MAX_CAUSES, MAX_CHARACTERS, OTHERS, Causes, kind_of
from rollart.events import schema
from rollart.report.fold import WARNINGS_KEPT, SummaryFold

SAME = [
    ("EnvError: g12.3.0 at 10.0.0.7 said no", "EnvError: g7r1.0.101 at 10.0.0.19 said no"),
    ("the reward float nan at <object at 0x7f5f821f8ee0>", "the reward float nan at <object at 0x7e11>"),
    ("no answer in 30 s", "no answer in 4.5 s"),
    ("row 1e-05 is bad", "row -17 is bad"),
    ("session 3f2504e0-4f89-11d3-9a0c-0305e82c3301 is gone", "session 5a2504e0-4f89-41d3-9a0c-0305e82c33ff is gone"),
    ("its process died; its stderr:\nTraceback a", "its process died; its stderr:\nTraceback b"),
    ("eval0-sampled-maths.3.0 failed", "eval12-sampled-maths.4.0 failed"),
]
DIFFERENT = [
    ("EnvError: no machine", "EnvError: no room"),
    ("answered HTTP 404", "answered HTTP 500"),
    ("exited with status 1", "exited with status 2"),
    ("was ended by signal 9", "was ended by signal 11"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_texts_that_differ_in_ids_numbers_and_addresses_are_one_cause(one: str, other: str) -> None:
    assert kind_of(one) == kind_of(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_causes_that_differ_are_told_apart(one: str, other: str) -> None:
    assert kind_of(one) != kind_of(other)


def test_the_most_frequent_comes_first_with_its_count_and_its_first_text() -> None:
    causes = Causes()
    causes.add("once")
    for number in range(744):
        causes.add(f"attempt g{number}.0.0 returned the reward float nan\nmore")
    assert causes.total == 745
    assert causes.words() == "744 x attempt g0.0.0 returned the reward float nan"
    assert [cause.times for cause in causes.top(5)] == [744, 1]
    assert Causes().words() == ""


def test_memory_is_bounded_however_many_texts_there_are() -> None:
    causes = Causes()
    for number in range(5000):
        causes.add("x" * (number % 1000) + "y" * 9999)
    found = causes.top(10**6)
    assert len(found) == MAX_CAUSES + 1
    assert sum(cause.times for cause in found) == 5000
    assert found[0].text == OTHERS
    assert max(len(cause.text) for cause in found) == MAX_CHARACTERS


def test_a_summary_keeps_the_first_warnings_and_counts_the_others() -> None:
    summary = SummaryFold()
    for number in range(WARNINGS_KEPT + 3):
        summary.read(schema.Warning(n=number, t=0.0, text=f"warning {number}"))
    kept = summary.result().warnings
    assert kept[0] == "warning 0"
    assert kept[WARNINGS_KEPT - 1 :] == [f"warning {WARNINGS_KEPT - 1}", "and 3 more"]

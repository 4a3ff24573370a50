"""What becomes of a group when a member ends: the whole table."""

import pytest

from rollart.policy.redundancy import Count, GroupVerdict, backoff_s, judge, surplus
from rollart.types import Status

D, F, S, A, T = Status.DONE, Status.FAILED, Status.STALE, Status.ABORTED, Status.TRUNCATED

TABLE = [
    # status, scored, under way, attempts left, fresh -> verdict      (group of 4, at least 2)
    (S, 4, 0, 3, True, GroupVerdict.STALE),
    (S, 0, 3, 3, True, GroupVerdict.STALE),
    (D, 4, 2, 3, True, GroupVerdict.READY),
    (T, 4, 0, 3, True, GroupVerdict.READY),
    (F, 4, 1, 3, True, GroupVerdict.READY),  # a spare that fails when enough are scored
    (D, 3, 1, 3, True, GroupVerdict.WAIT),
    (F, 2, 1, 3, True, GroupVerdict.RETRY),  # 3 at most without it
    (F, 2, 2, 3, True, GroupVerdict.WAIT),  # a spare is under way
    (F, 2, 1, 0, True, GroupVerdict.WAIT),  # no attempt left, others still play
    (F, 2, 1, 3, False, GroupVerdict.WAIT),  # too old to begin again
    (F, 3, 0, 0, True, GroupVerdict.READY),  # closes with fewer
    (F, 2, 0, 3, False, GroupVerdict.READY),
    (F, 1, 0, 0, True, GroupVerdict.FAILED),
    (F, 0, 0, 3, False, GroupVerdict.FAILED),
    (A, 1, 0, 3, True, GroupVerdict.FAILED),
    (D, 2, 0, 0, True, GroupVerdict.READY),
]


@pytest.mark.parametrize(("status", "scored", "under_way", "left", "fresh", "verdict"), TABLE)
def test_verdicts(status: Status, scored: int, under_way: int, left: int, fresh: bool, verdict: GroupVerdict) -> None:
    found = judge(status, Count(scored, under_way), group_size=4, min_group_size=2, attempts_left=left, fresh=fresh)
    assert found is verdict


@pytest.mark.parametrize(
    ("under_way", "ready", "bound", "expected"),
    [(3, 2, 0, 3), (0, 2, 0, 0), (5, 0, 1, 1), (4, 0, 1, 0), (4, 2, 1, 2), (1, 6, 1, 1), (9, 0, 2, 1), (2, 0, 2, 0)],
)
def test_what_no_batch_can_use_is_surplus(under_way: int, ready: int, bound: int, expected: int) -> None:
    assert surplus(under_way, ready, bound=bound, groups_per_step=4) == expected


def test_pauses_double_up_to_the_cap() -> None:
    assert [backoff_s(1.0, tries) for tries in range(9)] == [1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert backoff_s(5.0, 3, cap_s=7.0) == 7.0
    assert backoff_s(0.0, 5) == 0.0

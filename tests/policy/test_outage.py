"""When a platform counts as down, and when somebody looks again."""

from rollart.policy.outage import FIRST_LOOK_S, SELDOM_S, Outage


def test_it_is_down_when_one_gets_no_answer_in_all_its_tries_and_nobody_else_does() -> None:
    outage = Outage()
    outage.answered(5.0)
    assert outage.gave_up(6.0, 20.0)
    assert outage.is_down
    assert not outage.gave_up(7.0, 21.0), "it is known already"
    assert outage.due_s == 20.0 + FIRST_LOOK_S
    assert outage.answered(36.0) == 30.0
    assert not outage.is_down
    assert outage.answered(37.0) is None


def test_it_is_up_while_others_are_answered() -> None:
    outage = Outage()
    outage.answered(10.0)
    assert not outage.gave_up(6.0, 20.0)
    assert not outage.is_down


def test_looks_become_seldom() -> None:
    outage = Outage()
    outage.gave_up(0.0, 0.0)
    gaps = []
    for _ in range(40):
        now_s = outage.due_s
        outage.looked_in_vain(now_s)
        gaps.append(outage.due_s - now_s)
    assert gaps[:3] == [2 * FIRST_LOOK_S, 4 * FIRST_LOOK_S, 8 * FIRST_LOOK_S]
    assert gaps[-1] == SELDOM_S
    outage.answered(1e6)
    outage.gave_up(1e6 + 1, 1e6 + 2)
    assert outage.due_s == 1e6 + 2 + FIRST_LOOK_S, "another outage begins anew"

"""When a platform counts as down, and when somebody looks again."""

from rollart.policy.outage import FIRST_LOOK_S, SELDOM_S, Budget, Outage


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


def test_what_nobody_answers_while_nobody_else_is_answered_is_not_its_own_failure() -> None:
    """Its first call was under way for long when the platform died; others had their answers until then."""
    outage, budget = Outage(), Budget(retries=2)
    outage.answered(9.9)
    for now_s in (10.0, 10.5, 11.5):
        assert not budget.is_silent
        budget.unanswered(0.0, now_s, outage)
    assert (budget.failed, budget.silent) == (0, 3)
    assert budget.is_silent
    assert outage.gave_up(budget.silent_s, 11.5)
    outage.answered(30.0)
    budget.answered_badly()
    assert not budget.is_spent, "an error of the function after that is its first"


def test_what_nobody_answers_while_others_are_answered_is_its_own_failure() -> None:
    outage, budget = Outage(), Budget(retries=2)
    for now_s in (10.0, 20.0, 30.0, 40.0):
        assert not budget.is_spent
        budget.unanswered(now_s - 9.0, now_s, outage)
        outage.answered(now_s + 1.0)
    budget.unanswered(41.0, 50.0, outage)
    assert budget.is_spent
    assert not outage.is_down


def test_a_single_try_must_have_seen_the_whole_silence() -> None:
    outage, budget = Outage(), Budget(retries=0)
    outage.answered(5.0)
    budget.unanswered(0.0, 10.0, outage)
    assert budget.is_silent
    assert not outage.gave_up(budget.silent_s, 10.0)

"""A task that keeps failing opens its breaker; probes close it again."""

from rollart.policy.breaker import MAX_WAIT_S, Breaker


def breaker(*tasks: str, failures: int = 3, wait_s: float = 10.0, probes: int = 2) -> Breaker:
    return Breaker(tasks or ("a", "b"), failures=failures, wait_s=wait_s, probes=probes)


def opened(**settings: int) -> Breaker:
    made = breaker(**settings)
    for number in range(3):
        made.failed("a", f"g{number}", 0.0)
    return made


def test_it_opens_after_so_many_failures_in_a_row_and_a_good_group_starts_the_count_anew() -> None:
    made = breaker()
    assert made.failed("a", "g0", 0.0) is None
    assert made.failed("a", "g1", 0.0) is None
    assert not made.well("a", "g2")
    assert made.failed("a", "g3", 0.0) is None
    assert made.failed("b", "g4", 0.0) is None, "each task counts for itself"
    assert made.failed("a", "g5", 0.0) is None
    assert not made.is_open("a")
    assert made.failed("a", "g6", 1.0) == 10.0
    assert (made.is_open("a"), made.is_open("b")) == (True, False)


def test_while_open_groups_that_were_under_way_say_nothing() -> None:
    made = opened()
    assert made.failed("a", "g9", 5.0) is None
    assert not made.well("a", "g8")
    assert made.is_open("a")
    assert made.due(9.9) is None
    assert made.due(10.0) == "a", "and do not put the probe off"


def test_one_probe_at_a_time_and_each_that_fails_doubles_the_wait() -> None:
    made = opened()
    now_s, waits = 10.0, []
    for number in range(9):
        assert made.due(now_s) == "a"
        made.probing("a", f"p{number}")
        assert made.due(now_s + 1e6) is None, "one at a time"
        wait_s = made.failed("a", f"p{number}", now_s)
        assert wait_s is not None
        assert made.due(now_s + wait_s - 0.1) is None
        waits.append(wait_s)
        now_s += wait_s
    assert waits == [20.0, 40.0, 80.0, 160.0, 320.0] + [MAX_WAIT_S] * 4


def test_a_probe_that_ends_well_closes_it_and_the_count_starts_anew() -> None:
    made = opened()
    made.probing("a", "p0")
    assert made.well("a", "p0")
    assert not made.is_open("a")
    assert [made.failed("a", f"h{number}", 50.0) for number in range(3)] == [None, None, 10.0]


def test_a_probe_that_says_nothing_may_be_made_again_at_once() -> None:
    made = opened()
    made.probing("a", "p0")
    made.ended("a", "g7", 12.0)
    assert made.due(12.0) is None, "that was another group"
    made.ended("a", "p0", 12.0)
    assert made.due(12.0) == "a"


def test_there_is_hope_until_every_task_has_failed_its_probes() -> None:
    made = opened()

    def fail_probe(task: str) -> None:
        made.probing(task, "p")
        made.failed(task, "p", 0.0)

    fail_probe("a")
    fail_probe("a")
    assert not made.hopeless, "b is well"
    for _ in range(3):
        made.failed("b", "g", 0.0)
    assert not made.hopeless, "b was not tried again"
    fail_probe("b")
    assert not made.hopeless
    fail_probe("b")
    assert made.hopeless


def test_the_task_that_has_waited_longest_is_probed_first() -> None:
    made = breaker()
    for number in range(3):
        made.failed("b", f"g{number}", 0.0)
        made.failed("a", f"h{number}", 1.0)
    assert made.due(100.0) == "b"


def test_what_is_restored_stays_open_with_its_failed_probes_and_may_be_probed_at_once() -> None:
    made = opened()
    made.probing("a", "p0")
    made.failed("a", "p0", 10.0)
    made.failed("b", "g", 0.0)
    again = breaker()
    again.restore(made.state(), 3.0)
    assert (again.is_open("a"), again.is_open("b"), again.failures("b")) == (True, False, 1)
    assert again.due(3.0) == "a"
    again.probing("a", "p1")
    assert again.failed("a", "p1", 3.0) == 40.0


def test_what_is_restored_with_fewer_failures_allowed_is_in_the_mix_until_the_next() -> None:
    made = breaker()
    for number in range(2):
        made.failed("a", f"g{number}", 0.0)
    again = Breaker(["a", "b"], failures=1, wait_s=10.0, probes=2)
    again.restore(made.state(), 3.0)
    assert (again.is_open("a"), again.failures("a")) == (False, 0)
    assert again.failed("a", "g2", 3.0) == 10.0
    assert again.failures("a") == 1

"""Which pool suits which task: measured, for the whole mix, with hysteresis."""

import itertools
import random
from dataclasses import replace

import pytest

from rollart.hardware import HARDWARE, MODELS
from rollart.policy import planning
from rollart.policy.affinity import FIRST_LOOK, REPLAN_EVERY, YOUNG, Affinity, Decision
from rollart.policy.planning import Plan, Problem, best_plan
from rollart.policy.prediction import PoolSpeed
from rollart.policy.profile import TaskProfile


def pool(name: str, hardware: str, engines: int = 1) -> PoolSpeed:
    return PoolSpeed(
        name=name, hardware=HARDWARE[hardware], model=MODELS["qwen3-8b"], engines=engines, gpus=1, max_batch=256
    )


def profile(prompt: float, new: float, decode: float, turns: float) -> TaskProfile:
    return TaskProfile(
        prompt_tokens=prompt,
        new_tokens=new,
        cached_tokens=prompt - new,
        prefill_tokens=new,
        decode_tokens=decode,
        decode_squares=1.1 * decode**2,
        turns=turns,
        context_tokens=prompt / turns + decode / turns,
        elsewhere_s=1.0,
        trajectories=100,
    )


COMPUTE, BANDWIDTH = pool("compute", "h800", 2), pool("bandwidth", "h20", 4)
PREFILL_HEAVY = profile(160_000, 24_000, 700, 12)
DECODE_HEAVY = profile(3_300, 500, 5_000, 2)
ORDER = {"compute": ["compute", "bandwidth"], "bandwidth": ["bandwidth", "compute"]}


def problem(
    profiles: dict[str, TaskProfile], pools: list[PoolSpeed], fixed: dict[str, str] | None = None, count: float = 16.0
) -> Problem:
    return Problem(
        profiles=profiles,
        demand=dict.fromkeys(profiles, count),
        members=dict.fromkeys(profiles, 4),
        pools=pools,
        fixed={task: {pool: 1.0} for task, pool in (fixed or {}).items()},
        ahead=1.5,
    )


def drawn(seed: int, count: int) -> dict[str, TaskProfile]:
    rng = random.Random(seed)
    found = {}
    for number in range(count):
        new = rng.uniform(300, 20_000)
        found[f"t{number}"] = profile(new * rng.uniform(1, 6), new, rng.uniform(200, 5_000), rng.randint(1, 12))
    return found


# --- the best plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_assignment_of_whole_tasks_is_faster_than_the_plan(seed: int) -> None:
    fixed = {"t0": "old"} if seed % 2 else {}
    one = problem(drawn(seed, 3), [COMPUTE, BANDWIDTH, pool("old", "a100", 3)], fixed)
    found = best_plan(one)
    best_s = min(
        one.step_s({task: {name: 1.0} for task, name in zip(one.profiles, chosen, strict=True)})
        for chosen in itertools.product(["compute", "bandwidth", "old"], repeat=3)
        if not fixed or chosen[0] == "old"
    )
    assert one.step_s(found) <= (1 + planning.ALIKE) * best_s
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in found.values())
    assert not fixed or found["t0"] == {"old": 1.0}


def test_one_task_alone_is_split_where_two_pools_are_faster_than_one() -> None:
    one = problem({"a": DECODE_HEAVY}, [COMPUTE, BANDWIDTH], count=200.0)
    found = best_plan(one)
    assert set(found["a"]) == {"compute", "bandwidth"}
    assert found["a"]["bandwidth"] > found["a"]["compute"]
    assert one.step_s(found) < 0.9 * one.step_s({"a": {"bandwidth": 1.0}})


def test_a_task_leaves_its_favourite_where_the_whole_is_faster_so() -> None:
    """Everything decodes, and everything likes the same pool; all of it there would leave the other idle."""
    tasks = {f"t{number}": DECODE_HEAVY for number in range(4)}
    found = best_plan(problem(tasks, [COMPUTE, BANDWIDTH.with_engines(2)], count=64.0))
    used = {name for shares in found.values() for name in shares}
    assert used == {"compute", "bandwidth"}


SLOW = replace(profile(400_000, 20_000, 4_000, 40), elsewhere_s=60.0)
"""What a step waits for, wherever the others are."""
SUITED = {"slow": {"compute": 1.0}, "game": {"compute": 1.0}, "maths": {"bandwidth": 1.0}}


def test_where_one_task_decides_the_step_the_others_go_where_their_work_costs_least() -> None:
    tasks = {"slow": SLOW, "game": PREFILL_HEAVY, "maths": DECODE_HEAVY}
    one = problem(tasks, [COMPUTE.with_engines(4), BANDWIDTH.with_engines(8)], {"slow": "compute"})
    swapped = {"slow": {"compute": 1.0}, "game": {"bandwidth": 1.0}, "maths": {"compute": 1.0}}
    assert one.step_s(swapped) == pytest.approx(one.step_s(SUITED), rel=planning.ALIKE)
    assert one.price(SUITED) < 0.8 * one.price(swapped)
    assert best_plan(one) == SUITED, "and not split for a gain that predictions cannot tell"


def test_with_many_tasks_one_at_a_time_is_moved_until_none_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = drawn(3, 6)
    exact = problem(tasks, [COMPUTE, BANDWIDTH])
    optimum_s = exact.step_s(best_plan(exact))
    monkeypatch.setattr(planning, "EXHAUSTIVE", 10)
    found = best_plan(problem(tasks, [COMPUTE, BANDWIDTH], {"t3": "compute"}))
    assert found["t3"] == {"compute": 1.0}
    assert exact.step_s(best_plan(problem(tasks, [COMPUTE, BANDWIDTH]))) <= 1.1 * optimum_s


# --- over time --------------------------------------------------------------------------------------------------


def two_tasks(game: str = "auto", maths: str = "auto", demand: float = 20.0) -> Affinity:
    names = ("game", "maths")
    return Affinity(
        {"game": game, "maths": maths},
        dict.fromkeys(names, demand),
        dict.fromkeys(names, 4),
        [COMPUTE, BANDWIDTH],
        ORDER,
    )


def feed(one: Affinity, times: int, game: TaskProfile, maths: TaskProfile, seed: int = 0) -> list[Decision]:
    """So many trajectories of each, with some noise."""
    rng = random.Random(seed)
    found = []
    for _ in range(times):
        for task, needed in (("game", game), ("maths", maths)):
            decode = needed.decode_tokens * rng.lognormvariate(0, 0.4)
            found.append(one.seen(task, replace(needed, decode_tokens=decode, decode_squares=decode**2)))
    return [decision for decision in found if decision is not None]


def test_nothing_measured_means_spread_by_what_the_pools_can_do() -> None:
    one = two_tasks()
    assert set(one.plan["game"]) == {"compute", "bandwidth"}
    pools = [one.place("game")[0] for _ in range(100)]
    for name, share in one.plan["game"].items():
        assert pools.count(name) == pytest.approx(100 * share, abs=1)
    assert "nothing is measured yet" in one.first().reason


def test_affinity_any_fills_all_engines_alike_whatever_suits_the_task() -> None:
    """Two engines and four."""
    one = two_tasks("any", "any")
    assert sorted(one.place("maths")[0] for _ in range(6)) == ["bandwidth"] * 4 + ["compute"] * 2, "of an evaluation"
    assert one.first().plan["game"] == one.first().plan["maths"] == {"compute": 2 / 6, "bandwidth": 4 / 6}
    living = {"compute": 0, "bandwidth": 0}
    for _ in range(12):
        living[one.place("game", living)[0]] += 1
    assert living == {"compute": 4, "bandwidth": 8}
    living["compute"] = 0
    assert [one.place("game", living)[0] for _ in range(3)] == ["compute"] * 3, "whoever is done gets the next"
    behind = {"compute": 0, "bandwidth": 3}  # not so far that it would be passed over in any case
    assert [one.place("game", behind)[0] for _ in range(4)] == ["compute"] * 4
    feed(one, 40, PREFILL_HEAVY, DECODE_HEAVY)
    assert one.plan["game"] == {"compute": 2 / 6, "bandwidth": 4 / 6}
    one.engines({"compute": 0, "bandwidth": 4})
    assert one.place("game", living)[0] == "bandwidth"


def test_a_task_that_may_be_anywhere_is_work_that_others_are_planned_around() -> None:
    found = feed(one := two_tasks("any", "auto"), 40, PREFILL_HEAVY, DECODE_HEAVY)
    assert found, "maths is looked at"
    assert set(one.plan["game"]) == {"compute", "bandwidth"}
    assert one.plan["game"] == {"compute": 2 / 6, "bandwidth": 4 / 6}
    assert one.plan["maths"] == found[-1].plan["maths"]
    assert sum(one.plan["maths"].values()) == pytest.approx(1.0)


def test_a_pool_that_has_fallen_behind_is_passed_over() -> None:
    """Ten groups are the plan's reckoning for the task: two steps' worth of 20 trajectories in groups of four."""
    one = two_tasks()
    one.plan = {**one.plan, "game": {"compute": 0.5, "bandwidth": 0.5}}
    pools = [one.place("game", {"compute": 5, "bandwidth": 2})[0] for _ in range(20)]
    assert pools == ["bandwidth"] * 20
    later = [one.place("game", {"compute": 4, "bandwidth": 4})[0] for _ in range(20)]
    assert 10 <= later.count("compute") <= 12, "it is not sent all at once what it was owed"
    both = [one.place("game", {"compute": 9, "bandwidth": 9})[0] for _ in range(20)]
    assert both.count("compute") == 10, "where all have fallen behind, by shares"


def test_tasks_go_to_the_pool_that_suits_them_once_they_are_measured_and_the_reason_is_told() -> None:
    one = two_tasks()
    decisions = feed(one, FIRST_LOOK, PREFILL_HEAVY, DECODE_HEAVY)
    assert one.plan == {"game": {"compute": 1.0}, "maths": {"bandwidth": 1.0}}
    (decision,) = decisions
    assert decision.moves == decision.plan == one.plan
    assert "every task is measured" in decision.reason
    assert "faster" in decision.reason
    assert decision.predictions["game"]["compute"].step_s < decision.predictions["game"]["bandwidth"].step_s
    assert decision.profiles["maths"].trajectories >= FIRST_LOOK - 1
    assert one.place("game") == ("compute", "bandwidth")


@pytest.mark.parametrize("seed", range(2))
def test_noise_never_moves_a_task(seed: int) -> None:
    one = two_tasks()
    feed(one, 10 * FIRST_LOOK, PREFILL_HEAVY, DECODE_HEAVY, seed)
    later = feed(one, 8 * REPLAN_EVERY, PREFILL_HEAVY, DECODE_HEAVY, seed + 100)
    assert len(later) >= 10
    assert [decision.moves for decision in later if decision.moves] == []
    assert all("kept" in decision.reason for decision in later)


def test_the_assignment_follows_a_task_that_changes() -> None:
    one = two_tasks()
    feed(one, 2 * REPLAN_EVERY, PREFILL_HEAVY, DECODE_HEAVY)
    later = feed(one, REPLAN_EVERY, DECODE_HEAVY, PREFILL_HEAVY)
    assert one.plan == {"game": {"bandwidth": 1.0}, "maths": {"compute": 1.0}}
    moved = [decision for decision in later if decision.moves]
    assert any("has changed" in decision.reason for decision in moved)


def test_short_trajectories_that_end_first_in_every_step_are_no_change() -> None:
    one = Affinity({"a": "auto"}, {"a": 200.0}, {"a": 4}, [COMPUTE, BANDWIDTH], ORDER)
    reasons = []
    for step in range(8):
        rng = random.Random(step)
        for decode in sorted(DECODE_HEAVY.decode_tokens * rng.lognormvariate(0, 0.5) for _ in range(200)):
            decision = one.seen("a", replace(DECODE_HEAVY, decode_tokens=decode, decode_squares=decode**2))
            reasons.append(decision.reason if decision is not None else "")
    assert any(reasons)
    assert [reason for reason in reasons if "has changed" in reason] == []


def test_looks_come_once_in_so_many_trajectories() -> None:
    one = two_tasks(demand=8.0)
    young = feed(one, 2 * YOUNG * 8, PREFILL_HEAVY, DECODE_HEAVY)
    assert len(young) >= 3
    assert len(feed(one, 2 * REPLAN_EVERY, PREFILL_HEAVY, DECODE_HEAVY)) == 4


def test_a_gain_below_the_margin_moves_nothing() -> None:
    """Two pools alike but for one part in forty."""
    pools = [pool("slower", "h800", 40), pool("faster", "h800", 41)]
    order = {"slower": ["slower", "faster"], "faster": ["faster", "slower"]}
    one = Affinity({"a": "auto"}, {"a": 32.0}, {"a": 4}, pools, order)
    one.plan = {"a": {"slower": 1.0}}
    decisions = [one.seen("a", PREFILL_HEAVY) for _ in range(3 * REPLAN_EVERY)]
    assert any(decision is not None for decision in decisions)
    assert one.plan == {"a": {"slower": 1.0}}


def test_tasks_move_where_the_step_is_as_long_and_their_work_is_clearly_cheaper() -> None:
    tasks = {"slow": SLOW, "game": PREFILL_HEAVY, "maths": DECODE_HEAVY}
    one = Affinity(
        {"slow": "compute", "game": "auto", "maths": "auto"},
        dict.fromkeys(tasks, 16.0),
        dict.fromkeys(tasks, 4),
        [COMPUTE.with_engines(4), BANDWIDTH.with_engines(8)],
        ORDER,
    )
    decisions = []
    for number in range(4 * REPLAN_EVERY):
        for task, needed in tasks.items():
            if (decision := one.seen(task, needed)) is not None:
                decisions.append(decision)
        if number == FIRST_LOOK:  # as a plan made from the first, short trajectories may be
            one.plan = {"slow": {"compute": 1.0}, "game": {"bandwidth": 1.0}, "maths": {"compute": 1.0}}
    (moved,) = (decision for decision in decisions[1:] if decision.moves)
    assert "about as fast, and its work" in moved.reason
    assert one.plan == SUITED


def test_declared_tasks_stay_where_the_user_wants_them() -> None:
    one = two_tasks(game="bandwidth", maths="compute")
    feed(one, 2 * REPLAN_EVERY, PREFILL_HEAVY, DECODE_HEAVY)
    assert one.plan == {"game": {"bandwidth": 1.0}, "maths": {"compute": 1.0}}
    assert one.first().reason == "declared"
    half = two_tasks(game="bandwidth")
    feed(half, 2 * REPLAN_EVERY, PREFILL_HEAVY, DECODE_HEAVY)
    assert half.plan["game"] == {"bandwidth": 1.0}
    assert half.place("game") == ("bandwidth", "compute")


def test_when_a_pool_is_lost_its_tasks_move_and_come_back_with_it() -> None:
    one = two_tasks()
    feed(one, FIRST_LOOK, PREFILL_HEAVY, DECODE_HEAVY)
    gone = one.engines({"compute": 0, "bandwidth": 4})
    assert gone is not None
    assert gone.moves == {"game": {"bandwidth": 1.0}}
    assert "compute 2 -> 0" in gone.reason
    assert one.place("game")[0] == "bandwidth"
    back = one.engines({"compute": 2, "bandwidth": 4})
    assert back is not None
    assert back.plan == {"game": {"compute": 1.0}, "maths": {"bandwidth": 1.0}}
    assert one.engines({"compute": 2, "bandwidth": 4}) is None, "nothing came or went"


def test_a_declared_task_keeps_its_pool_when_that_is_lost_and_does_not_hold_up_the_others() -> None:
    one = two_tasks(game="compute")
    feed(one, FIRST_LOOK, PREFILL_HEAVY, DECODE_HEAVY)
    one.plan = {**one.plan, "maths": {"compute": 1.0}}
    gone = one.engines({"compute": 0, "bandwidth": 4})
    assert gone is not None
    assert gone.moves == {"maths": {"bandwidth": 1.0}}
    assert one.place("game") == ("compute", "bandwidth"), "routing falls back, and says so"


def test_with_one_pool_there_is_nothing_to_move() -> None:
    one = Affinity({"a": "auto"}, {"a": 1.0}, {"a": 4}, [COMPUTE], {"compute": ["compute"]})
    for _ in range(3 * REPLAN_EVERY):
        one.seen("a", DECODE_HEAVY)
    plan: Plan = {"a": {"compute": 1.0}}
    assert one.plan == plan

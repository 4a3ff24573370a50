"""`benchmarks.affinity` in small: one mix, one comparison at equal cost, one shift. The command runs the rest."""

import pytest

from benchmarks import affinity, affinity_cost
from benchmarks.affinity import after_a_shift
from benchmarks.affinity_cost import WARM_UP, Comparison, at_equal_cost
from benchmarks.affinity_mixes import (
    CHEAP,
    CLEAR,
    DEAR,
    GROUP,
    MODEL,
    draw_mix,
    draw_sides,
    draw_tasks,
    equal_parts,
    lean,
    price,
    shifting,
)
from benchmarks.affinity_runs import BANDWIDTH, COMPUTE, Fleet, auto, play, play_all
from rollart.hardware import kv_capacity_tokens
from rollart.policy.planning import Problem

# --- mixes ------------------------------------------------------------------------------------------------------


def test_mixes_depend_on_their_seed_alone() -> None:
    assert draw_mix(3, 12) == draw_mix(3, 12)
    assert len({repr(draw_mix(seed, 12)) for seed in affinity.SEEDS}) == len(affinity.SEEDS) >= 6
    assert draw_sides(30, "pd", 7) == draw_sides(30, "pd", 7)
    assert len({repr(draw_sides(seed, "pd", 7)) for seed in affinity.BOTH_SEEDS}) == len(affinity.BOTH_SEEDS) >= 6


@pytest.mark.parametrize("seed", range(10))
def test_sides_lean_clearly_take_comparable_gpu_time_and_fit(seed: int) -> None:
    mix = draw_sides(seed, "pd", 7)
    assert lean(mix.tasks["p0"]) <= CLEAR
    assert lean(mix.tasks["d1"]) >= 1.0 / CLEAR
    prefill = mix.weights["p0"] * price(mix.tasks["p0"], DEAR)
    decode = mix.weights["d1"] * price(mix.tasks["d1"], CHEAP)
    assert 1 / 3 <= prefill / (prefill + decode) <= 2 / 3
    longest = {
        name: task["prompt_tokens"]["mean"]
        + task["turns"]["mean"] * (task["observation_tokens"]["mean"] + task["answer_tokens"]["mean"])
        for name, task in mix.tasks.items()
    }
    alive = 2 * GROUP * mix.groups_per_step
    wanted = alive * sum(mix.weights[name] * longest[name] for name in mix.tasks) / sum(mix.weights.values())
    assert wanted < 1.1 * 7 * kv_capacity_tokens(MODEL, DEAR, 1), "even if all had their longest context at once"


def test_a_one_sided_mix_has_one_side() -> None:
    assert all(lean(task) <= CLEAR for task in draw_sides(1, "pp", 7).tasks.values())
    assert all(lean(task) >= 1.0 / CLEAR for task in draw_sides(1, "dd", 7).tasks.values())


# --- assignments ------------------------------------------------------------------------------------------------


def test_auto_is_near_the_best_fixed_assignment() -> None:
    row = affinity.against_fixed(equal_parts("test", draw_tasks(7, "pd"), 12), 20)
    assert row["runs"] == 5
    assert row["gap"] <= 0.08, "a short run: the start, when nothing is measured, weighs more than in the command's"
    assert row["worst_step_s"] > 1.15 * row["auto_step_s"], "and it matters which it is"


def test_what_comes_out_does_not_depend_on_the_number_of_processes() -> None:
    mix = equal_parts("test", draw_tasks(7, "pd"), 4)
    trials = [auto(mix, fleet, 3) for fleet in ({COMPUTE: 1}, {COMPUTE: 1, BANDWIDTH: 1}, {BANDWIDTH: 1})]
    assert play_all(trials, 1) == play_all(trials, 2)


def test_the_assignment_follows_a_shift() -> None:
    run = play(auto(shifting(20, 400.0, 12), affinity.FLEET, 24))
    shares = [(plan.t, plan.plan["p2"].get(BANDWIDTH, 0.0)) for plan in run.plans]
    before = [share for at_s, share in shares if at_s < 400.0][-1]
    assert before < 0.5
    assert shares[-1][0] > 400.0
    assert shares[-1][1] > before


def test_groups_do_not_pile_up_on_a_pool_that_has_fallen_behind() -> None:
    """Half of a task on one engine with just enough room for its caches. Before any plan is made it has too much, and
    falls behind; were it given its share of new groups all the same, it would never catch up."""
    run = play(auto(draw_sides(30, "pd", 7), {COMPUTE: 1, BANDWIDTH: 17}, 18))
    assert run.step_beyond_s(8) < 45.0, "35 s on the cheap pool alone; more than 100 s where they pile up"


@pytest.mark.slow
def test_after_a_shift_auto_is_near_the_best_fixed_assignment() -> None:
    row = after_a_shift(affinity.SHIFT_STEPS, affinity.SHIFT_AFTER_S)
    assert row["changes"]
    assert row["gap"] <= 0.10


# --- fleets of equal price --------------------------------------------------------------------------------------


def test_every_split_of_the_budget_is_predicted_and_the_best_are_played() -> None:
    one = Comparison(mix=draw_sides(100, "pd", 4), dear=4)
    assert one.alone == [{COMPUTE: 4}, {BANDWIDTH: 11}]
    assert one.mixed == [{COMPUTE: 1, BANDWIDTH: 9}, {COMPUTE: 2, BANDWIDTH: 6}, {COMPUTE: 3, BANDWIDTH: 3}]
    (row,) = at_equal_cost([one], 1, WARM_UP + 4)
    figures = row["step_s_at_budget"]
    assert len(figures) == 2 + affinity_cost.PLAYED
    better = min(figures["4 h800"]["alone"], figures["11 h20"]["alone"])
    mixed = [min(figure["auto"], figure["fixed"]) for figure in figures.values() if "auto" in figure]
    assert row["mixed_over_better_kind"] == pytest.approx(min(mixed) / better, abs=1e-3)
    assert row["mixed_over_better_kind"] < 0.97, "the mix holds both profiles"


def test_the_search_plays_the_splits_that_are_predicted_to_be_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Comparison(mix=draw_sides(100, "pd", 7), dear=7)
    profiles = play(auto(one.mix, {BANDWIDTH: 20}, 3)).profiles
    predicted: dict[int, float] = {}
    step_s = Problem.step_s

    def noted(problem: Problem, plan: object) -> float:
        found = step_s(problem, plan)  # type: ignore[arg-type]
        dear = problem.pools[0].engines
        predicted[dear] = min(predicted.get(dear, found), found)
        return found

    monkeypatch.setattr(Problem, "step_s", noted)
    trials = affinity_cost.search(one, profiles, 3)
    assert set(predicted) == set(range(1, 7)), "no split is left out"
    assert min(predicted, key=lambda dear: predicted[dear]) in {trial.fleet[COMPUTE] for trial in trials}
    assert {"auto"} in [set(trial.affinity.values()) for trial in trials]


@pytest.mark.parametrize(("kind", "fleet"), [("p", {COMPUTE: 2}), ("p", {BANDWIDTH: 4}), ("d", {BANDWIDTH: 4})])
def test_one_kind_alone_takes_as_long_as_is_predicted(kind: str, fleet: Fleet) -> None:
    """Swaps make caches worthless, and groups start in waves: where prediction or profile leaves either out, it is off
    by a third."""
    mix = draw_sides(100, kind, 2)
    run = play(auto(mix, fleet, 16))
    problem = affinity_cost.problem_of(mix, fleet, run.profiles)
    (pool,) = fleet
    predicted_s = problem.step_s({task: {pool: 1.0} for task in mix.tasks})
    assert predicted_s == pytest.approx(run.step_beyond_s(WARM_UP), rel=0.15)

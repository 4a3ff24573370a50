"""`rollart bench affinity`, in small: one mix, one comparison at equal cost, one shift. The command runs the rest."""

import pytest

from rollart.bench import affinity
from rollart.bench.affinity import after_a_shift, at_equal_cost, draw_mix, draw_tasks


def test_mixes_depend_on_their_seed_alone() -> None:
    assert draw_mix(3) == draw_mix(3)
    assert len({repr(draw_mix(seed)) for seed in affinity.SEEDS}) == len(affinity.SEEDS) >= 6


def test_auto_is_near_the_best_fixed_assignment() -> None:
    row = affinity.against_fixed(draw_tasks(7, "pd"), 20, "test")
    assert row["runs"] == 5
    assert row["gap"] <= 0.08, "a short run: the start, when nothing is measured, weighs more than in the command's"
    assert row["worst_step_s"] > 1.15 * row["auto_step_s"], "and it matters which it is"


def test_fleets_of_equal_cost_are_played_and_compared() -> None:
    row = at_equal_cost(draw_tasks(10, "pd"), 2, "test")
    assert set(row["fleets"]) == {"11 h20", "1 h800 + 9 h20", "2 h800 + 6 h20", "3 h800 + 3 h20", "4 h800"}
    at_budget = {name: fleet["step_s_at_budget"] for name, fleet in row["fleets"].items()}
    assert all(seconds > 0 for seconds in at_budget.values())
    mixed = min(seconds for name, seconds in at_budget.items() if "+" in name)
    alone = min(at_budget["11 h20"], at_budget["4 h800"])
    assert row["mixed_over_better_kind"] == pytest.approx(mixed / alone, abs=1e-3)


def test_the_assignment_follows_a_shift() -> None:
    run = affinity.play(affinity.shifting(20, 400.0), dict.fromkeys(("p0", "d1", "p2"), "auto"), affinity.FLEET, 24)
    shares = [(plan["t"], plan["plan"]["p2"].get("bandwidth", 0.0)) for plan in run.plans]
    before = [share for at_s, share in shares if at_s < 400.0][-1]
    assert before < 0.5
    assert shares[-1][0] > 400.0
    assert shares[-1][1] > before


@pytest.mark.slow
def test_after_a_shift_auto_is_near_the_best_fixed_assignment() -> None:
    row = after_a_shift(affinity.SHIFT_STEPS, affinity.SHIFT_AFTER_S)
    assert row["changes"]
    assert row["gap"] <= 0.10

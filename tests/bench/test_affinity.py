"""`rollart bench affinity`, in small: one mix, one comparison at equal cost, one shift. The command runs the rest."""

import pytest

from rollart.bench import affinity
from rollart.bench.affinity import after_a_shift, at_equal_cost, draw_mix, draw_tasks


def test_mixes_depend_on_their_seed_alone() -> None:
    assert draw_mix(3) == draw_mix(3)
    assert len({repr(draw_mix(seed)) for seed in affinity.SEEDS}) == len(affinity.SEEDS) >= 6


def test_auto_is_near_the_best_fixed_assignment() -> None:
    row = affinity.against_fixed(draw_tasks(7, "pd"), 24, "test")
    assert row["runs"] == 5
    assert row["gap"] <= 0.08, "a short run: the start, when nothing is measured, weighs more than in the command's"
    assert row["worst_step_s"] > 1.15 * row["auto_step_s"], "and it matters which it is"


def test_both_kinds_of_hardware_beat_one_kind_at_equal_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "BUDGET", 2 * 2.85)
    row = at_equal_cost(draw_tasks(10, "pd"), 8, "test")
    assert set(row["step_s"]) == {"5 h20", "1 h800 + 2 h20", "2 h800"}
    assert row["mixed_over_better_kind"] < 1.0


def test_the_assignment_follows_a_shift() -> None:
    run = affinity.play(affinity.shifting(20, 400.0), dict.fromkeys(("p0", "d1", "p2"), "auto"), affinity.FLEET, 24)
    before = [plan["plan"]["p2"] for plan in run.plans if plan["t"] < 400.0][-1]
    later = [plan for plan in run.plans if plan["t"] > 400.0]
    assert "p2 has changed" in later[0]["reason"]
    assert before == {"compute": 1.0}
    assert "bandwidth" in later[-1]["plan"]["p2"]


@pytest.mark.slow
def test_after_a_shift_auto_is_near_the_best_fixed_assignment() -> None:
    row = after_a_shift(affinity.SHIFT_STEPS, affinity.SHIFT_AFTER_S)
    assert row["changes"]
    assert row["gap"] <= 0.10

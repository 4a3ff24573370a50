"""What `affinity: auto` is worth: against every fixed assignment, against one kind of hardware, and after a change.
`python -m benchmarks.affinity`.

Everything is simulated, on the virtual clock, with the simulator's hardware costs, which are not calibrated. The task
mixes are drawn from seeds; nothing about them depends on what comes out. Training and weight links are made too fast to
matter: it is the rollout that is compared.
"""

import itertools
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.affinity_cost import Comparison, at_equal_cost
from benchmarks.affinity_mixes import Mix, draw_mix, draw_sides, shifting
from benchmarks.affinity_runs import BANDWIDTH, COMPUTE, Run, Trial, auto, play_all
from benchmarks.command import main

GROUPS_PER_STEP = 12
FLEET = {COMPUTE: 2, BANDWIDTH: 4}
SEEDS = (0, 1, 2, 3, 4, 5)
STEPS = 40
BOTH_SEEDS = (30, 31, 32, 33, 34, 35)
BOTH_DEAR = 7
"""Engines of the dear kind that the budget buys; as good as 20 of the cheap kind."""
PREFILL_SEEDS = (40, 41, 42)
DECODE_SEEDS = (43, 44, 45)
ONE_SIDED_DEAR = 14
"""Where one engine of the wrong kind should be a small part of the fleet."""
SHIFT_SEED = 20
SHIFT_STEPS = 60
SHIFT_AFTER_S = 1000.0


def measure(workers: int = 1) -> dict[str, Any]:
    """The figures of `python -m benchmarks.affinity`."""
    assignments = [against_fixed(draw_mix(seed, GROUPS_PER_STEP), STEPS, workers) for seed in SEEDS]
    shifted = after_a_shift(SHIFT_STEPS, SHIFT_AFTER_S, workers)
    both = [Comparison(mix=draw_sides(seed, "pd", BOTH_DEAR), dear=BOTH_DEAR) for seed in BOTH_SEEDS]
    sided = [
        Comparison(mix=draw_sides(seed, kinds, ONE_SIDED_DEAR), dear=ONE_SIDED_DEAR)
        for kinds, seeds in (("pp", PREFILL_SEEDS), ("dd", DECODE_SEEDS))
        for seed in seeds
    ]
    rows = at_equal_cost([*both, *sided], workers)
    both_rows, sided_rows = rows[: len(both)], rows[len(both) :]
    return {
        "worst_gap": max(row["gap"] for row in assignments),
        "gaps": [row["gap"] for row in assignments],
        "mixed_over_better_kind": [row["mixed_over_better_kind"] for row in both_rows],
        "auto_over_better_kind": [row["auto_over_better_kind"] for row in both_rows],
        "one_sided_mixed_over_better_kind": [row["mixed_over_better_kind"] for row in sided_rows],
        "one_sided_auto_over_better_kind": [row["auto_over_better_kind"] for row in sided_rows],
        "gap_after_shift": shifted["gap"],
        "mixes": assignments,
        "equal_cost": both_rows,
        "one_sided": sided_rows,
        "shift": shifted,
        "clock": "virtual: simulated, with hardware costs that are not calibrated",
    }


Assignment = tuple[tuple[str, str], ...]
"""(task, pool), for each task."""


def against_fixed(mix: Mix, steps: int, workers: int = 1) -> dict[str, Any]:
    """`auto` beside every assignment of whole tasks to pools, on the same pools."""
    fixed, free = _all_ways(mix, steps, workers)
    best = min(fixed, key=lambda key: fixed[key].step_s)
    return {
        "mix": mix.name,
        "tasks": list(mix.tasks),
        "best": dict(best),
        "best_step_s": round(fixed[best].step_s, 2),
        "worst_step_s": round(max(run.step_s for run in fixed.values()), 2),
        "auto_step_s": round(free.step_s, 2),
        "gap": round(free.step_s / fixed[best].step_s - 1.0, 4),
        "plan": free.plans[-1].plan,
        "changes": len(free.plans) - 1,
        "runs": len(fixed) + 1,
    }


def after_a_shift(steps: int, after_s: float, workers: int = 1) -> dict[str, Any]:
    """`auto` beside every fixed assignment, from the time on when one of three tasks has changed."""
    fixed, free = _all_ways(shifting(SHIFT_SEED, after_s, GROUPS_PER_STEP), steps, workers)
    best = min(fixed, key=lambda key: fixed[key].step_after_s(after_s))
    before = min(fixed, key=lambda key: _step_before_s(fixed[key], after_s))
    best_s, free_s = fixed[best].step_after_s(after_s), free.step_after_s(after_s)
    moves = [plan for plan in free.plans if plan.t > after_s]
    return {
        "after_s": after_s,
        "best_before": dict(before),
        "best_after": dict(best),
        "best_step_s": round(best_s, 2),
        "kept_step_s": round(fixed[before].step_after_s(after_s), 2),
        "auto_step_s": round(free_s, 2),
        "gap": round(free_s / best_s - 1.0, 4),
        "changes": [{"t": round(plan.t, 1), "reason": plan.reason, "plan": plan.plan} for plan in moves],
    }


def _step_before_s(run: Run, end_s: float) -> float:
    ends_s = [at_s for at_s in run.ends_s if at_s <= end_s]
    return statistics.fmean(later - earlier for earlier, later in itertools.pairwise(ends_s))


def _all_ways(mix: Mix, steps: int, workers: int) -> tuple[Mapping[Assignment, Run], Run]:
    """Every fixed assignment of the mix to the pools, and `auto`."""
    ways: list[Assignment] = [
        tuple(zip(mix.tasks, chosen, strict=True)) for chosen in itertools.product(FLEET, repeat=len(mix.tasks))
    ]
    trials = [Trial(mix=mix, affinity=dict(way), fleet=FLEET, steps=steps) for way in ways]
    *fixed, free = play_all([*trials, auto(mix, FLEET, steps)], workers)
    return dict(zip(ways, fixed, strict=True)), free


if __name__ == "__main__":
    sys.exit(main(measure))

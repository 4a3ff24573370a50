"""What `affinity: auto` is worth: against every fixed assignment, against one kind of hardware, and after a change.
`rollart bench affinity`.

Everything is simulated, on the virtual clock, with the simulator's hardware costs, which are not calibrated. The task
mixes are drawn from seeds; nothing about them depends on what comes out. Training and weight links are made too fast to
matter: it is the rollout that is compared.
"""

import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollart.config.load import build_job
from rollart.events import read_events
from rollart.hardware import HARDWARE
from rollart.run import simulate

GROUP = 4
GROUPS_PER_STEP = 12
COMPUTE, BANDWIDTH = "compute", "bandwidth"
KINDS = {COMPUTE: "h800", BANDWIDTH: "h20"}
FLEET = {COMPUTE: 2, BANDWIDTH: 4}
BUDGET = 4 * HARDWARE["h800"].cost
"""What four of the dear kind cost: about as much as eleven of the cheap kind."""
SEEDS = (0, 1, 2, 3, 4, 5)
STEPS = 40
COST_STEPS = 6
COST_GROUPS = 36
"""Groups in a step where fleets are compared: enough to keep them busy. With few, a step takes as long as its longest
group, on whatever hardware."""
SHIFT_STEPS = 60
SHIFT_AFTER_S = 1000.0

Tasks = Mapping[str, Mapping[str, Any]]
"""Task -> how it behaves: `sim.tasks` of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulated job."""

    ends_s: tuple[float, ...]
    """When each step ended."""
    plans: tuple[dict[str, Any], ...]
    """The looks at the assignment that changed it, and the first."""

    @property
    def step_s(self) -> float:
        """Mean step time of the whole run, start-up included."""
        return self.ends_s[-1] / len(self.ends_s)

    def step_after_s(self, begin_s: float) -> float:
        """Mean time of the steps that ended after this."""
        before = [end_s for end_s in self.ends_s if end_s <= begin_s]
        since_s = before[-1] if before else 0.0
        return (self.ends_s[-1] - since_s) / (len(self.ends_s) - len(before))


def measure() -> dict[str, Any]:
    """The figures of `rollart bench affinity`."""
    assignments = [against_fixed(draw_mix(seed), STEPS, f"mix {seed}") for seed in SEEDS]
    both = [at_equal_cost(draw_tasks(seed, "pd"), COST_STEPS, f"both profiles, seed {seed}") for seed in (10, 11)]
    prefill = at_equal_cost(draw_tasks(12, "pp"), COST_STEPS, "prefill-heavy only")
    decode = at_equal_cost(draw_tasks(13, "dd"), COST_STEPS, "decode-heavy only")
    shifted = after_a_shift(SHIFT_STEPS, SHIFT_AFTER_S)
    return {
        "worst_gap": max(row["gap"] for row in assignments),
        "gaps": [row["gap"] for row in assignments],
        "mixed_over_better_kind": [row["mixed_over_better_kind"] for row in both],
        "one_sided_mixed_over_better_kind": [row["mixed_over_better_kind"] for row in (prefill, decode)],
        "one_sided_best_over_better_kind": [row["best_over_better_kind"] for row in (prefill, decode)],
        "gap_after_shift": shifted["gap"],
        "mixes": assignments,
        "equal_cost": [*both, prefill, decode],
        "shift": shifted,
        "clock": "virtual: simulated, with hardware costs that are not calibrated",
    }


# --- task mixes -------------------------------------------------------------------------------------------------


def draw_mix(seed: int) -> Tasks:
    """Two or three tasks, of profiles that the seed draws."""
    rng = random.Random(f"mix/{seed}")
    return draw_tasks(seed, "".join(rng.choice("pdb") for _ in range(rng.choice((2, 3, 3)))))


def draw_tasks(seed: int, kinds: str) -> Tasks:
    """One task per letter: p is prefill-heavy (many turns, short answers), d decode-heavy (few turns, long answers), b
    between the two."""
    rng = random.Random(f"tasks/{seed}")
    return {f"{kind}{number}": _task(rng, kind) for number, kind in enumerate(kinds)}


def _task(rng: random.Random, kind: str) -> dict[str, Any]:
    match kind:
        case "p":
            turns, spread = rng.randint(6, 14), 4
            prompt, observation, answer = rng.uniform(800, 4000), rng.uniform(600, 2500), rng.uniform(30, 120)
        case "d":
            turns, spread = 2, 1
            prompt, observation, answer = rng.uniform(200, 600), 150.0, rng.uniform(1000, 3500)
        case _:
            turns, spread = rng.randint(3, 8), 2
            prompt, observation, answer = rng.uniform(500, 2000), rng.uniform(200, 1500), rng.uniform(150, 800)
    return {
        "turns": {"kind": "uniform", "mean": turns, "sigma": spread, "low": 1},
        "prompt_tokens": {"kind": "lognormal", "mean": round(prompt), "sigma": 0.3},
        "observation_tokens": {"kind": "lognormal", "mean": round(observation), "sigma": 0.5},
        "answer_tokens": {"kind": "lognormal", "mean": round(answer), "sigma": 0.5},
        "reset_s": 0.5,
        "step_s": round(rng.uniform(0.2, 1.5), 2),
    }


def shifting(seed: int, after_s: float) -> Tasks:
    """Three tasks, of which one (p2) turns from prefill-heavy to decode-heavy in the middle of the run."""
    tasks = {name: dict(task) for name, task in draw_tasks(seed, "pdp").items()}
    later = _task(random.Random(f"shift/{seed}"), "d")
    changed = {key: later[key] for key in ("turns", "prompt_tokens", "observation_tokens", "answer_tokens", "step_s")}
    tasks["p2"]["shift"] = {"after_s": after_s, **changed}
    return tasks


# --- what is measured -------------------------------------------------------------------------------------------


def against_fixed(tasks: Tasks, steps: int, name: str) -> dict[str, Any]:
    """`auto` beside every assignment of whole tasks to pools, on the same pools."""
    fixed = _every_assignment(tasks, FLEET, steps)
    best = min(fixed, key=lambda key: fixed[key].step_s)
    auto = play(tasks, dict.fromkeys(tasks, "auto"), FLEET, steps)
    gap = auto.step_s / fixed[best].step_s - 1.0
    _say(f"{name} ({', '.join(tasks)}): best fixed {fixed[best].step_s:.1f} s a step, auto {auto.step_s:.1f} s")
    return {
        "tasks": list(tasks),
        "best": dict(best),
        "best_step_s": round(fixed[best].step_s, 2),
        "worst_step_s": round(max(run.step_s for run in fixed.values()), 2),
        "auto_step_s": round(auto.step_s, 2),
        "gap": round(gap, 4),
        "plan": auto.plans[-1]["plan"],
        "changes": len(auto.plans) - 1,
        "runs": len(fixed) + 1,
    }


def at_equal_cost(tasks: Tasks, steps: int, name: str) -> dict[str, Any]:
    """Each kind of hardware alone beside every mix of the two that the budget buys, each with its best assignment.

    Counts are whole, so a fleet costs a little more or less than the budget. What is compared is seconds times price.
    """
    rows: dict[str, dict[str, float]] = {}
    for dear in range(round(BUDGET / HARDWARE["h800"].cost) + 1):
        cheap = round((BUDGET - dear * HARDWARE["h800"].cost) / HARDWARE["h20"].cost)
        fleet = {pool: count for pool, count in ((COMPUTE, dear), (BANDWIDTH, cheap)) if count}
        runs = list(_every_assignment(tasks, fleet, steps, COST_GROUPS).values())
        if len(fleet) > 1:
            runs.append(play(tasks, dict.fromkeys(tasks, "auto"), fleet, steps, COST_GROUPS))
        step_s = min(run.step_s for run in runs)
        price = sum(count * HARDWARE[KINDS[pool]].cost for pool, count in fleet.items())
        rows[" + ".join(f"{count} {KINDS[pool]}" for pool, count in fleet.items())] = {
            "price": round(price, 2),
            "step_s": round(step_s, 2),
            "step_s_at_budget": round(step_s * price / BUDGET, 2),
        }
    alone = min(row["step_s_at_budget"] for fleet, row in rows.items() if "+" not in fleet)
    mixed = min(row["step_s_at_budget"] for fleet, row in rows.items() if "+" in fleet)
    _say(f"{name}: better kind alone {alone:.1f} s a step, best mixed pool {mixed:.1f} s, both at a price of {BUDGET}")
    return {
        "tasks": list(tasks),
        "fleets": rows,
        "mixed_over_better_kind": round(mixed / alone, 4),
        "budget": BUDGET,
        "groups_per_step": COST_GROUPS,
    }


def after_a_shift(steps: int, after_s: float, seed: int = 20) -> dict[str, Any]:
    """`auto` beside every fixed assignment, from the time on when one of three tasks has changed."""
    tasks = shifting(seed, after_s)
    fixed = _every_assignment(tasks, FLEET, steps)
    best = min(fixed, key=lambda key: fixed[key].step_after_s(after_s))
    before = min(fixed, key=lambda key: _step_before_s(fixed[key], after_s))
    auto = play(tasks, dict.fromkeys(tasks, "auto"), FLEET, steps)
    best_s, auto_s = fixed[best].step_after_s(after_s), auto.step_after_s(after_s)
    moves = [plan for plan in auto.plans if plan["t"] > after_s]
    _say(f"after a shift: best fixed {best_s:.1f} s a step, auto {auto_s:.1f} s, {len(moves)} changes of the plan")
    return {
        "after_s": after_s,
        "best_before": dict(before),
        "best_after": dict(best),
        "best_step_s": round(best_s, 2),
        "kept_step_s": round(fixed[before].step_after_s(after_s), 2),
        "auto_step_s": round(auto_s, 2),
        "gap": round(auto_s / best_s - 1.0, 4),
        "changes": [{"t": round(plan["t"], 1), "reason": plan["reason"], "plan": plan["plan"]} for plan in moves],
    }


def _step_before_s(run: Run, end_s: float) -> float:
    ends_s = [at_s for at_s in run.ends_s if at_s <= end_s]
    return statistics.fmean(later - earlier for earlier, later in itertools.pairwise(ends_s))


# --- running ----------------------------------------------------------------------------------------------------


def _every_assignment(
    tasks: Tasks, fleet: Mapping[str, int], steps: int, groups: int = GROUPS_PER_STEP
) -> dict[tuple[tuple[str, str], ...], Run]:
    choices: Sequence[tuple[str, ...]] = list(itertools.product(fleet, repeat=len(tasks)))
    return {
        tuple(zip(tasks, chosen, strict=True)): play(tasks, dict(zip(tasks, chosen, strict=True)), fleet, steps, groups)
        for chosen in choices
    }


def play(
    tasks: Tasks, affinity: Mapping[str, str], fleet: Mapping[str, int], steps: int, groups: int = GROUPS_PER_STEP
) -> Run:
    """One job, simulated."""
    job = build_job(
        {
            "name": "bench-affinity",
            "tasks": [
                {"name": name, "group_size": GROUP, "max_turns": 50, "max_tokens": 8192, "affinity": affinity[name]}
                for name in tasks
            ],
            "rollout": {"groups_per_step": groups, "zero_variance": "keep"},
            "pools": [
                *({"name": name, "hardware": KINDS[name], "engines": {"count": n}} for name, n in fleet.items()),
                {"name": "environments", "slots": 4 * GROUP * groups},
            ],
            "train": {"steps": steps},
            "checkpoint": {"every": 10 * steps},
            "sim": {
                "tasks": tasks,
                "train": {"step_s": 1.0},
                "links": {"push_gb_s": 200, "pull_gb_s": 200},
                "engine": {"load_gb_s": 200},
            },
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        summary = simulate(job, out, audit=False).summary
        assert summary["state"] == "finished", summary["reason"]
        rows = [orjson.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
        looks = [event for event in read_events(out / "events.jsonl") if event["e"] == "affinity"]
    plans = tuple(event for number, event in enumerate(looks) if number == 0 or event["moves"])
    return Run(ends_s=tuple(row["time_s"] for row in rows), plans=plans)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

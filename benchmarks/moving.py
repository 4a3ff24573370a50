"""What moving GPUs between training and rollout could gain, simulated. `python -m benchmarks.moving`.

As answers grow longer over a run, another split of the GPUs may be the best. 64 H800, the paper's mix at 8B, half of
its batch, mode `rollart`: early, with answers of maths and the game a third as long as in the paper's experiments, and
late, with answers as long as there. Every split is simulated in both; a job that moves GPUs has the best of each, less
what moving takes, which is not charged: so the gain is the most that moving can give against the best fixed split.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.command import main
from benchmarks.paper import TASKS, Setup
from rollart.errors import JobError
from rollart.launch.simulation import simulate

GPUS = 64
TRAIN = (8, 16, 24, 32, 40, 48)
"""A machine of eight shares every layer."""
EARLY = {
    name: {"answer_tokens": {"kind": "lognormal", "mean": 2000, "sigma": 0.5, "high": 8192}}
    for name in ("maths", "game")
}
PHASES: dict[str, dict[str, Any]] = {"early": EARLY, "late": {}}


def step_s(train_gpus: int, phase: str) -> float:
    setup = Setup(
        tasks=dict.fromkeys(TASKS, "compute"),
        pools={"compute": ("h800", GPUS - train_gpus, 1)},
        mode="rollart",
        groups=32,
        steps=10,
        skip=4,
        train_gpus=train_gpus,
        sim={"tasks": PHASES[phase]},
    )
    ends: list[float] = []
    result = simulate(setup.job, None, ends=ends)
    if result.summary.state != "finished" or result.violations:
        raise JobError(f"{setup}: {result.summary.reason} {result.violations}")
    return (ends[-1] - ends[setup.skip - 1]) / (len(ends) - setup.skip)


def measure(workers: int = 1) -> dict[str, Any]:
    runs = [(train, phase) for train in TRAIN for phase in PHASES]
    with ProcessPoolExecutor(workers) as pool:
        took = dict(zip(runs, pool.map(step_s, *zip(*runs, strict=True)), strict=True))
    fixed = min(sum(took[train, phase] for phase in PHASES) for train in TRAIN)
    moved = sum(min(took[train, phase] for train in TRAIN) for phase in PHASES)
    return {
        "simulated": True,
        "step_s": {
            f"{train} train, {GPUS - train} roll out": {phase: round(took[train, phase], 1) for phase in PHASES}
            for train in TRAIN
        },
        "most_that_moving_gains": round(fixed / moved - 1.0, 3),
    }


if __name__ == "__main__":
    sys.exit(main(measure))

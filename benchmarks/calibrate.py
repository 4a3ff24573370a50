"""How long answers of maths are in the paper's experiments, by its B alone. `python -m benchmarks.calibrate`.

The paper gives neither token counts nor the batch of B. Of every mean, spread and cap below, B is played with 128
trajectories (the batch of its A) to 512 (that of its set-up), and those are taken that come nearest to the paper's
range of H20 / H800: its worst end with the fewest trajectories, its best with the most (least sum of squared
logarithms). The one-turn game, for which the paper has no such measurement, answers as maths does in one turn. No other
experiment is looked at. What is chosen stands in jobs/profiles/paper.yaml.
"""

import itertools
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.command import main
from benchmarks.paper import B_POOLS, GROUP, MATHS_GROUPS, NO_LINKS, Setup
from rollart.errors import JobError
from rollart.launch.simulation import simulate

MEANS = (1000, 1500, 2000, 2500, 3000, 4000)
SPREADS = (0.2, 0.35, 0.5, 0.7)
CAPS = (8192, 16384)
"""The first is what four turns leave to each in a context of 32k tokens."""
FEWEST, MOST = 0.79, 0.49
"""The paper's range, H20 / H800 at equal cost."""


def step_s(mean: int, spread: float, cap: int, groups: int, kind: str) -> float:
    hardware, count = B_POOLS[kind]
    answers = {"kind": "lognormal", "mean": mean, "sigma": spread, "high": cap}
    setup = Setup(
        tasks={"maths": "auto"},
        pools={kind: (hardware, count, 1)},
        mode="sync+",
        groups=groups,
        steps=5,
        skip=1,
        sim={**NO_LINKS, "tasks": {"maths": {"answer_tokens": answers}}},
    )
    ends: list[float] = []
    result = simulate(setup.job, None, ends=ends)
    if result.summary.state != "finished" or result.violations:
        raise JobError(f"{setup}: {result.summary.reason} {result.violations}")
    return (ends[-1] - ends[setup.skip - 1]) / (len(ends) - setup.skip)


def measure(workers: int = 1) -> dict[str, Any]:
    points = list(itertools.product(MEANS, SPREADS, CAPS))
    runs = [(*point, groups, kind) for point in points for groups in MATHS_GROUPS for kind in B_POOLS]
    with ProcessPoolExecutor(workers) as pool:
        took = dict(zip(runs, pool.map(step_s, *zip(*runs, strict=True)), strict=True))
    rows: list[dict[str, Any]] = []
    for point in points:
        ratios = [took[*point, groups, "bandwidth"] / took[*point, groups, "compute"] for groups in MATHS_GROUPS]
        away = math.log(ratios[0] / FEWEST) ** 2 + math.log(ratios[-1] / MOST) ** 2
        rows.append(
            {
                "answer_tokens": dict(zip(("mean", "sigma", "high"), point, strict=True)),
                "h20_over_h800": {
                    f"{groups * GROUP} trajectories": round(ratio, 3)
                    for groups, ratio in zip(MATHS_GROUPS, ratios, strict=True)
                },
                "away": round(away, 5),
            }
        )
    rows.sort(key=lambda row: row["away"])
    return {"simulated": True, "chosen": rows[0], "others": rows[1:]}


if __name__ == "__main__":
    sys.exit(main(measure))

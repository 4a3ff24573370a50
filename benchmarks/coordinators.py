"""Where one coordinator is full, and what several give (simulated). `python -m benchmarks.coordinators`.

A slice of `jobs/sim_3072.yaml`, 384 GPUs, stands for more of them when each call takes as much longer: the calls of N
GPUs on one core load it like those of 384 that take N / 384 times as long.
"""

import platform
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.command import main
from rollart.config.load import load_job
from rollart.launch.simulation import simulate

JOB = Path(__file__).resolve().parents[1] / "jobs" / "sim_3072.yaml"
STEPS = 6
SLICE = 384
OVERRIDES = (
    f"train.steps={STEPS}",
    "rollout.groups_per_step=32",
    "pools.0.engines.count=20",
    "pools.1.engines.count=20",
    "train.gpus=64",
)
CALL_S = {"local": 0.14e-3, "ray": 0.60e-3}
"""Of the coordinator that plays it, by where engines are: `benchmarks.control` and `benchmarks.cluster`."""
PACK_S, NEWS_S = 0.013e-3, 0.024e-3
"""Of a shard beside that, and of the first coordinator: `benchmarks.shards`."""
GPUS = (3_072, 24_576, 49_152, 98_304, 196_608)
COORDINATORS = (1, 2, 4, 8, 16)


def step_s(kind: str, gpus: int, coordinators: int) -> float:
    """The mean step; the first, which fills the engines, is left out."""
    scale = gpus / SLICE
    own = CALL_S[kind] + (PACK_S if coordinators > 1 else 0.0)
    overrides = [*OVERRIDES, f"sim.control.call_s={own * scale:.6g}"]
    if coordinators > 1:
        overrides += [f"cluster.coordinators={coordinators}", f"sim.control.news_s={NEWS_S * scale:.6g}"]
    ends: list[float] = []
    result = simulate(load_job(JOB, overrides), ends=ends)
    assert not result.violations, result.violations
    return statistics.mean(later - earlier for earlier, later in pairwise(ends))


def measure() -> dict[str, Any]:
    """By where engines are and how many GPUs: the mean step, in seconds, with so many coordinators."""
    rows: dict[str, Any] = {}
    for kind in CALL_S:
        for gpus in GPUS:
            found = {str(count): round(step_s(kind, gpus, count), 1) for count in COORDINATORS}
            rows[f"{kind} {gpus:,}"] = found
            print(f"{kind} {gpus:,} GPUs: {found}", file=sys.stderr, flush=True)
    return {**rows, "steps": STEPS, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main(measure))

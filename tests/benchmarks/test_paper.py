"""The paper's experiments run, and the clearest of them come out as in the paper."""

import pytest

from benchmarks.paper import NO_LINKS, TASKS, TENSOR_PARALLEL, Setup, play
from rollart.launch.splits import Splits


def test_frozen_lake_is_faster_on_h800_than_on_h20_of_the_same_price() -> None:
    took = [
        play(
            Setup(
                tasks={"frozen_lake": "auto"},
                pools={"pool": (hardware, count, 1)},
                mode="sync+",
                groups=2,
                steps=2,
                skip=1,
                sim=NO_LINKS,
            )
        )["step_s"]
        for hardware, count in (("h800", 2), ("h20", 6))
    ]
    assert took[0] < 0.75 * took[1]


@pytest.mark.parametrize(("model", "compute", "bandwidth"), [("qwen3-8b", 64, 32), ("qwen3-32b", 16, 8)])
def test_auto_sends_frozen_lake_to_h800_and_maths_to_h20_on_the_paper_s_mix(
    model: str, compute: int, bandwidth: int
) -> None:
    gpus = TENSOR_PARALLEL[model]
    one = Setup(
        tasks=dict.fromkeys(TASKS, "auto"),
        pools={"compute": ("h800", compute, gpus), "bandwidth": ("h20", bandwidth, gpus)},
        mode="rollart",
        groups=64,
        steps=1,
        skip=0,
        model=model,
    )
    where = Splits(one.job, {"h800": (0, 96), "h20": (0, 32)}, None, "step-time").own_split().affinity
    assert where["frozen_lake"] == {"compute": 1.0}
    assert where["maths"] == {"bandwidth": 1.0}

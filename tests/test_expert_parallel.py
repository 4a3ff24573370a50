"""Expert parallelism: what is split, what travels, and what DeepEP's all-to-all was measured to take."""

from dataclasses import replace
from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.hardware import HARDWARE, MODELS, RUNTIMES, EngineCosts, engine_costs, exchange, train_costs
from rollart.launch.checks import unsupported
from rollart.launch.simulation import simulate

MOE = MODELS["qwen3-235b-a22b"]
H800 = HARDWARE["h800"]


def costs(gpus: int, parallel: str = "expert") -> EngineCosts:
    return engine_costs(MOE, H800, gpus, RUNTIMES["vllm"], parallel)


def test_on_one_device_nothing_is_split() -> None:
    assert costs(1) == costs(1, "tensor")


def test_experts_are_split_and_the_rest_is_whole_on_each_device() -> None:
    assert costs(8).experts_read_s == pytest.approx(costs(1).experts_read_s / 8)
    assert costs(8).dense_read_s == costs(1).dense_read_s
    assert costs(8).token_s == pytest.approx(costs(1).token_s / 8), "each device multiplies its own tokens"
    weights = MOE.expert_params * 2 + 16 * (MOE.params - MOE.expert_params) * 2
    assert costs(16).kv_tokens == int((16 * 0.9 * 80e9 - weights) / MOE.kv_bytes_per_token)
    assert costs(16).kv_token_s == pytest.approx(costs(1).kv_token_s / 16), "caches of its own sequences, no copies"
    assert costs(16).sequence_s == pytest.approx(costs(1).sequence_s / 16), "a scheduler each"
    assert costs(64).kv_tokens > costs(64, "tensor").kv_tokens, "64 devices would hold 16 copies of four KV heads"


def test_twice_the_tokens_take_twice_the_all_to_all() -> None:
    near, far = exchange(H800, 8, 8, once=False), exchange(H800, 16, 8, once=False)
    assert near[1] == pytest.approx(7 / (200e9 * 0.77)), "of eight copies, seven go to other devices"
    assert far[1] == pytest.approx(8 * 4 / 50e9), (
        "four of eight go to the other machine, from eight devices over one link"
    )
    assert exchange(H800, 16, 4, once=False)[1] == pytest.approx(far[1] / 2), "half the experts, half the copies"
    assert exchange(H800, 8, 8, once=True)[1] < near[1], "a device with two of its experts gets a token once"
    sent_s = costs(8).reduced_s
    assert sent_s == pytest.approx(2 * 94 * 4096 * 2 * near[1] / 8), (
        "there and back in each layer; each token is on one"
    )
    batch = costs(8).step_s(256, 0), costs(8).step_s(512, 0), costs(8).step_s(768, 0)
    assert batch[2] - batch[1] > 256 * sent_s


def test_a_large_batch_gains_and_a_small_one_loses_by_it() -> None:
    def faster(batch: float) -> float:
        context = 2000 * batch
        return costs(16, "tensor").step_s(batch, context) / costs(16).step_s(batch, context)

    assert faster(1) < 1 < faster(1024)


def test_training_pays_for_its_all_to_alls() -> None:
    one, split = (train_costs(MOE, H800, 64, expert=count).token_s for count in (1, 16))
    _, byte_s = exchange(H800, 16, 8, once=True)
    assert split - one == pytest.approx(6 * 94 * 4096 * 2 * byte_s / 64)


MACHINES = replace(H800, network_gb_s=8 * 50.0)
"""DeepEP's: eight H800, each with a network card of 400 Gb/s."""
DISPATCH_B, COMBINE_B = 7168 * (1 + 4 / 128), 7168 * 2
"""A hidden state in FP8 with its scales, and in bfloat16."""


@pytest.mark.parametrize(
    ("gpus", "dispatch_us", "combine_us"),
    [(8, 77, 114), (16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
)
def test_an_all_to_all_takes_what_deepep_s_was_measured_to(gpus: int, dispatch_us: float, combine_us: float) -> None:
    """Its README of 2025-04, low-latency kernels: 128 tokens a device, hidden size 7,168, eight experts of a token.
    What one takes beyond its bytes was chosen by the row of eight."""
    latency_s, byte_s = exchange(MACHINES, gpus, 8, once=False)
    for size, measured_us in ((DISPATCH_B, dispatch_us), (COMBINE_B, combine_us)):
        assert 1e6 * (latency_s + 128 * size * byte_s) == pytest.approx(measured_us, rel=0.15)


def test_large_ones_reach_the_rates_that_deepep_reaches() -> None:
    """The same, normal kernels: 153 to 158 GB/s between devices of a machine, 43 to 58 GB/s over each network card."""
    distinct = 8 * (1 - (7 / 8) ** 8) * 7 / 8
    assert distinct / exchange(MACHINES, 8, 8, once=True)[1] == pytest.approx(155.5e9, rel=0.03)
    far = 1 - 0.5**8
    assert far / exchange(MACHINES, 16, 8, once=True)[1] == pytest.approx(50e9, rel=0.15)


# --- in a job -------------------------------------------------------------------------------------------------------


def raw(parallel: str, **engines: Any) -> dict[str, Any]:
    return {
        "name": "experts",
        "mode": "sync+",
        "tasks": [{"name": "a", "group_size": 8, "max_tokens": 512}],
        "rollout": {"groups_per_step": 32, "zero_variance": "keep"},
        "pools": [
            {
                "name": "gpu",
                "hardware": "h800",
                "engines": {"type": "vllm", "gpus": 16, "max_batch": 1024, "parallel": parallel, **engines},
            },
            {"name": "trainers", "hardware": "h800"},
            {"name": "envs", "slots": 512},
        ],
        "train": {"pool": "trainers", "gpus": 16, "steps": 3},
        "sim": {
            "model": "qwen3-235b-a22b",
            "tasks": {"a": {"turns": 1, "prompt_tokens": 1000, "answer_tokens": 500}},
            "train": {"step_s": 1.0},
            "links": {"push_gb_s": 1e3, "pull_gb_s": 1e3},
        },
    }


def test_the_simulator_and_affinity_go_by_it() -> None:
    took = {parallel: simulate(build_job(raw(parallel))).summary.step_time_s.p50 for parallel in ("tensor", "expert")}
    expected = [costs(16, parallel).step_s(256, 256 * 1250) for parallel in ("expert", "tensor")]
    assert took["expert"] / took["tensor"] == pytest.approx(expected[0] / expected[1], rel=0.15)


def test_what_cannot_be_split_is_refused() -> None:
    dense = raw("expert")
    dense["sim"]["model"] = "qwen3-8b"
    with pytest.raises(JobError, match=r"pools\.0\.engines\.parallel: sim.model 'qwen3-8b' has no experts"):
        build_job(dense)
    wide = raw("tensor")
    wide["sim"]["train"] = {"expert": 32}
    with pytest.raises(JobError, match=r"sim\.train\.expert: 32 is more than train.gpus 16"):
        build_job(wide)
    assert any("engines.parallel: expert is simulated" in problem for problem in unsupported(build_job(raw("expert"))))

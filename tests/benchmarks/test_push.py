"""`python -m benchmarks.push` in small: all its figures are there, and say what they should."""

import pytest

from benchmarks import push

SMALL = ("train.steps=6", "rollout.groups_per_step=5", "sim.model=qwen3-8b", "sim.train.step_s=60.0")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "SEEDS", (0,))
    monkeypatch.setattr(push, "RATES_GB_S", (0.47, 0.15))


def test_a_step_takes_as_long_as_training_or_the_push() -> None:
    found = push.measure(SMALL)
    assert found["simulated"]
    assert [run["push_s"] for run in found["links"]] == pytest.approx([34.9, 109.2], abs=0.2)
    for run in found["links"]:
        assert run["step_s"] == pytest.approx(run["longer_of_both_s"], rel=0.05)
    assert found["modes"]["rollart"]["runs"][0]["max_steps"] <= 2
    assert found["rollart_over_areal"] == pytest.approx(
        found["modes"]["rollart"]["step_s"] / found["modes"]["areal"]["step_s"], abs=1e-3
    )

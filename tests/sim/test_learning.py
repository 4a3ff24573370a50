"""What training is worth in the simulator, and what it is worth less on old trajectories."""

import pytest

from rollart.config.load import build_job
from rollart.config.sim import SimTaskSettings
from rollart.launch.simulation import simulate
from rollart.sim.learning import SimLearning
from rollart.types import Batch, Group, Status, Task, Trajectory, TrajectoryId


def group(born: int) -> Group:
    task = Task(id="a/0", domain="a", index=0)
    member = Trajectory(id=TrajectoryId("g0", 0, 0), task=task, turns=(), status=Status.DONE, born=born, oldest=born)
    return Group(id="g0", task=task, members=(member,), born=born, advantages=(0.0,))


def test_a_step_is_worth_less_by_the_age_of_what_it_trains_on() -> None:
    learning = SimLearning(age_discount=0.25)
    learning.trained(Batch(step=0, serving=0, groups=(group(0), group(0))))
    assert learning.steps(1) == 1.0
    learning.trained(Batch(step=1, serving=1, groups=(group(1), group(0))))
    assert learning.steps(2) == pytest.approx(1.0 + (1.0 + 0.75) / 2)
    learning.trained(Batch(step=2, serving=1, groups=(group(0), group(-9))))
    assert learning.steps(3) == pytest.approx(learning.steps(2) + (0.5 + 0.0) / 2), "never less than nothing"
    learning.trained(Batch(step=2, serving=1, groups=(group(0), group(-9))))
    assert learning.steps(3) == pytest.approx(2.125), "made again, it is worth the same"


def test_without_a_discount_a_version_is_worth_its_steps() -> None:
    learning = SimLearning()
    learning.trained(Batch(step=0, serving=0, groups=(group(-5),)))
    assert [learning.steps(version) for version in (0, 1, 7)] == [0.0, 1.0, 7.0]


def test_success_rises_to_its_gain() -> None:
    task = SimTaskSettings(success=0.2, success_gain=0.6, success_steps=10.0)
    assert task.chance(0.0) == 0.2
    assert task.chance(10.0) == pytest.approx(0.2 + 0.6 * 0.632, abs=1e-3)
    assert task.chance(1e4) == pytest.approx(0.8)


@pytest.mark.parametrize("faults", [[], [{"kind": "coordinator_restart", "at_s": 60.0}]])
def test_a_run_on_old_trajectories_learns_later(faults: list[object]) -> None:
    def mean(discount: float) -> float:
        job = build_job(
            {
                "name": "learns",
                "tasks": [{"name": "a", "group_size": 8}],
                "rollout": {"groups_per_step": 4, "zero_variance": "keep"},
                "pools": [{"name": "cpu", "engines": {"count": 1}}, {"name": "environments", "slots": 128}],
                "train": {"steps": 40},
                "sim": {
                    "model": "qwen3-0.6b",
                    "tasks": {"a": {"turns": 1, "success": 0.1, "success_gain": 0.8, "success_steps": 10.0}},
                    "train": {"age_discount": discount, "step_s": 5.0},
                    "links": {"push_gb_s": 50.0, "pull_gb_s": 50.0},
                    "faults": faults,
                },
            }
        )
        return simulate(job).summary.tasks["a"].reward

    assert 0.2 < mean(0.4) < mean(0.0) - 0.15, "less than on fresh ones, and more than the 0.1 that it begins with"

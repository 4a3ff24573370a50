"""The contract of task sets: simulated ones, and those that come with RollArt."""

import pytest

from rollart.events.log import EventLog
from rollart.ports import TaskSet
from rollart.sim.envs import SimTaskSet
from rollart.sim.faults import Faults
from rollart.tasks.load import load_task_set
from tests.contracts.tasks import TaskSetContract


class TestSimTaskSet(TaskSetContract):
    def tasks(self, seed: int = 0) -> TaskSet:
        return SimTaskSet("a", seed, Faults((), EventLog(lambda: 0.0)))


@pytest.mark.parametrize("use", ["frozen_lake", "calculator_math", "guess_number"])
class TestOurTaskSets(TaskSetContract):
    @pytest.fixture(autouse=True)
    def _use(self, use: str) -> None:
        self.use = use

    def tasks(self, seed: int = 0) -> TaskSet:
        return load_task_set(f"rollart.tasks.{self.use}", seed=seed, domain="a")

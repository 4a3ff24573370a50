"""The contract of task sets: simulated ones, and those that come with RollArt."""

import json
from pathlib import Path

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


class TestDataset(TaskSetContract):
    @pytest.fixture(autouse=True)
    def _rows(self, tmp_path: Path) -> None:
        self.path = tmp_path / "rows.jsonl"
        self.path.write_text("".join(json.dumps({"q": f"{n}?", "a": n}) + "\n" for n in range(50)))

    def tasks(self, seed: int = 0) -> TaskSet:
        args = {"path": str(self.path), "prompt": "q", "answer": "a"}
        return load_task_set("rollart.tasks.dataset", args, seed=seed, domain="a")

"""Metrics reach TensorBoard and W&B as themselves; a tracker that breaks is left out, and the run goes on."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator
from rollart.errors import JobError, JobStopped
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.training import drive_real, train
from rollart.report.trackers import Tracking, check_trackers, trackers
from tests.control.scene import NoWorld
from tests.events import some
from tests.test_training import JOB

ROW = {"step": 3, "reward/mean": 0.5, "timing_s/step": 1.25}
EVAL = some(schema.Eval, name="eval4", task="lake", play="greedy", reward=0.75, versions=[4, 4])


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    job = build_job({**JOB, "track": {"tensorboard": True}})
    tracking = Tracking(pytest.fail)
    tracking.start(trackers(job, tmp_path))
    tracking.row(ROW)
    tracking.read(EVAL)
    tracking.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    found = {
        (event.step, value.tag): value.simple_value
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found == {(3, "reward/mean"): 0.5, (3, "timing_s/step"): 1.25, (4, "eval/lake/greedy"): 0.75}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_offline_writes_a_run_into_the_run_directory(tmp_path: Path) -> None:
    job = build_job({**JOB, "track": {"wandb": "offline"}})
    tracking = Tracking(pytest.fail)
    tracking.start(trackers(job, tmp_path / "real-1"))
    tracking.row(ROW)
    tracking.close()
    assert list((tmp_path / "real-1").rglob("*.wandb"))


def test_wandb_online_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(JobError, match=r"^track\.wandb: online needs WANDB_API_KEY"):
        check_trackers(build_job({**JOB, "track": {"wandb": "online"}}))


@pytest.mark.parametrize(
    ("track", "package"), [({"tensorboard": True}, "tensorboard"), ({"wandb": "offline"}, "wandb")]
)
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    track: dict[str, object], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollart.report.trackers.find_spec", lambda name: None if name == package else object())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    job = build_job({**JOB, "track": track, "model": {"path": str(tmp_path / "model")}})
    with pytest.raises(JobError, match=rf"^track\.{package}: .*pip install .*\[logging\]'"):
        train(job, tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Broken:
    def __init__(self) -> None:
        self.asked = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.asked += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise AssertionError("it was left out")


def test_a_tracker_that_breaks_is_left_out_with_one_warning() -> None:
    broken, warned = Broken(), list[str]()
    tracking = Tracking(warned.append)
    tracking.start({"Broken": lambda: broken})
    tracking.row(ROW)
    tracking.row(ROW)
    tracking.close()
    assert broken.asked == 1
    assert warned == ["Broken failed and is left out from here on: disk full"]


def test_a_tracker_that_does_not_start_is_left_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError("no room")

    async def work(coordinator: Coordinator) -> None:
        raise JobStopped("it came so far")

    async def nothing() -> None:
        pass

    real = SimpleNamespace(world=NoWorld(), close=nothing)
    monkeypatch.setattr("rollart.report.trackers.TensorBoard", refuse)
    monkeypatch.setattr("rollart.launch.training.real_world", lambda *args, **more: real)
    job = build_job({**JOB, "track": {"tensorboard": True}})
    result = asyncio.run(drive_real(job, tmp_path, work, resume=None, watch=None))
    assert result.summary.reason == "it came so far"
    assert result.summary.warnings == ["TensorBoard did not start and is left out: no room"]
    assert [type(event) for event in read_events(tmp_path / "events.jsonl")] == [
        schema.Run,
        schema.Warning,
        schema.Stopped,
    ]


def test_a_run_keeps_the_share_of_trajectories_that_its_job_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = SimpleNamespace(close=lambda: None)
    asked: dict[str, object] = {}

    def make(folder: Path, **settings: object) -> SimpleNamespace:
        asked.update(settings, folder=folder)
        return recorder

    async def work(coordinator: Coordinator) -> None:
        asked["recorder"] = coordinator.world.recorder

    async def nothing() -> None:
        pass

    monkeypatch.setattr("rollart.launch.training.FileRecorder", make)
    real = SimpleNamespace(world=NoWorld(), close=nothing)
    monkeypatch.setattr("rollart.launch.training.real_world", lambda *args, **more: real)
    job = build_job({**JOB, "trajectories": {"keep": 0.25, "total_mb": 3}})
    asyncio.run(drive_real(job, tmp_path, work, resume=None, watch=None))
    assert asked["recorder"] is recorder
    assert (asked["folder"], asked["share"], asked["total_bytes"]) == (tmp_path / "trajectories", 0.25, 3 << 20)

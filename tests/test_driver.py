"""One driver for train, eval and sim: lives, what a killed one may still say, and who is told what."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator
from rollart.errors import Deadlock, Interrupted, JobStopped, RollartError, StayedFull
from rollart.events import schema
from rollart.events.log import EventLog, Reader, read_events
from rollart.launch.driver import Life, drive
from rollart.launch.simulation import simulate
from rollart.launch.training import drive_real
from rollart.report.fold import SummaryFold
from rollart.sim.clock import VirtualLoop
from tests.control.scene import NoWorld
from tests.test_docs_pages import tiny_job
from tests.test_training import JOB


def test_a_killed_coordinator_says_nothing_more_and_another_one_goes_on() -> None:
    said: list[schema.Event] = []
    closed: list[int] = []

    async def work(coordinator: Coordinator) -> None:
        if closed:
            return
        try:
            await asyncio.sleep(1000.0)
        finally:
            coordinator.log.emit(schema.Warning(text="its last words"))

    async def run() -> float:
        loop = asyncio.get_running_loop()
        log = EventLog(loop.time)
        log.read_by(said.append)
        world: Any = NoWorld()

        def live() -> Life:
            killed: asyncio.Future[None] = loop.create_future()
            if not closed:
                loop.call_later(2.0, killed.set_result, None)
            return Life(world=world, close=close, killed=killed)

        async def close() -> None:
            closed.append(1)

        assert await drive(build_job(JOB), log, live, work, lambda coordinator: None) is None
        return loop.time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        took_s = runner.run(run())
    assert [type(event) for event in said] == [schema.Killed]
    assert len(closed) == 2
    assert took_s == pytest.approx(2.0 + 5.0, abs=0.1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (JobStopped("enough"), ""),
        (Interrupted("ctrl-c"), "user"),
        (StayedFull("no room"), "full"),
        (Deadlock("nobody moves"), "deadlock"),
    ],
)
def test_what_stops_a_job_is_logged_with_its_kind_and_returned(error: RollartError, kind: str) -> None:
    said: list[schema.Event] = []

    async def work(coordinator: Coordinator) -> None:
        raise error

    async def close() -> None:
        pass

    async def run() -> None:
        loop = asyncio.get_running_loop()
        log = EventLog(loop.time)
        log.read_by(said.append)
        world: Any = NoWorld()
        life = Life(world=world, close=close, killed=loop.create_future())
        assert await drive(build_job(JOB), log, lambda: life, work, lambda coordinator: None) is error

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    (stopped,) = said
    assert isinstance(stopped, schema.Stopped)
    assert stopped.reason == str(error)
    assert [name for name in ("user", "full", "deadlock") if getattr(stopped, name)] == [kind] * bool(kind)


def test_the_metrics_of_a_step_reach_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, Mapping[str, float]]] = []
    tracker = SimpleNamespace(log=lambda step, values: logged.append((step, values)), close=lambda: None)

    def watch(summary: SummaryFold, waits: object) -> Reader:
        return lambda event: None

    async def work(coordinator: Coordinator) -> None:
        coordinator.log.emit(schema.StepEnd(step=2, version=3, train_s=0.1, metrics={"actor/loss": 0.5}))

    async def nothing() -> None:
        pass

    real = SimpleNamespace(world=NoWorld(), close=nothing)
    monkeypatch.setattr("rollart.launch.training.real_world", lambda *args, **more: real)
    monkeypatch.setattr("rollart.launch.training.trackers", lambda job, out: {"mine": lambda: tracker})
    asyncio.run(drive_real(build_job(JOB), tmp_path, work, resume=None, watch=watch))
    [(step, values)] = logged
    assert (step, values["actor/loss"]) == (2, 0.5)


def test_affinity_looks_again_when_an_engine_is_lost(tmp_path: Path) -> None:
    simulate(tiny_job(), tmp_path / "run")
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    lost = {event.n for event in events if isinstance(event, schema.EngineDown | schema.EngineUp)}
    looks = [event for event in events if isinstance(event, schema.Affinity) and event.cause in lost]
    assert lost
    assert looks

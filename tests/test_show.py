"""The live view shows where a run is, at a steady pace, with events or without."""

import asyncio
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator
from rollart.control.waits import Waits
from rollart.errors import JobError, JobStopped
from rollart.events import schema
from rollart.events.log import Reader
from rollart.events.schema import Event
from rollart.launch.driver import facts
from rollart.launch.resume import Resumption
from rollart.launch.training import drive_real, longest_wait
from rollart.report.fold import SummaryFold
from rollart.report.show import LiveView, show_failed, show_plays, show_summary
from rollart.report.summary import Summary
from rollart.sim.clock import VirtualLoop
from rollart.types import Trajectory
from tests.control.scene import NoWorld, Scene, scene_job
from tests.events import some
from tests.summaries import summary_with
from tests.test_training import JOB

RUN = structs.replace(facts(build_job(JOB), clock="real"), t=0.0)
PLAYED: list[Event] = [
    schema.Start(t=1.0, id="g1.0.0", task="lake/7", pool="cpu", eval=False),
    some(schema.End, t=2.0, id="g1.0.0", task="lake/7", status="done", reward=0.25, turns=3),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(seconds: float, events: list[Event], *, steps: int = 10, waits: Callable[[], str] = str) -> None:
    """Let the view see these events, and then nothing for so many seconds."""

    async def run() -> None:
        summary = SummaryFold()
        with LiveView(steps) as view:
            readers: tuple[Reader, ...] = (summary.read, view.watch(summary, waits))
            for event in [RUN, *events]:
                for read in readers:
                    read(event)
            await asyncio.sleep(seconds)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def step(number: int, t: float) -> Event:
    return schema.StepEnd(t=t, step=number - 1, version=number, train_s=1.0, metrics={})


def test_a_line_every_ten_seconds_though_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    watched(25.0, [], waits=lambda: "engine-0 on engine.start for 9 s")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("; ")[0] for line in lines] == ["step 0/10, 0 s", "step 0/10, 10 s", "step 0/10, 20 s"]
    assert all(line.endswith("waits: engine-0 on engine.start for 9 s") for line in lines)


def test_rewards_that_nobody_computes_are_trouble_until_they_are_back(capsys: pytest.CaptureFixture[str]) -> None:
    down = schema.RewardOutage(t=3.0, reward="rewards", policy="wait", reason="ConnectError: nobody\nthere")
    watched(0.5, [*PLAYED, down])
    assert "trouble: rewards: nobody answers, on_outage is wait (ConnectError: nobody); " in capsys.readouterr().err
    watched(0.5, [*PLAYED, down, schema.RewardBack(t=9.0, reward="rewards", s=6.0)])
    assert "trouble: none; " in capsys.readouterr().err


def test_the_line_has_all_that_the_terminal_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(0.5, PLAYED)
    [line] = capsys.readouterr().err.splitlines()
    shown = ["recent reward: lake 0.25", "staleness: max 0 of 1", "engines busy: cpu 0%", "throughput: 0 sampled"]
    assert [text for text in shown if text not in line] == []
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    watched(0.5, [])
    assert [text for text in shown if text.split(":")[0] not in terminal.getvalue()] == []


def test_a_terminal_is_drawn_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    watched(3.5, [], waits=lambda: "[engine-0] on engine.start")
    assert [f"{second} s" in terminal.getvalue() for second in range(5)] == [True, True, True, True, False]
    assert "[engine-0]" in terminal.getvalue(), "brackets are no markup"


def test_the_time_left_is_told_from_the_steps_since_the_run_was_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    history = [step(1, 1.0), step(2, 1.1), step(3, 1.2)]
    watched(0.5, history)
    assert "about 1 s left" in capsys.readouterr().err
    watched(0.5, [*history, schema.Killed(t=1.3), step(4, 60.0)])
    assert "left" not in capsys.readouterr().err
    watched(0.5, [*history, schema.Killed(t=1.3), step(4, 60.0), step(5, 80.0)])
    assert "about 100 s left" in capsys.readouterr().err


def test_a_view_that_breaks_says_so_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> str:
        raise KeyError("no such wait")

    watched(100.0, [], waits=broken)
    assert capsys.readouterr().err.count("the run goes on: KeyError") == 1


def test_the_longest_waits_are_named() -> None:
    async def run() -> str:
        waits = Waits()
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Any]] = []
        for who, what in (("engine-0", "engine.start"), ("trainer", "trainer.start"), ("a", "generate"), ("b", "swap")):
            tasks.append(loop.create_task(waits.on(what).guard(who, asyncio.sleep(100))))
            await asyncio.sleep(1)
        return longest_wait(waits, loop.time())

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        said = runner.run(run())
    assert said == "engine-0 on engine.start for 4 s, trainer on trainer.start for 3 s, a on generate for 2 s"


def test_a_run_shows_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing() -> None:
        pass

    async def work(coordinator: Coordinator) -> None:
        await coordinator.waits.on("engine.start").guard("engine-0", asyncio.sleep(15.0))
        raise JobStopped("enough")

    monkeypatch.setattr(
        "rollart.launch.training.real_world", lambda *args, **more: SimpleNamespace(world=NoWorld(), close=nothing)
    )
    monkeypatch.setattr("rollart.launch.training.stop_on_signals", lambda *args: None)  # a virtual loop has none
    with LiveView(10) as view, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(
            drive_real(build_job({**JOB, "trajectories": {"keep": 0}}), tmp_path, work, resume=None, watch=view.watch)
        )
    assert "waits: engine-0 on engine.start for 10 s" in capsys.readouterr().err


def test_a_run_that_does_not_begin_says_nothing_of_the_display(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = build_job(JOB)
    resume = Resumption(out=tmp_path, job=job)
    refused = pytest.raises(JobError, match="is not there")
    with LiveView(10) as view, asyncio.Runner(loop_factory=VirtualLoop) as runner, refused:
        runner.run(drive_real(job, tmp_path, Coordinator.run, resume=resume, watch=view.watch))
    assert "display" not in capsys.readouterr().err


def summary_of(scene: Scene) -> Summary:
    summary = SummaryFold()
    for event in scene.play().events:
        summary.read(event)
    return summary.result()


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, summary: Summary) -> str:
    monkeypatch.setenv("COLUMNS", "250")
    show_summary(summary, Path("runs/x"))
    return capsys.readouterr().out


def test_the_last_table_names_a_task_that_fails_how_often_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nan(trajectory: Trajectory) -> float:
        return float("nan")

    summary = summary_of(Scene(on_score=nan))
    assert summary.state == "stopped"
    row = summary.tasks["a"]
    assert (row.state, row.taken_out, row.probes) == ("out", 1, 3)
    assert row.failures == summary.failures["attempt"].count > 20
    assert row.reasons == [f"{row.failures} x RewardError: returned nan, which is not a finite number"]
    out = printed(capsys, monkeypatch, summary)
    assert f"task 'a': {row.failures} failures ({row.failures} reward error), most often {row.reasons[0]}" in out
    assert "task 'a' is out of the mix (3 probes):" in out


def test_a_task_that_teaches_nothing_does_not_look_healthy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = scene_job(rollout__zero_variance="keep", evaluation={"every": 3, "first": True, "episodes": 4})
    summary = summary_of(Scene(job, reward=lambda trajectory: -0.11))
    row = summary.tasks["a"]
    assert (row.trained, row.with_gradient) == (6, 0)
    out = printed(capsys, monkeypatch, summary)
    assert "0 of 6" in out
    assert "none of its 6 trained groups carried a gradient" in out
    assert "-0.110" in out
    assert "%" not in out, "no percentages of something that is no rate"


def test_groups_that_carry_a_gradient_are_counted_task_by_task_and_step_by_step() -> None:
    tasks = [{"name": name, "group_size": 2, "max_tokens": 8} for name in ("a", "b")]
    scene = Scene(scene_job(tasks=tasks, rollout__zero_variance="keep", rollout__groups_per_step=4))
    scene.reward = lambda trajectory: float(trajectory.id.member) if trajectory.task.domain == "b" else 0.5
    summary, steps = SummaryFold(), []
    for event in scene.play().events:
        summary.read(event)
        if summary.row is not None:
            steps.append(summary.row)
            summary.row = None
    result = summary.result().tasks
    assert (result["a"].with_gradient, result["b"].with_gradient) == (0, result["b"].trained)
    assert [(row["groups/trained"], row["a/groups/with_gradient"]) for row in steps] == [(4, 0)] * 3
    assert all(row["b/groups/with_gradient"] == row["b/groups/trained"] == row["groups/with_gradient"] for row in steps)


@pytest.mark.parametrize(
    ("rewards", "rate"), [([0.0, 1.0, 1.0], True), ([0.0, 0.5, 1.0], False), ([-0.1] * 3, False), ([2.0] * 3, False)]
)
def test_only_rates_of_success_are_percentages(
    rewards: list[float], rate: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(scene_job(evaluation={"episodes": 3}), only_evaluate=True)
    scene.reward = lambda trajectory: rewards[trajectory.id.member]
    plays = summary_of(scene).evaluations["eval0"]
    assert plays["a"]["sampled"].rate is rate
    monkeypatch.setenv("COLUMNS", "250")
    show_plays(plays, "model")
    out = capsys.readouterr().out
    mean = sum(rewards) / 3
    assert (f"{mean:.1%}" if rate else f"{mean:.3f}") in out
    assert ("%" in out.replace("95 %", "")) is rate


def broken_evaluation(**settings: Any) -> Summary:
    async def nan(trajectory: Trajectory) -> float:
        return float("nan") if trajectory.id.group.startswith("eval") else float(trajectory.id.member % 2)

    return summary_of(Scene(scene_job(**settings), on_score=nan, only_evaluate="train__steps" not in settings))


def test_an_evaluation_without_a_score_shows_no_number_and_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = broken_evaluation(evaluation={"episodes": 4})
    assert summary.failures["attempt"].count == 4
    assert summary.failures["attempt"].reasons[0].startswith("4 x ")
    assert summary.tasks["a"].failures == 0, "of training"
    plays = summary.evaluations["eval0"]
    monkeypatch.setenv("COLUMNS", "250")
    show_plays(plays, "model")
    show_failed(plays)
    out = capsys.readouterr().out
    assert "none scored" in out
    assert "0.0" not in out
    assert "task 'a': 4 of 4 episodes failed, most often 4 x RewardError: returned nan" in out


def test_the_table_of_a_training_run_shows_no_number_where_nothing_was_scored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = broken_evaluation(train__steps=2, evaluation={"every": 2, "first": True, "episodes": 4, "greedy": True})
    assert summary.state == "finished"
    assert (summary.eval["a"].before, summary.eval["a"].after) == (None, None)
    out = printed(capsys, monkeypatch, summary)
    assert out.count("none scored") == 4
    for name in ("eval0", "eval2"):
        assert f"{name}: task 'a': 4 of 4 episodes failed, most often 4 x RewardError" in out
        assert f"{name}: task 'a', greedy: 4 of 4 episodes failed" in out


def test_the_live_view_names_a_task_that_is_out_of_the_mix(capsys: pytest.CaptureFixture[str]) -> None:
    watched(
        0.5,
        [
            schema.DrawFailed(t=1.0, task="lake", index=3, reason="task(3): no file", eval=False),
            schema.BreakerOpen(t=1.0, task="lake", failures=5, probes=0, wait_s=10.0, reason="5 x task(3): no file"),
        ],
    )
    said = capsys.readouterr().err
    assert "task 'lake' is out of the mix (0 probes): 5 x task(3): no file" in said
    assert "groups with a gradient: lake 0 of 0" in said


def test_a_warning_that_came_again_and_again_is_shown_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = summary_with(RUN, warnings=["the same"] * 7 + ["another"])
    out = printed(capsys, monkeypatch, summary)
    assert "warning: the same (7 times)\nwarning: another\n" in out

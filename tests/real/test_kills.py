"""kill -9 of any one process in the middle of a real job: it goes on, or goes on with --resume, and says why."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rollart.events import schema
from tests.real.harness import Run, job, running

Trouble = schema.WorkerLost | schema.EngineDown | schema.TrainerDown | schema.End | schema.RewardFailed


def reasons(run: Run, kind: type[Trouble], **fields: str) -> list[str]:
    return [
        event.reason
        for event in run.events()
        if isinstance(event, kind) and all(getattr(event, key).startswith(value) for key, value in fields.items())
    ]


def killed(texts: list[str]) -> bool:
    return any("signal 9" in text for text in texts)


def engine_was(run: Run, summary: dict[str, Any]) -> None:
    assert killed(reasons(run, schema.WorkerLost, worker="cpu-0"))
    assert killed(reasons(run, schema.EngineDown, engine="cpu-0"))
    assert killed(summary["failures"]["engine"]["reasons"])
    assert summary["restarts"]["engines"] == 1


def trainer_was(run: Run, summary: dict[str, Any]) -> None:
    assert killed(reasons(run, schema.WorkerLost, worker="trainer"))
    assert killed(reasons(run, schema.TrainerDown))
    assert killed(summary["failures"]["trainer"]["reasons"])
    assert summary["restarts"]["trainer"] == 1


def worker_was(run: Run, summary: dict[str, Any], role: str) -> None:
    """At work or idle: the loss is known. Only at work does it cost an attempt a second try. One that was still
    starting, in place of one whose trajectory was cancelled, costs the one that waited for it a try."""
    if killed(reasons(run, schema.RewardFailed)) and not reasons(run, schema.WorkerLost):
        assert any("could not start" in text for text in reasons(run, schema.RewardFailed))
        return
    assert killed(reasons(run, schema.WorkerLost, worker=role))
    assert killed(summary["failures"]["worker"]["reasons"])
    assert summary["failures"]["worker"]["count"] == 1


@pytest.mark.timeout(240)  # a whole job, on a machine that may be busy
def test_an_engine_and_an_environment_are_killed(model: Path, tmp_path: Path) -> None:
    """The quick one. The whole set is slow."""
    with running(tmp_path, job(model, train={"pool": "cpu", "steps": 4, "lr": 1e-3})) as run:
        run.step(1)
        run.kill("cpu-0")
        run.kill("env-")
        assert run.wait() == 0, run.said
        summary = run.ended_well(4)
        assert killed(reasons(run, schema.EngineDown, engine="cpu-0"))
        assert killed(reasons(run, schema.WorkerLost, worker="env-"))
        assert killed(summary["failures"]["worker"]["reasons"])


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["cpu-0", "trainer", "env-", "reward-"])
@pytest.mark.parametrize("moment", [0.0, 0.13])
def test_any_worker_is_killed_and_the_job_goes_on(model: Path, tmp_path: Path, victim: str, moment: float) -> None:
    with running(tmp_path, job(model)) as run:
        run.step(4)  # the checkpoint of step 3 is there, and a batch since
        time.sleep(moment)
        run.kill(victim)
        assert run.wait() == 0, run.said
        summary = run.ended_well(8)
        match victim:
            case "cpu-0":
                engine_was(run, summary)
            case "trainer":
                trainer_was(run, summary)
            case _:
                worker_was(run, summary, victim)


def resume(run: Run) -> None:
    run.start("--resume", str(run.out))


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 2, 5])
def test_the_coordinator_is_killed_and_the_job_is_resumed(model: Path, tmp_path: Path, step: int) -> None:
    with running(tmp_path, job(model)) as run:
        run.step(step)
        run.kill("coordinator")
        run.wait()
        run.nobody_is_left()
        resume(run)
        assert run.wait() == 0, run.said
        summary = run.ended_well(8)
        assert summary["restarts"]["coordinator"] == 1
        assert summary["failures"]["coordinator"]["count"] == 1
        assert "was killed after" in summary["failures"]["coordinator"]["reasons"][0]


@pytest.mark.slow
def test_the_coordinator_is_killed_again_and_again(model: Path, tmp_path: Path) -> None:
    """At moments that nobody chose: while it starts, replays, writes a checkpoint, or waits."""
    with running(tmp_path, job(model)) as run:
        run.step(1)
        for moment_s in (0.0, 2.0, 4.0, 5.0, 6.0):
            time.sleep(moment_s)
            if run.process is not None and run.process.poll() is not None:
                break
            run.kill("coordinator")
            run.wait()
            run.nobody_is_left()
            resume(run)
        assert run.wait() == 0, run.said
        run.ended_well(8)


@pytest.mark.slow
def test_a_worker_that_holds_the_interpreter_does_not_outlive_the_coordinator(model: Path, tmp_path: Path) -> None:
    """A regular expression that explodes: no thread of the worker runs any more, so only the kernel can end it."""
    stuck = Path(__file__).with_name("stuck_tasks.py")
    tasks = [{"name": "stuck", "use": str(stuck), "group_size": 4, "max_turns": 3, "max_tokens": 4}]
    with running(tmp_path, job(model, tasks=tasks)) as run:
        run.until(lambda _: any(role.startswith("reward-") for role in run.members().values()), "a reward worker")
        time.sleep(2.0)
        run.kill("coordinator")
        run.wait()
        run.nobody_is_left()


@pytest.mark.slow
def test_a_run_that_is_still_going_cannot_be_resumed(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, job(model)) as run:
        run.step(0)
        first = run.process
        assert first is not None
        os.kill(first.pid, signal.SIGSTOP)  # it cannot end before the second has looked
        resume(run)
        assert run.wait() == 2, run.said
        assert "still running" in run.said
        os.kill(first.pid, signal.SIGCONT)
        run.process = first
        assert run.wait() == 0, run.said
        run.ended_well(8)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_with_a_checkpoint(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, job(model)) as run:
        run.step(2)
        assert run.process is not None
        os.kill(run.process.pid, number)
        assert run.wait() == 130, run.said
        assert "Ctrl-C again stops at once" in run.said
        assert run.summary()["state"] == "interrupted"
        assert [event.step for event in run.events() if isinstance(event, schema.Interrupted)] == [
            run.summary()["steps"]
        ]
        run.nothing_remains()
        done = run.summary()["steps"]
        resume(run)
        assert run.wait() == 0, run.said
        run.ended_well(8)
        replayed = [event.step for event in run.events() if isinstance(event, schema.Replay)]
        assert replayed == [], f"{done} steps were in the checkpoint"


@pytest.mark.slow
def test_the_second_signal_stops_at_once(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, job(model)) as run:
        run.step(1)
        assert run.process is not None
        for pid, role in run.members().items():
            if role == "trainer":
                os.kill(pid, signal.SIGSTOP)  # the checkpoint that the first one asks for never comes
        os.kill(run.process.pid, signal.SIGINT)
        time.sleep(1.0)
        assert run.process.poll() is None
        os.kill(run.process.pid, signal.SIGINT)
        began_s = time.monotonic()
        assert run.wait() == 130, run.said
        assert time.monotonic() - began_s < 20
        assert run.summary()["state"] == "interrupted"
        run.nothing_remains()
        resume(run)
        assert run.wait() == 0, run.said
        run.ended_well(8)

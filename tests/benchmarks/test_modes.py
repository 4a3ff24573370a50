"""`python -m benchmarks.modes`: the job it runs is fixed and sound, and a very small bench gives all its figures."""

import os
from pathlib import Path

import msgspec
import pytest

from benchmarks.digits import DigitsTasks
from benchmarks.modes import FIGURES, JOB, _rotated, measure
from rollart.config.job import Job
from rollart.config.load import load_job
from rollart.config.settings import MODES
from rollart.errors import JobError
from rollart.launch.simulation import simulate

SMALL = (
    "train.steps=4",
    "checkpoint.every=4",
    "rollout.groups_per_step=2",
    "tasks.0.group_size=2",
    "tasks.0.max_turns=2",
    "tasks.0.max_tokens=4",
    "tasks.0.latency={kind: normal, mean: 0.02, sigma: 0.01}",
)


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_differ_in_nothing_but_the_mode(mode: str) -> None:
    one, default = load_job(JOB, [f"mode={mode}"]), load_job(JOB)
    assert one.tasks[0].latency is not None
    differing = {key for key in type(one).model_fields if getattr(one, key) != getattr(default, key)}
    assert differing <= {"mode", "rollout"}
    assert one.rollout.groups_per_step == default.rollout.groups_per_step
    assert all(getattr(one.rollout, key) == value for key, value in MODES[mode].items())


def test_the_task_never_ends_by_itself_and_pays_for_digits() -> None:
    environment = DigitsTasks(seed=0).environment(DigitsTasks(seed=0).task(0))
    environment.reset()
    said = [environment.step(text) for text in ("1234", "ab12", "abcd", "")]
    assert [observation.reward for observation in said] == [1.0, 0.5, 0.0, 0.0]
    assert not any(observation.done or observation.truncated for observation in said)


def test_every_mode_begins_a_round() -> None:
    assert {_rotated(list(MODES), number)[0] for number in range(5)} == set(MODES)


def test_a_run_without_a_step_to_measure_is_refused() -> None:
    with pytest.raises(JobError, match="leaves no step to measure"):
        measure(1, ["train.steps=3"])


def test_modes_that_are_there_are_read_and_nothing_is_run(tmp_path: Path) -> None:
    """The runs of two modes, brought here from the machine that they were measured on; the first steps were slow."""
    played = "{turns: 2, prompt_tokens: 40, observation_tokens: 20, answer_tokens: 4, step_s: 0.2}"
    settings = [*SMALL, "train.steps=8", f"sim.tasks.digits={played}"]
    for mode in ("sync+", "rollart"):
        folder = tmp_path / f"{mode}-0"
        summary = simulate(load_job(JOB, [*settings, f"mode={mode}", "seed=0"]), folder).summary
        calls = sum(pool.requests for pool in summary.pools.values())
        waste = {"stale": {"trajectories": 0}}
        figures = {"waste": waste, "max_steps": 0, "max_age": 0, "trajectories": 32, "busy": 0.5, "cpu_s": 0.1}
        (folder / FIGURES).write_bytes(
            msgspec.json.encode({**figures, "calls": calls, "step_s": 99.0, "train_s": 99.0})
        )
    found = measure(1, settings, tmp_path, skip=3, read=True)
    assert list(found["real"]) == list(found["simulated"]) == ["sync+", "rollart"]
    assert found["simulated_over_real"] == pytest.approx({"sync+": 1.0, "rollart": 1.0}, rel=0.15), "not the 99 seconds"
    assert found["settings"]["skipped_steps"] == 3
    assert found["residuals"]["steps"] == 5, "the fit leaves out the steps that the comparison does"
    assert "engines" in found["residuals"]
    one = measure(1, settings, tmp_path, skip=3, read=True, only=["rollart"])
    assert (list(one["real"]), one["profile"]) == (["rollart"], found["profile"])
    nothing = measure(1, settings, tmp_path / "elsewhere", skip=3, read=True)
    assert (nothing["real"], nothing["simulated"], nothing["profile"]) == ({}, {}, {})


def test_a_mode_has_as_many_steps_as_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, int] = {}

    def told(job: Job, folder: Path, **more: object) -> None:
        asked[job.mode] = job.train.steps
        raise JobError("far enough")

    monkeypatch.setattr("benchmarks.modes.train", told)
    settings = [*SMALL, f"model.path={tmp_path / 'model'}"]
    found = measure(1, settings, tmp_path / "runs", only=["sync", "sync+"], steps=["sync+=9"])
    assert asked == found["settings"]["steps"] == {"sync": 4, "sync+": 9}
    with pytest.raises(JobError, match="leaves no step to measure"):
        measure(1, settings, tmp_path / "runs", steps=["sync=3"])
    for wrong in ("sync", "lockstep=4", "sync=x"):
        with pytest.raises(JobError, match="is no mode=number"):
            measure(1, settings, tmp_path / "runs", steps=[wrong])


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(JobError, match="--read: name the directory"):
        measure(1, read=True)
    with pytest.raises(JobError, match="--only: lockstep is no mode"):
        measure(1, only=["lockstep"])


def test_a_mode_that_fails_does_not_cost_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Job, folder: Path, **more: object) -> None:
        raise JobError("no such device")

    monkeypatch.setattr("benchmarks.modes.train", broken)
    found = measure(1, [*SMALL, f"model.path={tmp_path / 'model'}"], tmp_path / "runs", only=["sync", "sync+"])
    assert found["failed"] == {"sync-0": "no such device", "sync+-0": "no such device"}
    assert found["real"] == {}


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="engine and trainer have a core each")
def test_a_small_bench_has_every_figure(tmp_path: Path) -> None:
    settings = [*SMALL, f"model.path={tmp_path / 'model'}"]
    figures = measure(1, settings, tmp_path / "runs", bounds=(2,))
    for key in ("real", "simulated", "rounds", "spread", "waste", "max_steps", "simulated_over_real"):
        assert list(figures[key]) == [*MODES, "rollart-bound-2"], key
    assert all(value > 0 for key in ("real", "simulated") for value in figures[key].values())
    assert figures["max_steps"]["sync"] == figures["max_steps"]["sync+"] == 0
    assert figures["max_steps"]["rollart"] <= 2
    again = measure(1, settings, tmp_path / "runs", bounds=(2,))
    assert (again["real"], again["train_s"]) == (figures["real"], figures["train_s"])  # read, not run again
    assert figures["settings"]["latency_s"] == {"kind": "normal", "mean": 0.02, "sigma": 0.01}
    assert figures["profile"]["tasks"]["digits"]["answer_tokens"] == {"mean": 4.0}
    assert figures["profile"]["tasks"]["digits"]["turns"] == {"mean": 2.0}

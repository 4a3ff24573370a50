"""`python -m benchmarks.two_pools`: its job is what it says, and what it prints is what the runs show."""

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.modes import FIGURES
from benchmarks.noise_task import NoiseTasks
from benchmarks.two_pools import JOB, fixed_assignments, measure, ratios, sides_of
from rollart.config.load import build_job, load_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.simulation import simulate
from rollart.sim.engine import EngineWorld

RIGHT, WRONG = "reading-half-writing-quarter", "reading-quarter-writing-half"
SMALL = ("train.steps=12", "rollout.groups_per_step=8", "tasks.0.quota=4", "tasks.1.quota=4")
WORLD = {
    "model": "qwen3-0.6b",
    "tasks": {
        "reading": {
            **{"turns": 3, "prompt_tokens": 1010, "observation_tokens": 1010, "answer_tokens": 16},
            **{"reset_s": 1e-3, "step_s": 1e-3, "reward_s": 1e-3, "success": 0.01, "success_gain": 0.0},
        },
        "writing": {
            **{"turns": 1, "prompt_tokens": 75, "answer_tokens": 512},
            **{"reset_s": 1e-3, "step_s": 1e-3, "reward_s": 1e-3, "success": 0.03, "success_gain": 0.0},
        },
    },
    "engine": {
        "measured": {
            "half": {"step_s": 1.4e-3, "sequence_s": 5e-6, "kv_token_s": 4.0e-8, "prefill_token_s": 5.0e-6},
            "quarter": {"step_s": 1.7e-3, "sequence_s": 5e-6, "kv_token_s": 5.2e-8, "prefill_token_s": 9.0e-6},
        }
    },
    "train": {"fixed_s": 0.05, "token_s": 1.0e-5},
    "links": {"push_gb_s": 10.0, "pull_gb_s": 10.0},
}
"""About what the two parts of a card are reckoned to take."""


def counting(**settings: Any) -> EngineWorld:
    """Engines that say what their steps had in them, as real ones always do."""
    return EngineWorld(**{**settings, "counts_work": True})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of three sides, as if brought here from the machine that they were measured on."""
    out = tmp_path_factory.mktemp("runs")
    for side in (RIGHT, "auto", "any"):
        given = load_job(JOB)
        pools = sides_of(given, fixed_assignments(given))[side]
        changes = [f"tasks.{number}.affinity={pool}" for number, pool in enumerate(pools)]
        raw = load_job(JOB, [*changes, *SMALL]).model_dump(mode="json")
        folder = out / f"{side}-0"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rollart.launch.simulation.EngineWorld", counting)
            summary = simulate(build_job({**raw, "sim": WORLD}), folder).summary
        calls = sum(pool.requests for pool in summary.pools.values())
        figures = {"waste": {"stale": {"trajectories": 0}}, "trajectories": 192, "cpu_s": 0.1, "calls": calls}
        (folder / FIGURES).write_bytes(msgspec.json.encode({**figures, "step_s": 99.0, "train_s": 99.0}))
    return out


@pytest.fixture(scope="module")
def found(runs: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.modes.SIMULATED_ROUNDS", 1)
        return measure(1, SMALL, runs, skip=2, only=[RIGHT, WRONG, "auto", "any"], read=True)


def test_the_assignments_that_matter_come_first() -> None:
    job = load_job(JOB)
    sides = sides_of(job, fixed_assignments(job))
    assert list(sides)[:4] == [RIGHT, WRONG, "auto", "any"]
    assert sides[WRONG] == ("quarter", "half")
    assert list(sides)[4:] == ["reading-half-writing-half", "reading-quarter-writing-quarter"]


def test_seconds_a_step_are_those_of_the_steps_that_count(runs: Path, found: dict[str, Any]) -> None:
    for side, seconds in found["real"].items():
        events = read_events(runs / f"{side}-0" / "events.jsonl")
        ends = [event.t for event in events if isinstance(event, schema.StepEnd)]
        took = [after - before for before, after in pairwise(ends[1:])]
        assert seconds == pytest.approx(statistics.fmean(took), abs=1e-4)
        assert found["steps_s"][side][0]["median"] == pytest.approx(statistics.median(took), abs=1e-3)
        assert found["steps_s"][side][0]["steps"] == 10
    assert found["off_by_best_fixed"]["rounds"] == [round(found["real"]["any"] / found["real"][RIGHT], 3)]


def test_every_side_is_simulated_from_the_runs_without_affinity_alone(found: dict[str, Any]) -> None:
    assert set(found["real"]) == {RIGHT, "auto", "any"}
    assert set(found["simulated"]) >= {RIGHT, WRONG, "auto", "any"}, "also what was not run"
    assert found["simulated_over_real"] == pytest.approx(dict.fromkeys(found["real"], 1.0), rel=0.05)
    assert found["fitted_on"] == "any"
    half, quarter = (found["profile"]["engine"]["measured"][pool]["prefill_token_s"] for pool in ("half", "quarter"))
    assert quarter / half == pytest.approx(1.8, rel=0.02)


def test_what_explain_shows_of_the_speeds_is_there(found: dict[str, Any]) -> None:
    (explained,) = found["explain"]
    for pool, kind in (("half", "prefill"), ("quarter", "prefill"), ("quarter", "decode")):
        rate = explained["speeds"][pool][kind]
        assert rate["windows"] > 0, (pool, kind)
        assert rate["measured_s"] / rate["table_s"] == pytest.approx(rate["factor"], rel=0.3)
    reading = explained["tasks"]["reading"]
    assert sum(reading["pools"].values()) == pytest.approx(1.0)
    assert reading["changes"][-1]["reason"] == reading["why"]


def test_engines_are_busy_for_as_long_as_their_steps_take(found: dict[str, Any]) -> None:
    for shares in found["busy"]["auto"]:
        assert 0.3 < min(shares.values()) <= max(shares.values()) <= 1.05


def test_off_is_held_against_auto_round_by_round() -> None:
    seconds = {"left": [2.0, 2.2], "right": [3.0, 3.0], "auto": [2.1, 2.2], "any": [2.5, 3.3]}
    found = ratios({side: [{"step_s": one} for one in all_] for side, all_ in seconds.items()}, ["left", "right"])
    assert found["best_fixed"] == "left"
    assert found["auto_by_best_fixed"] == {"median": 1.025, "rounds": [1.05, 1.0]}
    assert found["off_by_auto"] == {"median": pytest.approx(1.345), "rounds": [1.19, 1.5]}


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="--only: half is not a side; choose among reading-half-writing-quarter"):
        measure(only=["half"])
    with pytest.raises(JobError, match="--read: name the directory"):
        measure(read=True)
    with pytest.raises(JobError, match="leaves no step to measure; give 16"):
        measure(skip=14)
    with pytest.raises(JobError, match="needs two pools"):
        measure(job=JOB.parent / "gpu_modes.yaml")


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    found = measure(out=tmp_path, seconds=0.0)
    assert (found["real"], found["simulated"], found["explain"]) == ({}, {}, [])


def test_as_many_succeed_as_the_task_is_told_at_regular_distances() -> None:
    tasks = NoiseTasks(turns=1, success=0.25)
    environments = [tasks.environment(tasks.task(0)) for _ in range(8)]
    rewards = [one.step("").reward for one in environments if one.reset()]
    assert rewards == [1.0, 0.0, 0.0, 0.0] * 2

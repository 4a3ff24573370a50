"""A judge as a pool of the job, on the virtual clock: it grades, batches, survives its engines, and takes part in no
swap."""

from pathlib import Path
from typing import Any

import pytest

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event
from rollart.launch.books import RunResult
from rollart.launch.simulation import simulate


def judged_job(*, votes: int = 1, engines: int = 2, faults: tuple[dict[str, Any], ...] = (), **changes: Any) -> Job:
    raw: dict[str, Any] = {
        "name": "judged",
        "tasks": [{"name": "a", "group_size": 4}],
        "rollout": {"groups_per_step": 4},
        "pools": [
            {"name": "policy", "hardware": "h20", "engines": {"count": 2}},
            {"name": "judge", "hardware": "h20", "judge": {}, "engines": {"count": engines, "max_batch": 64}},
            {"name": "rooms", "slots": 64},
        ],
        "rewards": {"type": "judge", "pool": "judge", "rubric": "short", "votes": votes, "timeout_s": 60},
        "train": {"steps": 5},
        "limits": {"progress_s": 20, "backoff_s": 1},
        "sim": {"engine": {"start_s": 5}, "judges": {"judge": {"model": "qwen3-32b"}}, "faults": list(faults)},
    }
    return build_job({**raw, **changes})


def run(job: Job, out: Path) -> tuple[RunResult, list[Event]]:
    result = simulate(job, out)
    return result, list(read_events(out / "events.jsonl"))


def test_every_trajectory_is_graded_by_engines_that_no_swap_reaches(tmp_path: Path) -> None:
    result, events = run(judged_job(votes=2), tmp_path / "run")
    summary = result.summary
    assert (summary.state, result.violations) == ("finished", [])
    swapped = {event.engine for event in events if isinstance(event, schema.EngineSwap)}
    assert swapped == {"policy-0", "policy-1"}
    sent = {event.pool for event in events if isinstance(event, schema.Send)}
    assert sent == {"policy"}, "what a judge is asked is no call of a trajectory"
    graded = [event for event in events if isinstance(event, schema.Reward)]
    assert {event.made for event in graded} == {2}
    assert summary.reward.judges["rewards"].graded == len(graded) > 60
    assert summary.pools["judge"].requests == 2 * len(graded)
    assert summary.weights.swaps == len([event for event in events if isinstance(event, schema.EngineSwap)])


def test_what_judges_compute_is_paid_as_engine_time_of_the_tasks(tmp_path: Path) -> None:
    result, events = run(judged_job(), tmp_path / "run")
    cost, pool = result.summary.cost, result.summary.pools["judge"]
    busy_s = sum(event.busy_s for event in events if isinstance(event, schema.Reward))
    assert pool.utilisation == pytest.approx(busy_s / (2 * result.summary.time_s), rel=0.01)
    assert 0 < pool.utilisation < 1
    assert cost.rewards == 0.0
    used = sum(task.used for task in cost.tasks.values()) + cost.under_way
    assert used + cost.idle == pytest.approx(cost.pools["policy"] + cost.pools["judge"], rel=0.02)


def test_a_judge_that_other_jobs_ask_too_takes_longer() -> None:
    """They take two thirds of its engines' time, so what is this job's takes three times as long."""

    def busy_s(others: float) -> float:
        judge = {"model": "qwen3-32b", "others": others}
        result = simulate(judged_job(engines=8, sim={"engine": {"start_s": 5}, "judges": {"judge": judge}}))
        return result.summary.reward.mean_s

    assert busy_s(2 / 3) == pytest.approx(3 * busy_s(0.0), rel=0.1)


def test_a_judge_grades_many_episodes_in_one_batch(tmp_path: Path) -> None:
    """One engine. A grade takes its time alone; beside others it uses a part of the engine's."""
    both = []
    for batch in (1, 64):
        pools = list(judged_job(engines=1).model_dump(mode="json", exclude_unset=True)["pools"])
        pools[1]["engines"]["max_batch"] = batch
        result, events = run(judged_job(engines=1, pools=pools), tmp_path / str(batch))
        graded = [event for event in events if isinstance(event, schema.Reward)]
        both.append((sum(event.busy_s for event in graded) / len(graded), result.summary.time_s))
    (alone_s, one_by_one_s), (share_s, together_s) = both
    assert share_s < 0.5 * alone_s
    assert together_s < one_by_one_s


def test_a_judge_that_loses_an_engine_goes_on_and_gets_it_back(tmp_path: Path) -> None:
    """Engines by name, for faults: judge-0, judge-1, policy-0, policy-1."""
    faults = ({"kind": "engine_death", "at_s": 40, "target": 0}, {"kind": "engine_hang", "at_s": 120, "target": 1})
    result, events = run(judged_job(faults=faults), tmp_path / "run")
    assert (result.summary.state, result.violations) == ("finished", [])
    down = [event.engine for event in events if isinstance(event, schema.EngineDown)]
    assert down == ["judge-0", "judge-1"]
    assert [event.engine for event in events if isinstance(event, schema.EngineUp)] == down
    assert not [event for event in events if isinstance(event, schema.End) and event.status == "failed"]


def test_a_job_whose_judge_is_gone_stops_and_says_so(tmp_path: Path) -> None:
    faults = tuple({"kind": "engine_death", "at_s": 40 + number, "target": 0} for number in range(60))
    limits = {"engine_restarts": 1, "backoff_s": 1, "progress_s": 20}
    result, _ = run(judged_job(engines=1, faults=faults, limits=limits), tmp_path / "run")
    assert result.summary.state == "stopped"
    assert "no engine is left" in result.summary.reason
    assert "judge" in result.summary.reason


def test_a_large_judge_is_simulated_as_the_model_it_is(tmp_path: Path) -> None:
    busy_s = {}
    for model in ("qwen3-0.6b", "qwen3-32b"):
        sim = {"engine": {"start_s": 5}, "judges": {"judge": {"model": model}}}
        _, events = run(judged_job(sim=sim), tmp_path / model)
        busy_s[model] = sum(event.busy_s for event in events if isinstance(event, schema.Reward))
    assert busy_s["qwen3-32b"] > 5 * busy_s["qwen3-0.6b"]

"""Jobs whose rollout is in shards, on the virtual clock: the same promises, and what the loss of a shard does."""

from collections import Counter
from pathlib import Path

import pytest

from rollart.config.job import Job
from rollart.config.load import load_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event, group_of
from rollart.launch.books import RunResult
from rollart.launch.simulation import simulate

JOB = Path(__file__).resolve().parents[2] / "jobs" / "chaos_shards.yaml"


def job(*overrides: str) -> Job:
    return load_job(JOB, ["train.steps=6", "checkpoint.every=3", *overrides])


def play(one: Job, out: Path) -> tuple[RunResult, list[Event]]:
    result = simulate(one, out)
    assert result.violations == []
    assert not result.deadlock
    assert (result.summary.groups.lost, result.summary.groups.trained_twice) == (0, 0)
    return result, list(read_events(out / "events.jsonl"))


def dies(*at_s: float, target: int = 0) -> str:
    return "sim.faults=[" + ", ".join(f"{{kind: shard_death, at_s: {at}, target: {target}}}" for at in at_s) + "]"


def played_on(events: list[Event]) -> set[tuple[str, int]]:
    """Groups, each with the shard whose engines played it: the engines of a pool are dealt out in turn, to two."""
    sent = [event for event in events if isinstance(event, schema.Send) and not event.engine.startswith("judge")]
    return {(group_of(event.id.rpartition("/")[0]), int(event.engine.rpartition("-")[2]) % 2) for event in sent}


def test_two_coordinators_share_the_groups_and_never_one_of_them(tmp_path: Path) -> None:
    result, events = play(job(), tmp_path / "run")
    assert result.summary.state == "finished"
    places = played_on(events)
    played = Counter(shard for _, shard in places)
    assert played.total() == len({group for group, _ in places}), "a group was played by two"
    assert min(played.values()) > sum(played.values()) / 3, played


def test_the_same_seed_gives_the_same_events(tmp_path: Path) -> None:
    for name in ("one", "two"):
        play(job(dies(60.0)), tmp_path / name)
    one, two = ((tmp_path / name / "events.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_shard_that_dies_is_started_again_and_its_groups_are_played_anew(tmp_path: Path) -> None:
    result, events = play(job(dies(60.0)), tmp_path / "run")
    assert result.summary.state == "finished"
    (down,) = [event for event in events if isinstance(event, schema.ShardDown)]
    (up,) = [event for event in events if isinstance(event, schema.ShardUp)]
    assert down.groups
    again = {event.group: event for event in events if isinstance(event, schema.Admit) and event.cause == down.n}
    assert list(again) == down.groups
    begun: dict[str, int] = {}
    for event in events:
        if isinstance(event, schema.Start):
            assert event.id not in begun, "attempts have numbers that none before had"
            begun[event.id] = event.n
    assert (up.shard, up.cause, sorted(up.engines)) == (down.shard, down.n, sorted(down.engines))
    assert result.summary.restarts.coordinator == 1
    assert result.summary.failures["coordinator"].reasons == ["1 x shard-0: killed"]


def test_a_job_goes_on_with_the_shard_that_is_left(tmp_path: Path) -> None:
    result, events = play(job("limits.engine_restarts=0", dies(60.0)), tmp_path / "run")
    assert result.summary.state == "finished"
    (gone,) = [event for event in events if isinstance(event, schema.ShardGone)]
    assert gone.shard == "shard-0"
    late = [event for event in events[gone.n :] if isinstance(event, schema.Admit)]
    assert {shard for _, shard in played_on(events[gone.n :])} == {1}
    assert len(late) > 6


def test_a_job_without_a_shard_stops_and_says_why(tmp_path: Path) -> None:
    result, _ = play(job("limits.engine_restarts=0", dies(60.0, 90.0)), tmp_path / "run")
    assert result.summary.state == "stopped"
    assert "no shard is left" in result.summary.reason


def test_an_evaluation_is_whole_though_a_shard_died_under_it(tmp_path: Path) -> None:
    quiet = job("evaluation.every=2", "evaluation.episodes=8")
    _, events = play(quiet, tmp_path / "quiet")
    first = next(event for event in events if isinstance(event, schema.Start) and event.eval)
    result, events = play(
        job("evaluation.every=2", "evaluation.episodes=8", dies(first.t + 1.0, target=1)), tmp_path / "run"
    )
    (down,) = [event for event in events if isinstance(event, schema.ShardDown)]
    assert down.episodes
    assert result.summary.state == "finished"
    found = [event for event in events if isinstance(event, schema.Eval)]
    assert {(event.episodes, event.failed) for event in found} == {(8, 0)}


@pytest.mark.parametrize("mode", ["rollart", "areal", "one-off", "sync+"])
def test_the_modes_that_do_not_wait_for_the_slowest_can_be_divided(tmp_path: Path, mode: str) -> None:
    result, _ = play(job(f"mode={mode}", "cluster.coordinators=3", dies(60.0)), tmp_path / "run")
    assert (result.summary.state, result.summary.steps) == ("finished", 6)


def test_coordinators_have_a_core_each_and_the_first_hears_all(tmp_path: Path) -> None:
    def seconds(*overrides: str) -> float:
        return simulate(job("sim.control.call_s=1", *overrides), None).summary.time_s

    one = seconds("cluster.coordinators=1")
    two = seconds("cluster.coordinators=2")
    busy = seconds("cluster.coordinators=2", "sim.control.news_s=1")
    assert two < 0.5 * one
    assert busy > 1.5 * two, "what the first one hears takes its time"

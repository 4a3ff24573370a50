"""`rollart explain`: each task's profile, pools, predictions, changes and fallbacks, from the events alone."""

from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from rollart.cli import main
from rollart.config.load import build_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.simulation import simulate
from rollart.report.explain import Explain, Placements, words
from rollart.report.weights import EngineFigures, VersionFigures


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks: one declared to a pool whose only engine dies and takes long to come back."""
    folder = tmp_path_factory.mktemp("explain") / "run"
    raw: dict[str, Any] = {
        "name": "why",
        "tasks": [
            {"name": "game", "group_size": 2, "max_turns": 20},
            {"name": "maths", "group_size": 2, "max_tokens": 4096},
            {"name": "named", "group_size": 2, "affinity": "bandwidth"},
        ],
        "rollout": {"groups_per_step": 6, "zero_variance": "keep"},
        "pools": [
            {"name": "compute", "hardware": "h800", "engines": {"count": 1}},
            {"name": "bandwidth", "hardware": "h20", "engines": {"count": 1}},
            {"name": "environments", "slots": 64},
        ],
        "train": {"steps": 8},
        "sim": {
            "tasks": {
                "game": {"turns": 12, "prompt_tokens": 3000, "observation_tokens": 2000, "answer_tokens": 30},
                "maths": {"turns": 1, "answer_tokens": 2500},
            },
            "faults": [{"kind": "engine_death", "at_s": 100, "target": 0}],
        },
    }
    assert simulate(build_job(raw), folder).summary.state == "finished"
    return folder


@pytest.fixture(scope="module")
def result(out: Path) -> Placements:
    explain = Explain()
    for event in read_events(out / "events.jsonl"):
        explain.read(event)
    return explain.result


def test_each_task_has_its_profile_its_pools_and_the_reason(result: Placements) -> None:
    game, maths, named = (result.tasks[name] for name in ("game", "maths", "named"))
    assert game.profile is not None
    assert maths.profile is not None
    assert game.profile.turns == pytest.approx(12, abs=1)
    assert maths.profile.decode_tokens == pytest.approx(2500, rel=0.05)
    assert game.pools == {"compute": 1.0}
    assert named.pools == {"bandwidth": 1.0}
    assert named.reason == "declared: bandwidth"
    assert "faster" in game.reason
    fast_s, slow_s = (game.predicted[pool].step_s for pool in ("compute", "bandwidth"))
    assert fast_s is not None
    assert slow_s is None or fast_s < slow_s


def test_changes_and_attempts_are_those_of_the_events(result: Placements, out: Path) -> None:
    events = list(read_events(out / "events.jsonl"))
    moves = [event for event in events if isinstance(event, schema.Affinity) and "game" in event.moves]
    assert [change.t for change in result.tasks["game"].changes[1:]] == [event.t for event in moves]
    starts = [event for event in events if isinstance(event, schema.Start) and event.task.startswith("maths/")]
    assert sum(result.tasks["maths"].attempts.values()) == len(starts)
    assert result.looks == sum(isinstance(event, schema.Affinity) for event in events)


def test_fallbacks_are_counted_with_their_reason(result: Placements, out: Path) -> None:
    sent = [event for event in read_events(out / "events.jsonl") if isinstance(event, schema.Send) and event.fallback]
    told = {reason: count for task in result.tasks.values() for reason, count in task.fallbacks.items()}
    assert sent
    assert sum(sum(task.fallbacks.values()) for task in result.tasks.values()) == len(sent)
    assert "pool bandwidth has no engine up: compute served instead" in told


def test_the_command_prints_it_for_people_and_for_programs(
    out: Path, result: Placements, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.strip() == words(result)
    for part in ("why, simulated", "game -> compute", "named -> bandwidth", "trajectories)", "fallback"):
        assert part in text
    assert main(["explain", str(out), "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out) == msgspec.to_builtins(result)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert main(["explain", str(tmp_path)]) == 2


def test_each_version_has_its_push_its_arrival_and_what_every_engine_pulled_and_exposed(
    out: Path, result: Placements
) -> None:
    """From the events themselves: exposed is what lies between one engine's suspend and its resume."""
    events = list(read_events(out / "events.jsonl"))
    assert [one.version for one in result.weights] == list(range(1, 8)), "the run ends when the last push has begun"
    for one in result.weights[:6]:
        began = next(e.t for e in events if isinstance(e, schema.Push) and e.version == one.version)
        staged = next(e.t for e in events if isinstance(e, schema.Staged) and e.version == one.version)
        pushed = next(e for e in events if isinstance(e, schema.Pushed) and e.version == one.version)
        assert one.arrival_s == pytest.approx(staged - began, abs=1e-5)
        assert one.push_s == pytest.approx(pushed.t - began, abs=1e-5)
        assert one.bytes == pushed.bytes > 0
        for engine, figures in one.engines.items():
            swap = next(
                e for e in events if isinstance(e, schema.EngineSwap) and (e.engine, e.version) == (engine, one.version)
            )
            before = [e for e in events if isinstance(e, schema.Suspend) and engine in e.engines and e.n < swap.n]
            after = [e for e in events if isinstance(e, schema.Resume) and engine in e.engines and e.n > swap.n]
            assert figures.crossed_bytes == one.bytes, "each has a host of its own"
            if figures.exposed_s is not None:
                assert figures.exposed_s == pytest.approx(after[0].t - before[-1].t, abs=1e-5)
                assert figures.exposed_s < figures.pull_s, "it was staged: only the load is exposed"
    joined = [one.engines["bandwidth-0"] for one in result.weights if "bandwidth-0" in one.engines]
    assert [one.exposed_s is None for one in joined].count(True) == 1, "it died once, and loaded before it came back"
    assert "bandwidth-0" in words(result)


def test_what_crossed_for_an_engine_and_what_had_changed_is_shown(result: Placements) -> None:
    figures = EngineFigures(pull_s=1.0, exposed_s=0.1, crossed_bytes=2_000_000, density=0.018)
    version = VersionFigures(version=3, bytes=37_000_000, engines={"a-0": figures})
    shown = words(msgspec.structs.replace(result, weights=[version]))
    assert shown.splitlines()[-1].endswith("a-0 1.00 / 0.10, 0.002 GB came, 1.8 % changed")


def test_engines_of_a_pool_that_has_several_are_told_together(result: Placements) -> None:
    engines = {f"compute-{number}": EngineFigures(pull_s=2.0 + number, exposed_s=0.5) for number in range(3)}
    engines["bandwidth-0"] = EngineFigures(pull_s=1.0)
    version = VersionFigures(version=1, push_s=4.0, arrival_s=5.0, bytes=10**9, engines=engines)
    shown = words(msgspec.structs.replace(result, weights=[version]))
    assert "compute x 3 3.00 (2.00 to 4.00) / 0.50; bandwidth-0 1.00 / -" in shown

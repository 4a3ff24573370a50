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

"""`benchmarks.equal_steps`: what a run directory says of learning, and what several seeds say together."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.equal_steps import Learnt, is_finished, learnt, over_seeds, steps_of, summed
from rollart.config.load import load_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.simulation import simulate

JOB = Path(__file__).resolve().parents[2] / "jobs" / "rollart.yaml"


def test_a_run_says_what_it_learnt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert not is_finished(run)
    assert steps_of(run) == 0
    simulate(load_job(JOB, ["train.steps=3", "evaluation.every=3", "evaluation.episodes=8", "checkpoint.every=9"]), run)
    assert is_finished(run)
    assert steps_of(run) == 3
    found = learnt(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [row for row in rows if "swe/reward/mean" in row]
    assert found.rewards["swe"] == [(row["swe/reward/mean"], row["swe/reward/scored"]) for row in own]
    events = list(read_events(run / "events.jsonl"))
    last_s = max(event.t for event in events if isinstance(event, schema.StepEnd))
    begun = {event.id for event in events if isinstance(event, schema.Start) and not event.eval}
    scored = [
        event.id for event in events if isinstance(event, schema.End) and event.reward is not None and event.t <= last_s
    ]
    assert sum(row["reward/scored"] for row in rows) == len(begun.intersection(scored))
    assert set(found.held_out) == {"swe", "maths"}
    assert all(8 * reward == round(8 * reward) for reward in found.held_out.values()), "of eight episodes"


def one(held_out: float, rewards: list[float], last: float = 1.0) -> Learnt:
    """`last`: trajectories of the last step; the others have one each."""
    weighed = [(reward, last if number == 19 else 1.0) for number, reward in enumerate(rewards)]
    return Learnt(
        held_out={"lake": held_out},
        rewards={"lake": weighed},
        age_steps=1.5,
        clipped=0.1,
        thrown_away=3,
        step_s=2.0,
    )


def test_seeds_are_averaged_and_the_last_tenth_is_of_the_end() -> None:
    found = summed([one(0.2, [0.0] * 19 + [1.0]), one(0.6, [0.5] * 18 + [0.0, 0.0])])
    assert found["held_out"]["lake"]["mean"] == 0.4
    assert found["held_out"]["lake"]["standard_error"] == pytest.approx(0.2)
    assert found["reward"]["lake"]["each"] == [0.05, 0.45]
    assert found["reward_of_the_last_tenth"]["lake"]["each"] == [0.5, 0.0]
    assert found["thrown_away"] == [3, 3]
    assert summed([one(0.2, [0.0] * 19 + [1.0], last=81.0)])["reward"]["lake"]["mean"] == 0.81, "of trajectories"
    assert over_seeds([0.3])["standard_error"] is None
    assert over_seeds([math.nan, 1.0])["each"] == [1.0]
    assert over_seeds([math.nan])["mean"] is None
    assert summed([]) == {"runs": 0}

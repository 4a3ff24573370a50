"""What a real job keeps of its trajectories: all of them, readable after kill -9, and going on when it is resumed."""

from pathlib import Path

import pytest

from rollart.events import schema
from rollart.records.reader import Archive, TrajectoryFilter
from tests.real.harness import job, running


@pytest.mark.slow
def test_a_killed_and_resumed_job_keeps_the_trajectories_of_both_lives(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, job(model, train={"pool": "cpu", "steps": 6, "lr": 1e-3})) as run:
        run.step(4)  # the checkpoint of step 3 is there, and a batch since
        run.kill("coordinator")
        run.wait()
        run.nobody_is_left()
        before = {head.id for head in Archive(run.out).find(TrajectoryFilter())}
        assert before
        run.start("--resume", str(run.out))
        assert run.wait() == 0, run.said
        run.ended_well(6)
        events = run.events()
    archive = Archive(run.out)
    heads = archive.find(TrajectoryFilter())
    assert before == {head.id for head in heads if head.life == 0}
    killed = next(event.n for event in events if isinstance(event, schema.Killed))
    ends = {event.id: event for event in events if isinstance(event, schema.End) and event.n > killed}
    assert {head.id for head in heads if head.life == 1} == set(ends), "the second life lost none"
    for head in heads:
        if head.life == 1:
            end = ends[head.id]
            assert (head.status, head.reward, head.turns, head.tokens) == (
                end.status,
                end.reward,
                end.turns,
                end.tokens,
            )
    groups = {event.step: event.groups for event in events if isinstance(event, schema.Batch)}
    trained = [head for head in heads if head.fate == "trained"]
    kept = {head.group for head in heads}  # a kill loses what ended in the last second
    steps = {head.step for head in trained}
    without = {step for step, ids in groups.items() if kept & set(ids)} - steps
    assert without <= {1, 2}, "fates of the last second too, where the checkpoint covers them; later steps are replayed"
    assert steps >= {0, 5}, "of both lives"
    assert all(head.step is not None and head.group in groups[head.step] for head in trained)
    whole = archive.one(trained[0])
    assert all(len(turn.tokens) == len(turn.logprobs) > 0 for turn in whole.turns)
    assert whole.turns[0].shown[0].content == "go"
    assert archive.dropped == 0

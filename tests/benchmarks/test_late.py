"""What `benchmarks.late` plays: episodes of as many turns as were drawn, and both sides otherwise alike."""

from benchmarks.late import SIDES, job_of
from benchmarks.uneven_turns import TURNS, UnevenTasks


def test_an_episode_has_the_turns_that_were_drawn() -> None:
    tasks = UnevenTasks(seed=0)
    for number in range(20):
        task = tasks.task(number)
        assert task.payload["turns"] in TURNS
        game = tasks.environment(task)
        game.reset()
        done = [game.step("0123").done for _ in range(task.payload["turns"])]
        assert done == [False] * (task.payload["turns"] - 1) + [True]


def test_the_sides_differ_in_nothing_but_what_becomes_of_late_groups() -> None:
    abort, wait = (job_of(side, 3).model_dump() for side in SIDES)
    assert abort["rollout"].pop("late") == "abort"
    assert wait["rollout"].pop("late") == "wait"
    assert abort == wait

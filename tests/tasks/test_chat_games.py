"""The games in words: what is right earns 1, and everything that is needed is said."""

import random

import pytest

from rollart.tasks.api import TaskSet, text_of
from rollart.tasks.chat_games import MAX_GUESSES, Guess, Guessing, Lake, LakeInWords, Largest
from rollart.types import Observation


def play(tasks: TaskSet, index: int) -> tuple[float, list[str]]:
    """The scripted player's reward, and all that it was shown."""
    task = tasks.held_out(index)
    env, rng = tasks.environment(task), random.Random(0)
    first = env.reset()
    shown, reward = [first if isinstance(first, str) else text_of(first)], 0.0  # type: ignore[arg-type]
    for _ in range(16):
        seen = env.step(tasks.scripted(task, shown, rng))
        assert isinstance(seen, Observation)
        reward += seen.reward
        if seen.done:
            return reward, shown
        shown.append(text_of(seen))
    raise AssertionError("the game goes on")


@pytest.mark.parametrize("tasks", [Lake(), Guess(), Largest()], ids=lambda tasks: type(tasks).__name__)
def test_who_plays_by_what_is_said_wins(tasks: TaskSet) -> None:
    for index in range(20):
        reward, shown = play(tasks, index)
        assert reward == 1.0
        assert all("Answer with one" in text for text in shown)


def test_the_lake_says_what_is_around_and_where_the_goal_is() -> None:
    env = LakeInWords(["SFHF", "HFFF", "FFFF", "FFFG"])
    assert "The goal is 3 down and 3 right. up: wall, down: hole, left: wall, right: ice." in text_of(env.reset())


def test_a_guess_narrows_the_range_and_a_foolish_one_does_not() -> None:
    game = Guessing(40)
    assert "between 1 and 99" in game.reset()
    for said, left in (("50", "1 and 49"), ("20!", "21 and 49"), ("5", "21 and 49"), ("none", "21 and 49")):
        assert f"between {left}." in text_of(game.step(said))
    seen = game.step("I say 40")
    assert (seen.reward, seen.done) == (1.0, True)
    assert game.step("40") == Observation(done=True)


def test_guesses_end() -> None:
    game = Guessing(40)
    seen = [game.step("1") for _ in range(MAX_GUESSES)]
    assert [each.done for each in seen] == [False] * (MAX_GUESSES - 1) + [True]
    assert not any(each.reward for each in seen)

"""The task sets that come with RollArt: they can be won, are split by hash, and pass their own check."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from rollart.tasks import calculator_math, frozen_lake, guess_number
from rollart.tasks.api import Episode, EpisodeTurn, TaskSet, as_observation, text_of
from rollart.tasks.check import check_task
from rollart.tasks.load import load_reward, load_task_set, reward_of
from rollart.types import Observation, Task

ALL = ("rollart.tasks.frozen_lake", "rollart.tasks.calculator_math", "rollart.tasks.guess_number", "reasoning_gym:gcd")
Player = Callable[[Task, Sequence[str], random.Random], str]


def play(task_set: TaskSet, task: Task, player: Player) -> Episode:
    env: Any = task_set.environment(task)
    observation: Observation = as_observation(env.reset())
    rng = random.Random(task.id)
    texts: list[str] = []
    turns: list[EpisodeTurn] = []
    while not (observation.done or observation.truncated):
        texts.append(text_of(observation))
        action = player(task, texts, rng)
        observation = as_observation(env.step(action))
        turns.append(EpisodeTurn(context=texts[-1], text=action, tokens=1, reward=observation.reward))
    return Episode(id="e", status="done", task=task, turns=tuple(turns))


def success(task_set: TaskSet, use: str, player: Player, count: int) -> float:
    score = load_reward(reward_of(use))
    rewards = [score(play(task_set, task_set.held_out(index), player)) for index in range(count)]
    return sum(float(reward) for reward in rewards if isinstance(reward, int | float)) / count


@pytest.mark.parametrize("use", ALL)
def test_the_script_wins_and_the_check_is_silent(use: str) -> None:
    task_set = load_task_set(use, seed=3)
    assert task_set.domain == use.removeprefix("rollart.tasks.").partition(":")[0]
    assert success(task_set, use, task_set.scripted, 40) == 1.0
    assert check_task(use).findings == []


@pytest.mark.parametrize(("name", "low", "high"), [("frozen_lake", 0.01, 0.3), ("calculator_math", 0.15, 0.4)])
def test_the_novice_speaks_well_and_plays_badly(name: str, low: float, high: float) -> None:
    task_set = load_task_set(f"rollart.tasks.{name}")
    assert low < success(task_set, f"rollart.tasks.{name}", task_set.novice, 300) < high


@pytest.mark.parametrize("name", ["frozen_lake", "calculator_math", "guess_number"])
def test_training_warm_up_and_held_out_problems_are_disjoint_for_all_seeds(name: str) -> None:
    splits: dict[str, set[str]] = {"task": set(), "warmup": set(), "held_out": set()}
    for seed in range(3):
        task_set = load_task_set(f"rollart.tasks.{name}", seed=seed)
        for method, found in splits.items():
            found.update(json.dumps(getattr(task_set, method)(index).payload) for index in range(300))
    assert min(len(found) for found in splits.values()) >= 15
    assert not splits["task"] & splits["held_out"]
    assert not splits["task"] & splits["warmup"]
    assert not splits["warmup"] & splits["held_out"]


def test_tasks_depend_on_seed_domain_and_index_only() -> None:
    first = load_task_set("rollart.tasks.frozen_lake", seed=1)
    again = load_task_set("rollart.tasks.frozen_lake:FrozenLakeTasks", seed=1)
    assert [again.task(index) for index in (5, 2)] == [first.task(index) for index in (5, 2)]
    assert first.task(5) != load_task_set("rollart.tasks.frozen_lake", seed=2).task(5)
    assert first.task(5).id == "frozen_lake/5"
    assert first.held_out(5).id != first.task(5).id


def walk(*moves: str) -> list[Observation]:
    env = frozen_lake.FrozenLake(["SFFF", "FHFH", "FFFH", "HFFG"])
    return [env.reset(), *(env.step(move) for move in moves)]


def test_frozen_lake_by_hand() -> None:
    seen = walk("Down!", "I do not know", "right, no: down", "right", "down", "right", "right", "up")
    assert text_of(seen[0]) == f"{frozen_lake.INSTRUCTION}P...\n.O.O\n...O\nO..G\n"
    assert text_of(seen[1]) == text_of(seen[2]) == "....\nPO.O\n...O\nO..G\n"
    assert [observation.done for observation in seen] == [False] * 7 + [True, True]
    assert [observation.reward for observation in seen] == [0.0] * 7 + [1.0, 0.0]
    fell = walk("down", "right")
    assert (fell[-1].done, fell[-1].reward) == (True, 0.0)
    assert walk("down", "right", "left")[-1].done, "there is no way out of a hole"
    bored = walk(*["up"] * frozen_lake.MAX_MOVES)
    assert [observation.truncated for observation in bored[-2:]] == [False, True]


def test_a_walk_on_the_lake_is_gymnasiums() -> None:
    rng = random.Random(0)
    tasks = frozen_lake.FrozenLakeTasks(seed=3)
    ends = set()
    for index in range(40):
        rows = tasks.task(index).payload["map"]
        theirs: Any = FrozenLakeEnv(desc=list(rows), is_slippery=False)
        theirs.reset(seed=0)
        ours = frozen_lake.FrozenLake(rows)
        assert text_of(ours.reset()).removeprefix(frozen_lake.INSTRUCTION)[0] == "P", "both start in the corner"
        for _ in range(frozen_lake.MAX_MOVES):
            move = rng.randrange(4)
            place, reward, over, _, _ = theirs.step(move)
            seen = ours.step(["left", "down", "right", "up"][move])
            assert (seen.done, seen.reward) == (over, reward)
            if over:
                ends.add(reward)
                break
            row, column = divmod(place, frozen_lake.SIZE)
            grid = text_of(seen).split("\n")
            assert [(at, line.index("P")) for at, line in enumerate(grid) if "P" in line] == [(row, column)]
    assert ends == {0, 1}, "no walk reached the goal, or none a hole"


def test_an_episode_as_json_is_a_copy() -> None:
    task = Task(id="a/1", domain="a", index=1, payload={"map": ["SF"], "share": np.float64(0.5)}, seed=4)
    turn = EpisodeTurn(context="say", text="yes", tokens=2, reward=1.0)
    said: Any = Episode(id="g1.2.0", status="done", task=task, turns=(turn,)).to_json()
    assert said == {
        "id": "g1.2.0",
        "status": "done",
        "task": {"id": "a/1", "domain": "a", "index": 1, "payload": {"map": ["SF"], "share": 0.5}, "seed": 4},
        "turns": ({"context": "say", "text": "yes", "tokens": 2, "reward": 1.0},),
    }
    said["task"]["payload"]["map"].append("a reward function's own")
    assert task.payload["map"] == ["SF"]


def test_calculator_by_hand() -> None:
    def said(*actions: str) -> list[Observation]:
        env = calculator_math.Calculator("(99-80)*8")
        return [env.reset(), *(env.step(action) for action in actions)]

    seen = said("calc 99-80", "Calc 19 * 8.", "answer 152")
    assert [text_of(observation) for observation in seen[1:3]] == ["19\n", "152\n"]
    assert (seen[-1].reward, seen[-1].done) == (1.0, True)
    assert said("the answer 19")[-1].reward == 0.0
    assert text_of(said("calc 99999999999*2")[-1]) == "say calc or answer\n"
    assert text_of(said("calc -5*3")[-1]) == "-15\n"
    assert said(*["hm"] * calculator_math.MAX_CALLS)[-1].truncated
    assert [observation.reward for observation in said("answer 152", "answer 152")[1:]] == [1.0, 0.0]


def test_score_needs_the_words_only() -> None:
    task_set = load_task_set("rollart.tasks.calculator_math")
    episode = play(task_set, task_set.task(0), task_set.scripted)
    assert calculator_math.score(Episode.from_json(json.loads(json.dumps(episode.to_json())))) == 1.0
    with pytest.raises(ValueError, match="not an episode"):
        Episode.from_json({"id": 1})


def test_every_number_is_drawn() -> None:
    rng = random.Random(0)
    tasks = load_task_set("rollart.tasks.guess_number", seed=0)
    assert isinstance(tasks, guess_number.GuessTasks)
    drawn = {tasks.draw(rng)["secret"] for _ in range(100 * guess_number.HIGHEST)}
    assert drawn == set(range(1, guess_number.HIGHEST + 1))

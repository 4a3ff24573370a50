"""The lake as a tool: RollArt's rendering is what the chat template, and so TRL, makes of it."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tool_lake import (
    INSTRUCTION,
    MAX_CALLS,
    OVER,
    ToolLake,
    ToolLakeTasks,
    Walk,
    call,
    calls_in,
    tool_tokenizer,
)
from rollart.model.tokenizer import ChatTokenizer
from rollart.tasks.check import check_task
from rollart.tasks.frozen_lake import FrozenLake
from rollart.types import Message


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tools")
    tool_tokenizer().save_pretrained(made)
    return made


def walk() -> Walk:
    return Walk(FrozenLake(["SFFF", "FFFF", "FFFF", "FFFG"]))


def test_both_sides_read_the_same_tokens(path: Path) -> None:
    ours, theirs = ChatTokenizer(path), tool_tokenizer()
    tasks = ToolLakeTasks(seed=0, domain="lake")
    env, tool = tasks.environment(tasks.task(0)), walk().move
    begun = env.reset()
    said, grid = call("right"), ".P..\n....\n....\n...G\n"
    talk: list[dict[str, Any]] = [{"role": "user", "content": begun.messages[-1].content}]
    assert ours.render(begun.messages, fresh=True).tolist() == _rendered(theirs, talk, tool)

    talk += [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": calls_in(said)[0]}]},
        {"role": "tool", "name": "move", "content": grid},
    ]
    whole = _rendered(theirs, talk, tool)
    answer = [*ours.encode(said).tolist(), ours.end_of_turn]
    result = ours.render((Message(role="tool", content=grid),), fresh=False).tolist()
    assert whole == [*ours.render(begun.messages, fresh=True).tolist(), *answer, *result]
    assert 15 < len(answer) < 25, "cut about as a large model's tokenizer cuts it"


def _rendered(tokenizer: Any, talk: list[dict[str, Any]], tool: Any) -> list[int]:
    return list(
        tokenizer.apply_chat_template(talk, tools=[tool], add_generation_prompt=True, tokenize=True, return_dict=False)
    )


def test_both_sides_find_the_same_calls(path: Path) -> None:
    tokenizer = tool_tokenizer()
    for said in (call("left"), f"{call('up')}{call('down')}", "done"):
        parsed = tokenizer.parse_response(f"{said}<|end|>", prefix="<|assistant|>")
        assert [each["function"] for each in parsed.get("tool_calls") or []] == calls_in(said)


@pytest.mark.parametrize(
    "said", ["", "left", "<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", call("up")[:-3]]
)
def test_what_is_no_call_ends_the_walk(said: str) -> None:
    tasks = ToolLakeTasks(seed=0)
    env = tasks.environment(tasks.task(0))
    env.reset()
    assert env.step(said).done


def test_a_wrong_call_is_told_and_moves_nothing() -> None:
    tasks = ToolLakeTasks(seed=0)
    env = tasks.environment(tasks.task(0))
    first = env.reset().messages[-1].content
    seen = env.step(call("left").replace("direction", "way"))
    assert not seen.done
    assert "error" in seen.messages[0].content
    assert "not found" in env.step(call("left").replace('"move"', '"fly"')).messages[0].content
    assert INSTRUCTION + env.step(call("sideways")).messages[0].content == first


def test_a_walk_ends_with_a_word_and_is_rewarded_once() -> None:
    one = walk()
    way = ["right"] * 3 + ["down"] * 3
    assert [one.move(step) for step in way][-1] == OVER
    assert one.move("left") == OVER
    assert one.reward == 1.0


def reward_of(*said: str) -> float:
    env = ToolLake(FrozenLake(["SFFF", "FFFF", "FFFF", "FFFG"]))
    env.reset()
    return sum(env.step(each).reward for each in said)


def test_only_a_clean_walk_is_rewarded() -> None:
    way = [call("right")] * 3 + [call("down")] * 3
    assert reward_of(*way, "done") == 1.0
    assert reward_of(*way, "well done") == 0.0
    assert reward_of(*way, "<tool_call>") == 0.0
    assert reward_of(f"so {way[0]}", *way[1:], "done") == 0.0
    assert reward_of(way[0] + way[1], *way[2:], "done") == 0.0
    assert reward_of(*way[1:], "done") == 0.0, "it is not at the goal"


def test_calls_are_bounded() -> None:
    tasks = ToolLakeTasks(seed=0)
    env = tasks.environment(tasks.task(0))
    env.reset()
    seen = [env.step(call("up")) for _ in range(MAX_CALLS + 1)]
    assert [each.done for each in seen] == [False] * MAX_CALLS + [True]


def test_the_task_checks_out_and_its_script_wins() -> None:
    assert not [each for each in check_task("benchmarks.tool_lake:ToolLakeTasks").findings if each.level == "error"]
    tasks, rng = ToolLakeTasks(seed=1), random.Random(0)
    env, task = tasks.environment(tasks.task(3)), tasks.task(3)
    seen, texts, reward = env.reset(), [], 0.0
    while not seen.done:
        texts.append(seen.messages[-1].content)
        seen = env.step(tasks.scripted(task, texts, rng))
        reward += seen.reward
    assert reward == 1.0

"""FrozenLake through a tool, as TRL's `environment_factory` wants it, and as a task of RollArt, token for token.

Each answer is a tool call in JSON of some 20 tokens; the grid comes back as the tool's message. An answer without a
call ends the episode, on both sides: TRL's loop knows no other end. So once a walk is over the model is told, and says
that it is done. It earns 1 where it reached the goal and every answer was one call and nothing else, or the last word:
words that cost nothing would drift, and break the calls with them.

`python -m benchmarks.tool_lake DIR` makes the model both sides begin from: that of `rollart model tiny`, with a
tokenizer that cuts tool calls about as a large model's does, warmed up on this form of the lake alone.
"""

import argparse
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rollart.tasks.api import Environment, observe
from rollart.tasks.frozen_lake import MOVES, SIZE, FrozenLake, FrozenLakeTasks
from rollart.types import Message, Observation, Task
from rollart_recipes.tiny import END

INSTRUCTION = "You are P on a frozen lake. Walk to G, never onto a hole O. When the walk is over, say done.\n"
OVER, DONE = "The walk is over.\n", "done"
MAX_CALLS = 12
"""Calls that are answered; the answer after them is the last."""
CARELESS_SHARE = 0.15
"""Of a novice's moves that look at nothing."""
TOOLS_BEGIN, TOOLS_END = "You can call tools.\n<tools>\n", "</tools>\n"
CALL_TAGS = ("<tool_call>", "</tool_call>")
WARMUP_STEPS = 300
"""Three to four minutes on two cores."""

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|system|>You can call tools.\\n<tools>\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '</tools>\\n' }}
{%- endif %}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{%- if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": CALL_TAGS[0],
            "close_pattern": rf"{CALL_TAGS[1]}\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": re.escape(END), "content": "text"},
    },
}
"""How transformers, and so TRL, finds the calls in an answer."""
_CALL = re.compile(rf"{CALL_TAGS[0]}\s*(.*?)\s*{CALL_TAGS[1]}", re.DOTALL)


class Walk:
    """One walk, with the one tool that moves it. Both sides call this."""

    def __init__(self, lake: FrozenLake) -> None:
        self._lake = lake
        self._seen = lake.reset()
        self.reward = 0.0

    def grid(self) -> str:
        lines = self._seen.messages[-1].content.splitlines(keepends=True)
        return "".join(lines[-SIZE:])

    def move(self, direction: str) -> str:
        """Walk one field.

        Args:
            direction: up, down, left or right.
        """
        if not self._seen.done:
            self._seen = self._lake.step(direction)
            self.reward += self._seen.reward
        return OVER if self._seen.done else self.grid()


class ToolLake(Environment):
    """The walk as RollArt plays it."""

    def __init__(self, lake: FrozenLake) -> None:
        self._walk = Walk(lake)
        self._turns = 0
        self._clean = True

    def reset(self) -> Observation:
        asked = Message(role="user", content=INSTRUCTION + self._walk.grid())
        return Observation(messages=(Message(role="system", content=tools_text()), asked))

    def step(self, action: str) -> Observation:
        self._turns += 1
        calls = calls_in(action)
        if not calls or self._turns > MAX_CALLS:
            clean = self._clean and action.strip() == DONE
            return observe(reward=self._walk.reward if clean else 0.0, done=True)
        self._clean = self._clean and len(calls) == 1 and _CALL.fullmatch(action.strip()) is not None
        return Observation(messages=tuple(Message(role="tool", content=self._answer(call)) for call in calls))

    def _answer(self, call: Mapping[str, Any]) -> str:
        """What TRL would say."""
        try:
            if call["name"] != "move":
                raise ValueError(f"Tool {call['name']} not found.")
            return self._walk.move(**call["arguments"])
        except (ValueError, TypeError) as error:
            return str({"error": str(error)})


def calls_in(text: str) -> list[Mapping[str, Any]]:
    """The calls of an answer; none where any of it cannot be read."""
    try:
        calls = [json.loads(found) for found in _CALL.findall(text)]
    except ValueError:
        return []
    well_formed = all(
        isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
        for call in calls
    )
    return calls if well_formed else []


def call(direction: str) -> str:
    """What the model says to move."""
    arguments = json.dumps({"direction": direction})
    return f'{CALL_TAGS[0]}\n{{"name": "move", "arguments": {arguments}}}\n{CALL_TAGS[1]}'


@cache
def tools_text() -> str:
    """What the chat template makes of the tool."""
    from transformers.utils import get_json_schema

    schema = get_json_schema(Walk(FrozenLake(["SF", "FG"])).move)
    return f"{TOOLS_BEGIN}{json.dumps(schema)}\n{TOOLS_END}"


class ToolLakeTasks(FrozenLakeTasks):
    """The lake's own maps."""

    def environment(self, task: Task) -> Any:
        return ToolLake(super().environment(task))

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        return DONE if observations[-1] == OVER else call(super().scripted(task, observations, rng))

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """As the lake's own, but at times careless: who never saw a walk end early would not know what to say then."""
        if observations[-1] == OVER:
            return DONE
        careless = rng.random() < CARELESS_SHARE
        return call(rng.choice(MOVES) if careless else super().novice(task, observations, rng))


# --- the model ------------------------------------------------------------------------------------------------------


def pieces() -> list[str]:
    """How the words above are cut into tokens: as byte-pair tokenizers do it, at words, signs and line ends."""
    said = call(MOVES[0])
    for tag in CALL_TAGS:
        said = said.replace(tag, "")
    prose = tools_text() + INSTRUCTION + OVER + DONE
    signs = r" ?[^\sA-Za-z0-9]+|\s"
    found = re.findall(rf"[A-Za-z]+|{signs}", said) + re.findall(rf" ?[A-Za-z]+|{signs}", prose)
    return list(dict.fromkeys([*CALL_TAGS, *found]))


def tool_tokenizer() -> Any:
    from rollart_recipes.tiny import tiny_tokenizer

    tokenizer: Any = tiny_tokenizer(pieces())
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = tokenizer.init_kwargs["response_template"] = RESPONSE_TEMPLATE
    return tokenizer


def make(path: Path, seed: int, steps: int) -> None:
    """Write the model to a directory."""
    import torch

    from rollart.tasks.load import load_task_set
    from rollart_recipes.tiny import save, tiny_model
    from rollart_recipes.warmup import warm_up

    def progress(step: int, loss: float) -> None:
        if step % 10 == 0:
            print(f"warm-up {step}/{steps}, loss {loss:.3f}", flush=True)

    tokenizer = tool_tokenizer()
    torch.manual_seed(seed)
    model = tiny_model(len(tokenizer))
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    warm_up(
        model,
        path,
        seed=seed,
        steps=steps,
        tasks=[load_task_set("benchmarks.tool_lake:ToolLakeTasks", seed=seed)],
        progress=progress,
    )
    save(model, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="make the model that both sides of the comparison begin from")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=WARMUP_STEPS)
    args = parser.parse_args()
    make(args.path, args.seed, args.steps)


if __name__ == "__main__":
    main()

"""What a model's answer says, read from its text: thoughts, words, and calls of tools.

Pure. Chat templates teach models different ways to write a call; `form_of` finds a template's own. The tokenizer reads
answers for agents behind the endpoint with it, and tool environments read the text they are given. Nothing here is
ever turned back into tokens.
"""

import json
from typing import Any, NamedTuple

from rollart.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
ARGUMENTS = ("arguments", "parameters")
"""Names under which models write them: Hermes and Qwen the first, Llama the second."""


class Form(NamedTuple):
    """How the answers of one model are written."""

    tags: bool = True
    """A call is JSON between <tool_call> and </tool_call> (Hermes, Qwen). Otherwise an answer that calls is JSON from
    its beginning to its end, with `;` between several (Llama)."""
    thinks: bool = True
    """What comes before </think> is not part of the answer."""


class Answer(NamedTuple):
    """An answer, taken apart."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Their ids count from `call_0`."""
    wrong: str = ""
    """What is wrong with something that is meant as a call; then there are no calls, and `content` is all of it."""


def form_of(template: str) -> Form:
    """Of a chat template."""
    llama = OPEN not in template and ("python_tag" in template or '"parameters": ' in template)
    return Form(tags=not llama, thinks=THOUGHT in template)


def read(text: str, form: Form | None = None) -> Answer:
    """None: whatever form the text itself has."""
    form = form or Form(tags=OPEN in text or not text.lstrip().startswith(("{", "[")))
    reasoning, text = _apart(text) if form.thinks else ("", text)
    try:
        content, found = _tagged(text) if form.tags else _bare(text)
        calls = tuple(_call(number, value) for number, value in enumerate(found))
    except ValueError as error:
        return Answer(text, reasoning, wrong=str(error))
    return Answer(content, reasoning, calls)


def spoken(text: str) -> str:
    """What is said beside thoughts: nothing where they did not end."""
    return _apart(text)[1]


def _apart(text: str) -> tuple[str, str]:
    """Thoughts, whose beginning may stand in the prompt, and what follows them."""
    thought, ended, rest = text.partition(THOUGHT)
    if not ended and not text.lstrip().startswith(THINK):
        return "", text
    return thought.strip().removeprefix(THINK).strip(), rest.lstrip("\n")


def _tagged(text: str) -> tuple[str, list[Any]]:
    before, *parts = text.split(OPEN)
    words, found = [before], []
    for part in parts:
        inside, _, after = part.partition(CLOSE)
        found.append(_json(inside))
        words.append(after)
    return ("".join(words).strip() if found else text), found


def _bare(text: str) -> tuple[str, list[Any]]:
    """Text that is not JSON, or JSON that does not look like a call, is text."""
    decoder, at, whole = json.JSONDecoder(), 0, text.strip()
    found: list[Any] = []
    if not whole.startswith(("{", "[")):
        return text, []
    while at < len(whole):
        try:
            value, at = decoder.raw_decode(whole, at)
        except (ValueError, RecursionError):
            if found or '"name"' in whole:
                raise ValueError(f"this is not JSON: {_short(whole[at:])}") from None
            return text, []
        found += value if isinstance(value, list) else [value]
        while at < len(whole) and whole[at] in "; \n\t\r":
            at += 1
    if not all(isinstance(value, dict) and "name" in value for value in found):
        return text, []
    return "", found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {_short(text.strip())} ({error})") from None


def _call(number: int, value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f'a call is {{"name": ..., "arguments": {{...}}}}, and not {_short(json.dumps(value))}')
    arguments: Any = next((value[key] for key in ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {value['name']} are {_short(json.dumps(arguments))}, and not an object")
    return ToolCall(id=f"call_{number}", name=value["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."

"""What a model's answer says, in the forms that chat templates teach."""

import json

import pytest

from rollart.chat import Answer, Form, form_of, read, spoken

HERMES, LLAMA, PLAIN = Form(tags=True, thinks=True), Form(tags=False, thinks=False), Form(tags=True, thinks=False)


def calls(answer: Answer) -> list[tuple[str, str, object]]:
    return [(call.id, call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize(
    ("text", "form", "content", "found"),
    [
        ("hello\n", HERMES, "hello\n", []),
        ('{"name": "look"}', HERMES, '{"name": "look"}', []),
        (
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            HERMES,
            "Let me see.",
            [("call_0", "add", {"a": 1})],
        ),
        (
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
            HERMES,
            "",
            [("call_0", "a", {}), ("call_1", "b", {})],
        ),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 2}"}', HERMES, "", [("call_0", "a", {"x": 2})]),
        ('{"name": "add", "parameters": {"a": "é"}}', LLAMA, "", [("call_0", "add", {"a": "é"})]),
        (
            '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
            LLAMA,
            "",
            [("call_0", "a", {}), ("call_1", "b", {})],
        ),
        ('[{"name": "a", "arguments": {}}, {"name": "b"}]', LLAMA, "", [("call_0", "a", {}), ("call_1", "b", {})]),
        ('{"a": 1}', LLAMA, '{"a": 1}', []),
        ("{not json}", LLAMA, "{not json}", []),
        ("the answer is 4", LLAMA, "the answer is 4", []),
    ],
)
def test_calls_are_found_in_the_form_of_the_template(
    text: str, form: Form, content: str, found: list[tuple[str, str, object]]
) -> None:
    answer = read(text, form)
    assert not answer.wrong
    assert (answer.content, calls(answer)) == (content, found)


@pytest.mark.parametrize(
    ("text", "form", "wrong"),
    [
        ("<tool_call>{'name': 1}</tool_call>", HERMES, "this is not JSON: {'name': 1}"),
        ("<tool_call></tool_call>", HERMES, "this is not JSON"),
        ("<tool_call>[1]</tool_call>", HERMES, "a call is {"),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', HERMES, "the arguments of a are [1]"),
        ('{"name": "a", "parameters": {"x": }', LLAMA, "this is not JSON"),
        ("<tool_call>" + "[" * 100_000, HERMES, "this is not JSON"),
    ],
)
def test_what_is_meant_as_a_call_and_is_none_stays_text_and_is_named(text: str, form: Form, wrong: str) -> None:
    answer = read(text, form)
    assert wrong in answer.wrong
    assert (answer.content, answer.calls) == (text, ())


def test_a_call_of_any_depth_is_read_or_named() -> None:
    """Whichever of reading and writing it meets the limit first."""
    for depth in range(900, 1010):
        answer = read(
            f'<tool_call>{{"name": "a", "arguments": {{"x": {"[" * depth}{"]" * depth}}}}}</tool_call>', HERMES
        )
        assert answer.calls or answer.wrong


def test_thoughts_are_apart_from_words() -> None:
    assert read("<think>\nhm\n</think>\n\nfour", HERMES) == Answer("four", "hm")
    assert read("hm</think>four", HERMES) == Answer("four", "hm"), "the template began the thought itself"
    assert read("hm</think>four", PLAIN) == Answer("hm</think>four")
    assert read("<think>\nhm", HERMES) == Answer("", "hm"), "tokens ran out within a thought"
    assert [spoken(text) for text in ("<think>hm</think>\n\nfour", "hm</think>four", "<think>hm", "four")] == [
        *("four", "four", "", "four")
    ]
    thought = read('<think>I call <tool_call>x</think><tool_call>{"name": "a"}</tool_call>', HERMES)
    assert calls(thought) == [("call_0", "a", {})]


def test_the_form_is_that_of_the_template_or_of_the_text() -> None:
    assert form_of("... <tool_call> ... </think>") == HERMES
    assert form_of('<|python_tag|> {"name": ..., "parameters": ...}') == LLAMA
    assert form_of("{{ message.content }}") == PLAIN
    assert calls(read('{"name": "a", "parameters": {}}')) == [("call_0", "a", {})]
    assert calls(read('words <tool_call>{"name": "a"}</tool_call>')) == [("call_0", "a", {})]
    assert read("words") == Answer("words")

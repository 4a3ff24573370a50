"""Delta rendering: deltas and sampled answers together are the template's own rendering."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollart.control.render import delta
from rollart.errors import JobError
from rollart.model.tokenizer import ChatTokenizer
from rollart.types import Message, Observation, Tokens, Tool, ToolCall
from rollart_recipes.tiny import tiny_tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's template; Qwen's differs in the system prompt."""

TALK = [
    [Message(role="user", content="Where is the  lake?\nP...\n.O.O\n")],
    [Message(role="tool", content="12*345\n"), Message(role="user", content=" and now?")],
    [Message(role="user", content="(12+7)*3")],
]
ANSWERS = ["down", "calc 12+7", "answer 57 "]


def chatml_tokenizer() -> Any:
    """A byte-level BPE, as SmolLM2 and Qwen have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the answer and now\n\n where is the lake\n system user assistant"] * 3, trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|endoftext|>")
    fast.chat_template = CHATML
    return fast


@pytest.fixture(params=["tiny", "chatml"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tokenizer: Any = tiny_tokenizer() if request.param == "tiny" else chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def plain(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def test_deltas_and_answers_are_the_whole(directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = ChatTokenizer(directory)
    reference: Any = AutoTokenizer.from_pretrained(str(directory))
    end = np.array([tokenizer.end_of_turn], dtype=np.int32)
    pieces: list[Tokens] = []
    history: list[Message] = []
    after: Tokens | None = None
    for turn, (messages, answer) in enumerate(zip(TALK, ANSWERS, strict=True)):
        pieces.append(tokenizer.render(messages, fresh=turn == 0, after=after))
        history += messages
        whole = reference.apply_chat_template(plain(history), add_generation_prompt=True, tokenize=False)
        assert np.concatenate(pieces).tolist() == reference.encode(whole, add_special_tokens=False)
        after = np.concatenate([tokenizer.encode(answer), end])
        assert tokenizer.decode(after) == answer
        pieces.append(after)
        history.append(Message(role="assistant", content=answer))


def test_a_turn_the_model_left_open_is_closed(directory: Path) -> None:
    tokenizer = ChatTokenizer(directory)
    messages = [Message(role="user", content="go on")]
    closed = tokenizer.render(messages, fresh=False)
    answer = tokenizer.encode("down")
    ended = np.append(answer, tokenizer.end_of_turn).astype(np.int32)
    assert tokenizer.render(messages, fresh=False, after=ended).tolist() == closed.tolist()
    assert tokenizer.render(messages, fresh=False, after=answer).tolist() == [tokenizer.end_of_turn, *closed.tolist()]
    assert tokenizer.render(messages, fresh=False, after=answer[:0])[0] == tokenizer.end_of_turn
    assert tokenizer.end_of_turn in tokenizer.stop_tokens
    assert not closed.flags.writeable


def test_stop_tokens(tmp_path: Path) -> None:
    chatml_tokenizer().save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    assert tokenizer.stop_tokens == (2, 0)
    assert tokenizer.decode(np.array([2, 0], dtype=np.int32)) == ""


def test_a_turn_that_ends_with_plain_text_ends_no_answer(tmp_path: Path) -> None:
    fast: Any = chatml_tokenizer()
    fast.chat_template = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    assert ChatTokenizer(tmp_path).stop_tokens == (0,)


def test_what_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no tokenizer"):
        ChatTokenizer(tmp_path / "nowhere")
    fast: Any = chatml_tokenizer()
    fast.chat_template = None
    fast.save_pretrained(tmp_path / "base")
    with pytest.raises(JobError, match="no chat template"):
        ChatTokenizer(tmp_path / "base")
    fast.chat_template = "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ message.content + '<|im_end|>' }}{% endfor %}"  # noqa: E501
    fast.save_pretrained(tmp_path / "strict")
    with pytest.raises(JobError, match="tool: no tools"):
        ChatTokenizer(tmp_path / "strict").render([Message(role="tool", content="3")], fresh=True)


def test_a_text_that_cannot_fit_is_not_read_to_its_end(directory: Path) -> None:
    """Megabytes would hold up everybody; what is returned is still too long. What fits is as it always was."""
    long = " ".join(f"where is the lake {number}" for number in range(20_000))
    whole, bounded = ChatTokenizer(directory), ChatTokenizer(directory, context_tokens=512)
    asked = [Message(role="user", content=long)]
    some, all_of_it = bounded.render(asked, fresh=True), whole.render(asked, fresh=True)
    assert 512 < len(some) < len(all_of_it) / 4
    for context_tokens in (len(all_of_it), len(all_of_it) // 2 * 3):
        exact = ChatTokenizer(directory, context_tokens=context_tokens)
        assert exact.render(asked, fresh=True).tolist() == all_of_it.tolist()


def test_long_tokens_are_counted_and_not_guessed(tmp_path: Path) -> None:
    """A text of many characters in few tokens fits."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<|im_end|>": 0, "lake" * 20: 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = "{% for message in messages %}{{ message.content + ' <|im_end|>' }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    words = " ".join(["lake" * 20] * 2_000)
    assert (
        len(ChatTokenizer(tmp_path, context_tokens=2_100).render([Message(role="user", content=words)], fresh=True))
        == 2_001
    )
    assert (
        len(ChatTokenizer(tmp_path, context_tokens=1_000).render([Message(role="user", content=words)], fresh=True))
        > 1_000
    )


def test_halves_of_characters_are_shown_as_what_they_are_not(directory: Path) -> None:
    """As a name of a file that is not UTF-8 has them, or the arguments of a call."""
    tokenizer = ChatTokenizer(directory)
    assert len(tokenizer.render([Message(role="user", content="lake \udce9")], fresh=True))


def test_a_call_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    fast: Any = chatml_tokenizer()
    fast.chat_template = CHATML.replace(
        "message['content']", "message['content'] + (message.tool_calls or []) | tojson"
    )
    fast.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    call = ToolCall(id="", name="look", arguments='{"x": ' + "[" * 940 + "]" * 940 + "}")
    with pytest.raises(JobError, match="nested too deep"):
        tokenizer.render([Message(role="assistant", content="", tool_calls=(call,))], fresh=True)


def test_caches_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long observations fill them with a few entries; nothing of it changes what is rendered."""
    import rollart.model.tokenizer as module

    monkeypatch.setattr(module, "CACHE_BYTES", 100_000)
    chatml_tokenizer().save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    fresh = ChatTokenizer(tmp_path)
    kept: list[weakref.ref[Tokens]] = []
    for number in range(60):
        messages = [Message(role="user", content=f"{number} " + "lake " * 500)]
        expected = fresh.render(messages, fresh=True).tolist()
        for _ in range(2):
            tokens = tokenizer.render(messages, fresh=True)
            assert tokens.tolist() == expected
            tokenizer.decode(tokens)
            kept.append(weakref.ref(tokens))
    del tokens
    rows = {id(row): row.nbytes for one in kept if (row := one()) is not None}
    assert 0 < sum(rows.values()) <= tokenizer.rendered.num_bytes <= 100_000
    assert 0 < tokenizer.decoded.num_bytes <= 100_000
    assert tokenizer.render(messages, fresh=True) is tokenizer.render(messages, fresh=True), "the last one is kept"
    long = [Message(role="user", content="lake " * 100_000)]
    assert tokenizer.render(long, fresh=True) is not tokenizer.render(long, fresh=True), "larger than all: not kept"
    assert tokenizer.rendered.num_bytes <= 100_000


THINKING = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)


@pytest.fixture
def chatml(tmp_path: Path) -> Path:
    chatml_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("as_file", [False, True])
def test_a_template_of_the_jobs_own_and_its_arguments(as_file: bool, chatml: Path) -> None:
    (chatml / "own.jinja").write_text(THINKING)
    template = str(chatml / "own.jinja") if as_file else THINKING
    first = [Message(role="user", content="now?")]
    plain, own = ChatTokenizer(chatml), ChatTokenizer(chatml, template)
    assert own.render(first, fresh=True).tolist() == plain.render(first, fresh=True).tolist()
    without = ChatTokenizer(chatml, template, {"enable_thinking": False})
    text = without.decode(without.render(first, fresh=True))
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")
    later = without.decode(without.render(first, fresh=False))
    assert later.endswith("assistant\n<think>\n\n</think>\n\n"), "every answer begins so, not only the first"


@pytest.mark.parametrize(
    ("template", "arguments", "message"),
    [
        (THINKING, {"enable_thinkng": False}, "does not read it; it reads enable_thinking; correct or remove it"),
        ("", {"enable_thinking": False}, "chat_template_args.enable_thinking: .* it reads none beside the usual"),
        (THINKING, {"messages": []}, "chat_template_args.messages: is filled in for every conversation; remove it"),
        ("{% for x %}", {}, r"model.chat_template: line 1 is not Jinja \(.*\); correct it"),
        ("/nowhere.jinja", {}, "model.chat_template: /nowhere.jinja cannot be read .*; name a file of Jinja"),
        ("{{ messages[-1].content }}", {}, "model.chat_template: the template does not close the assistant's turn"),
    ],
)
def test_a_template_that_would_not_do_is_refused(
    template: str, arguments: dict[str, Any], message: str, chatml: Path
) -> None:
    with pytest.raises(JobError, match=message):
        ChatTokenizer(chatml, template, arguments)


def test_a_templates_mark_of_what_was_generated_is_known(chatml: Path) -> None:
    prompt = "{% if add_generation_prompt %}"
    marked = THINKING.replace(prompt, "{% generation %}{% endgeneration %}" + prompt)
    assert ChatTokenizer(chatml, marked, {"enable_thinking": True}).end_of_turn == ChatTokenizer(chatml).end_of_turn


# --- tools: two families of templates, in our own words -------------------------------------------------------------

HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}\
{{ '\\nCall as <tool_call>{}</tool_call><|im_end|>\\n' }}{% endif %}\
{% for message in messages %}\
{% if message.role == 'tool' %}\
{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}\
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\
{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}\
{% else %}{{ '<|im_start|>' + message.role + '\\n' }}\
{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}\
{{ message.content }}\
{% for call in message.tool_calls or [] %}\
{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}\
{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """\
{%- for message in messages %}\
{% if message.role == 'tool' %}{{ '<|im_start|>ipython\\n' + message.content + '<|im_end|>' }}\
{% elif message.tool_calls %}\
{% set call = message.tool_calls[0].function %}\
{{ '<|im_start|>assistant\\n{"name": "' + call.name + '", "parameters": ' }}\
{{ call.arguments | tojson }}{{ '}<|im_end|>' }}\
{% else %}{{ '<|im_start|>' + message.role + '\\n' }}\
{% if tools and loop.first %}{{ 'You may call (<|python_tag|>):' }}\
{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}\
{{ message.content + '<|im_end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ADD = Tool(name="add", description="Add.", parameters='{"type": "object", "properties": {"a": {"type": "integer"}}}')
SAID = {
    HERMES: '<think>\ntwo\n</think>\n\nso\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    LLAMA: '{"name": "add", "parameters": {"a": 1}}',
}


@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_tools_calls_and_results_are_rendered_as_the_template_has_them(
    template: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fast: Any = chatml_tokenizer()
    fast.chat_template = template
    fast.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    ask = Observation(messages=(Message(role="user", content="1?"),), tools=(ADD,))
    first, fresh = delta(tokenizer, ask, None)
    assert fresh
    assert '"name": "add"' in tokenizer.decode(first)
    assert not caplog.records
    assert '"name": "add"' not in tokenizer.decode(tokenizer.render(ask.messages, fresh=True)), "not without tools"

    sampled = np.append(tokenizer.encode(SAID[template]), tokenizer.end_of_turn).astype(np.int32)
    answer = tokenizer.parse(sampled)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("add", '{"a": 1}')]
    assert (answer.content, answer.reasoning) == (("so", "two") if template == HERMES else ("", ""))

    results = tuple(Message(role="tool", content=text, tool_call_id="call_0") for text in ("2", "3"))
    after = tokenizer.render(results, fresh=False, after=sampled)
    whole = tokenizer.render((*ask.messages, answer, *results), fresh=True, tools=(ADD,))
    assert [*first, *sampled, *after] == whole.tolist(), "as if the whole conversation were rendered at once"


def test_a_template_without_a_place_for_tools_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chatml_tokenizer().save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    for text in ("1", "2"):
        tokenizer.render((Message(role="user", content=text),), fresh=True, tools=(ADD,))
    assert len([record for record in caplog.records if "not told of add" in record.getMessage()]) == 1

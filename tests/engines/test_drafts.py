"""Guesses change how many steps an answer takes, and nothing else."""

import numpy as np
import pytest
from msgspec.structs import replace

from rollart.engines.embedded import engine as embedded
from rollart.engines.embedded.drafts import SURE, Drafts
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.engines.embedded.sequence import Sequence
from rollart.model.network import named_weights
from rollart.types import Completion, Finish, GenerateRequest
from tests.engines.reference import EOS, VOCAB, check, drain, make_engine, plain_model, random_tokens, request


def sequence(domain: str = "test") -> Sequence:
    asked = request([1, 2])
    return Sequence(
        replace(asked, domain=domain),
        arrival=0,
        max_context=100,
        version=0,
        seed=0,
    )


def test_what_was_said_alike_is_guessed_and_no_further() -> None:
    drafts = Drafts()
    for fourth in (13, 14, 15):
        assert drafts.guess(sequence(), 10) == []
        drafts.learn(sequence(), [10, 11, 12, fourth])
    assert SURE == 3
    assert drafts.guess(sequence(), 10) == [10, 11, 12]
    assert drafts.guess(sequence(), 2) == [10, 11]
    assert drafts.guess(sequence("another task"), 10) == []
    drafts.learn(sequence(), [10, 99])
    assert drafts.guess(sequence(), 10) == [10], "11 did not come this time"


def test_it_goes_on_from_what_the_request_said_itself() -> None:
    drafts = Drafts()
    for _ in range(SURE):
        drafts.learn(sequence(), [1, 2, 3, 4, 5, 6])
    seq = sequence()
    drafts.learn(seq, [9])
    assert drafts.guess(seq, 10) == []
    drafts.learn(seq, [2, 3, 4])
    assert drafts.guess(seq, 10) == [5, 6]


def test_what_was_learnt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.engines.embedded.drafts.MAX_CONTEXTS", 50)
    drafts = Drafts()
    for number in range(200):
        drafts.learn(sequence(), list(range(number, number + 4)))
        assert len(drafts) <= 50


def rounds(engine: EmbeddedEngine, temperature: float) -> tuple[list[GenerateRequest], list[Completion], list[int]]:
    """The same five prompts again and again; requests, answers, and the steps of each round."""
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, 30) for _ in range(5)]
    asked, got, steps = [], [], []
    for turn in range(8):
        begun = engine.stats.steps
        wave = [
            request(prompt, f"{number}-{turn}/0", last=True, max_tokens=25, temperature=temperature, seed=3)
            for number, prompt in enumerate(prompts)
        ]
        for each in wave:
            engine.add(each)
        done = drain(engine)
        asked += wave
        got += [done[each.id] for each in wave]
        steps.append(engine.stats.steps - begun)
    return asked, got, steps


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_answers_are_the_same_with_and_without_guesses(kind: str, temperature: float) -> None:
    plain = plain_model(kind)
    asked, got, steps = rounds(make_engine(plain), temperature)
    _, without, slow = rounds(make_engine(plain, draft_tokens=0), temperature)
    for each, one, other in zip(asked, got, without, strict=True):
        check(each, one, {0: plain})
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.finish, one.spans, one.prefill_tokens) == (other.finish, other.spans, other.prefill_tokens)
    if temperature == 0.0:
        assert len(set(slow)) == 1
        assert steps[-1] * 2 < slow[-1], "what was said before takes few steps"


def test_guesses_of_all_requests_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_model("qwen3")
    monkeypatch.setattr(embedded, "GUESSED_LOGITS", 2 * VOCAB + 1)
    engine = make_engine(plain)
    most = 0
    guess = engine.scheduler.guess

    def counted(budget: int) -> int:
        nonlocal most
        most = max(most, guesses := guess(budget))
        return guesses

    monkeypatch.setattr(engine.scheduler, "guess", counted)
    asked, got, _ = rounds(engine, 0.0)
    assert most == 2
    for each, one in zip(asked, got, strict=True):
        check(each, one, {0: plain})


def test_a_guess_does_not_run_past_the_end() -> None:
    engine = make_engine(plain_model("qwen3"))
    prompt = random_tokens(np.random.default_rng(5), 20)
    longest = None
    for turn in range(12):
        length = 20 if turn < 6 else 12 - turn + 5
        engine.add(request(prompt, f"{turn}/0", last=True, max_tokens=length, temperature=0.0))
        (completion,) = drain(engine).values()
        if longest is None:
            longest = completion.tokens.tolist()
        assert completion.tokens.tolist() == longest[:length]
        ends = len(longest) <= length and longest[-1] == EOS
        assert completion.finish is (Finish.STOP if ends else Finish.LENGTH)


def test_guesses_of_old_weights_are_only_guesses() -> None:
    models = {version: plain_model("qwen3", seed=version) for version in range(2)}
    engine = make_engine(models[0])
    prompt = random_tokens(np.random.default_rng(2), 20)
    for turn in range(6):
        engine.add(request(prompt, f"{turn}/0", last=True, max_tokens=20, temperature=0.0))
        drain(engine)
    engine.swap(1, named_weights(models[1]))
    asked = request(prompt, "new/0", last=True, max_tokens=20, temperature=0.0)
    engine.add(asked)
    check(asked, drain(engine)["new/0"], models)

"""Seeds, temperature, top-k, top-p, and stop strings."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rollart.engines.embedded.sampler import sample
from rollart.engines.embedded.sequence import Sequence
from rollart.engines.stops import StopFinder
from rollart.types import Finish
from tests.engines.reference import EOS, NO_EOS, check, drain, make_engine, plain_model, random_tokens, request


def rows(count: int, **sampling: Any) -> list[tuple[Sequence, int]]:
    asked = request([1, 2], **sampling)
    return [(Sequence(asked, arrival=i, max_context=100, version=0, seed=i), 0) for i in range(count)]


def draw(logits: torch.Tensor, count: int, **sampling: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    tokens, logprobs = sample(logits.expand(count, -1).clone(), rows(count, **sampling))
    return np.array(tokens), np.array(logprobs)


LOGITS = torch.tensor([0.0, 3.0, 1.0, -1.0, 2.5, -8.0, 2.0, 0.5])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_scaled_distribution(temperature: float) -> None:
    tokens, logprobs = draw(LOGITS, 6_000, temperature=temperature)
    expected = (LOGITS / temperature).softmax(-1).numpy()
    np.testing.assert_allclose(np.bincount(tokens, minlength=8) / 6_000, expected, atol=0.025)
    np.testing.assert_allclose(logprobs, np.log(expected)[tokens], atol=1e-5)


def test_greedy_takes_the_best_and_says_its_plain_logprob() -> None:
    tokens, logprobs = draw(LOGITS, 5, temperature=0.0)
    assert set(tokens) == {1}
    np.testing.assert_allclose(logprobs, float(LOGITS.log_softmax(-1)[1]), atol=1e-6)


def test_a_greedy_request_that_was_long_alone_may_get_company() -> None:
    plain, rng = plain_model("qwen3"), np.random.default_rng(0)
    engine = make_engine(plain, draft_tokens=0, eos=NO_EOS)
    greedy = request(random_tokens(rng, 10), "greedy/0", max_tokens=150, temperature=0.0)
    sampled = request(random_tokens(rng, 10), "sampled/0", max_tokens=20, temperature=1.0)
    engine.add(greedy)
    for _ in range(140):
        engine.step()
    engine.add(sampled)
    done = drain(engine)
    check(greedy, done[greedy.id], {0: plain})
    check(sampled, done[sampled.id], {0: plain})


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 2}, {1, 4}),
        ({"top_k": 1}, {1}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.7}, {1, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 3, "top_p": 0.999}, {1, 4, 6}),
        ({"top_k": 100}, {0, 1, 2, 3, 4, 6, 7}),
    ],
)
def test_truncation_keeps_the_logprob_of_the_full_distribution(sampling: dict[str, float], allowed: set[int]) -> None:
    tokens, logprobs = draw(LOGITS, 2_000, **sampling)
    assert set(tokens) - {5} == allowed
    np.testing.assert_allclose(logprobs, LOGITS.log_softmax(-1).numpy()[tokens], atol=1e-5)


def test_rows_with_different_settings_do_not_mix() -> None:
    mixed = [rows(1, **s)[0] for s in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 3.0}, {"temperature": 1.0})]
    tokens, logprobs = sample(LOGITS.expand(4, -1).clone(), mixed)
    assert tokens[:2] == [1, 1]
    for row, temperature in enumerate([1.0, 1.0, 3.0, 1.0]):
        assert logprobs[row] == pytest.approx(float((LOGITS / temperature).log_softmax(-1)[tokens[row]]), abs=1e-5)


def test_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    plain, rng = plain_model("qwen3"), np.random.default_rng(0)
    prompt = random_tokens(rng, 20)

    def run(neighbours: int, seed: int | None, **settings: Any) -> list[int]:
        engine = make_engine(plain, **settings, eos=NO_EOS)
        for i in range(neighbours):
            engine.add(request(random_tokens(rng, 5 + 9 * i), f"n{i}/0", max_tokens=4 * i + 1))
        engine.add(request(prompt, max_tokens=90, temperature=1.3, top_p=0.95, seed=seed))
        return [int(token) for token in drain(engine)["s/0"].tokens]

    alone = run(0, seed=11)
    assert run(7, seed=11) == run(5, seed=11, kv_tokens=256, step_tokens=24) == alone
    assert run(0, seed=12) != alone
    assert run(0, seed=-5) == run(3, seed=-5)
    unseeded = run(0, seed=None)
    assert unseeded == run(0, seed=None), "the engine's own seed makes a run repeatable"


def test_a_stop_string_ends_the_answer_and_stays_in_it() -> None:
    plain = plain_model("qwen3")
    engine = make_engine(plain, eos=NO_EOS)
    prompt = random_tokens(np.random.default_rng(0), 20)
    free = request(prompt, max_tokens=40, temperature=1.0, seed=1)
    engine.add(free)
    text = [chr(ord("A") + token) for token in drain(engine)["s/0"].tokens]
    stop = "".join(text[10:13])
    expected = "".join(text).index(stop) + 3
    asked = request(prompt, max_tokens=40, temperature=1.0, seed=1, stop=("never", stop))
    engine.add(asked)
    got = drain(engine)["s/0"]
    assert got.finish is Finish.STOP
    assert [chr(ord("A") + token) for token in got.tokens] == text[:expected]
    check(asked, got, {0: plain})


def test_eos_ends_the_answer_and_stays_in_it() -> None:
    plain = plain_model("qwen3")
    engine = make_engine(plain)
    for i in range(30):
        engine.add(request([10 + i], f"s{i}/0", max_tokens=30, temperature=2.0))
    done = drain(engine)
    stopped = [got for got in done.values() if got.finish is Finish.STOP]
    assert stopped
    for got in done.values():
        assert EOS not in got.tokens[:-1]
        assert (got.tokens[-1] == EOS) == (got.finish is Finish.STOP)


def utf8(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize("stop", ["</answer>", "ü", "日本", "x", "\n", "a b"])
@pytest.mark.parametrize("before", ["", "a", "some text é with 語 ", "long " * 30])
def test_stops_are_found_whatever_the_tokens(stop: str, before: str) -> None:
    finder = StopFinder(utf8)
    data = np.array(list((before.replace(stop, "") + stop).encode()), dtype=np.int64)
    found = [finder.ends(data[:end], ("zzz", stop)) for end in range(1, len(data) + 1)]
    assert found == [False] * (len(data) - 1) + [True]


def test_a_stop_inside_a_token_is_found() -> None:
    finder = StopFinder(lambda tokens: "".join(["ab", "c.d", "  ", "."][token] for token in tokens))
    assert finder.ends(np.array([0, 1]), ("bc",))
    assert finder.ends(np.array([0, 1, 2]), ("d ",))
    assert not finder.ends(np.array([0, 0]), ("bc", ""))


@pytest.mark.parametrize("text", [" ", "\ufffd", "", "a"])
def test_what_a_stop_string_costs_grows_with_the_answer_and_no_faster(text: str) -> None:
    """Tokens without a visible character too: they made it look back over everything, at each token."""
    decoded = 0

    def decode(tokens: list[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return text * len(tokens)

    finder = StopFinder(decode)
    said: list[int] = []
    for token in range(4000):
        said.append(token % 7)
        assert not finder.ends(said, ("x" + text + "\n", "aab\n", "bcdefg "))
    assert decoded < 4000 * 60


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_a_token_that_was_left_out_is_not_drawn_at_the_edges(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first token nor the last has any weight; random numbers may be as small and as large as these."""
    monkeypatch.setattr(Sequence, "uniform", lambda self, ahead=0: uniform)
    tokens, logprobs = draw(LOGITS, 3, temperature=1.0, top_k=1)
    assert set(tokens) == {1}
    assert np.isfinite(logprobs).all()


def test_the_most_likely_token_stays_however_little_is_kept() -> None:
    tokens, _ = draw(LOGITS, 20, temperature=1.0, top_p=0.0)
    assert set(tokens) == {1}


def test_a_stop_string_of_many_tokens_is_found() -> None:
    """One token a letter: what is looked at grows with the stop string."""
    finder = StopFinder(lambda tokens: "".join(map(chr, tokens)))
    stop = "the end of this answer, and of all"
    said = [ord(letter) for letter in "and so on " + stop]
    assert [end for end in range(1, len(said) + 1) if finder.ends(said[:end], (stop,))] == [len(said)]


def test_a_stop_string_that_ends_with_a_space_is_found_where_single_tokens_lose_theirs() -> None:
    """As decoders do that strip what they begin with."""
    words = ["so", " be", " it"]
    finder = StopFinder(lambda tokens: "".join(words[token] for token in tokens).lstrip())
    assert [finder.ends([0, 1, 2][:end], ("be ",)) for end in (1, 2, 3)] == [False, False, True]

"""Packing: within the budget, nothing lost, the same whatever the order."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollart.train.packing import MicroBatch, bins, check_sample, deal, micro_batch
from rollart.types import Sample
from tests.train.samples import VOCAB, make_sample, random_samples


def pack(
    samples: Sequence[Sample], max_tokens: int, temperatures: Mapping[str, float] | None = None
) -> list[MicroBatch]:
    return [micro_batch(members, temperatures) for members in bins(samples, max_tokens, temperatures)]


def names(batches: list[MicroBatch]) -> list[list[str]]:
    return [[str(sample.trajectory) for sample in batch.samples] for batch in batches]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget", [20, 33, 1000])
def test_all_tokens_once_within_the_budget(seed: int, budget: int) -> None:
    samples = random_samples(seed, count=40)
    batches = pack(samples, budget)
    assert all(sum(batch.lengths) <= budget for batch in batches)
    assert sorted(name for group in names(batches) for name in group) == sorted(str(s.trajectory) for s in samples)
    # First-fit: no two micro-batches could be one.
    sizes = sorted(sum(batch.lengths) for batch in batches)
    assert len(sizes) == 1 or sizes[0] + sizes[1] > budget
    for batch in batches:
        assert batch.tokens_T.shape == (sum(batch.lengths),)
        start = 0
        for at, (sample, length) in enumerate(zip(batch.samples, batch.lengths, strict=True)):
            chosen = batch.sequence_N == at
            positions = batch.positions_N[chosen] - start
            assert positions.tolist() == np.flatnonzero(sample.mask).tolist()
            assert batch.tokens_T[start : start + length].tolist() == sample.tokens.tolist()
            assert batch.behaviour_N[chosen].tolist() == sample.logprobs[sample.mask].tolist()
            assert batch.advantages_N[chosen].tolist() == sample.advantages[sample.mask].tolist()
            start += length


def test_order_does_not_matter() -> None:
    samples = random_samples(0, count=60, longest=6) + [
        make_sample("twin", [1, token, 2], [0, 0, 1]) for token in range(5)
    ]
    expected = pack(samples, 17)
    for seed in range(5):
        random.Random(seed).shuffle(samples)
        again = pack(samples, 17)
        assert names(again) == names(expected)
        for one, other in zip(again, expected, strict=True):
            assert torch.equal(one.tokens_T, other.tokens_T)


def test_what_follows_the_last_sampled_token_is_cut() -> None:
    (batch,) = pack([make_sample("g", [1, 2, 3, 4, 5], [0, 1, 1, 0, 0])], 100)
    assert batch.tokens_T.tolist() == [1, 2, 3]
    assert batch.lengths == (3,)


def test_nothing_sampled_is_left_out_and_too_long_stands_alone() -> None:
    long = make_sample("long", [1] * 50, [0] + [1] * 49)
    short = make_sample("short", [1, 2], [0, 1])
    assert names(pack([short, make_sample("none", [1, 2], [0, 0]), long], 10)) == [["long.0.0"], ["short.0.0"]]
    assert pack([], 10) == []


def test_temperatures_do_not_mix() -> None:
    samples = [make_sample(f"g{at}", [1, 2], [0, 1], domain="maths" if at % 2 else "lake") for at in range(6)]
    cold, warm = pack(samples, 100, {"maths": 0.7})
    assert (cold.temperature, warm.temperature) == (0.7, 1.0)
    assert {sample.domain for sample in cold.samples} == {"maths"}
    assert {sample.domain for sample in warm.samples} == {"lake"}


def test_deal_is_even_and_complete() -> None:
    samples = random_samples(1, count=50)
    hands = deal(samples, 4)
    loads = [sum(len(sample.tokens) for sample in hand) for hand in hands]
    assert max(loads) - min(loads) <= 20
    assert sum(len(hand) for hand in hands) == 50
    assert [len(hand) for hand in deal(samples[:1], 3)] == [1, 0, 0]


def broken(sample: Sample, **values: object) -> Sample:
    return replace(sample, **values)  # type: ignore[arg-type]


def test_bad_samples_are_named() -> None:
    good = make_sample("g7", [1, 2, 3], [0, 1, 1])
    assert check_sample(good, VOCAB) == ""
    cases = {
        "logprobs has 1 entries for 3": broken(good, logprobs=np.zeros(1, np.float32)),
        "first token": broken(good, mask=np.array([True, True, True])),
        "the model knows": broken(good, tokens=np.array([1, 2, VOCAB], np.int32)),
        "logprobs has a value that is not finite": broken(good, logprobs=np.array([0, -np.inf, 0], np.float32)),
        "advantages has a value that is not finite": broken(good, advantages=np.array([0, 0, np.nan], np.float32)),
    }
    for text, sample in cases.items():
        assert text in check_sample(sample, VOCAB)

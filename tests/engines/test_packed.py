"""Common beginnings are computed once, and nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.model import packed
from rollart.model.network import packed_scores
from rollart.model.packed import fold
from tests.engines.reference import VOCAB, our_model, plain_model


def batch(*sequences: list[int]) -> tuple[torch.Tensor, list[int]]:
    return torch.tensor([token for each in sequences for token in each]), [len(each) for each in sequences]


def grown(rng: np.random.Generator, beginning: list[int], count: int) -> list[int]:
    return [*beginning, *rng.integers(0, VOCAB, count).tolist()]


def test_a_beginning_is_laid_down_once() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, 30).tolist()
    tokens, lengths = batch(*(grown(rng, prompt, count) for count in (10, 5, 20)), grown(rng, [], 12))
    folded = fold(tokens, lengths)
    assert len(folded.tokens_F) == len(tokens) - 2 * 30
    assert folded.tokens_F[folded.place_T].tolist() == tokens.tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])
    assert folded.plan.positions_T[folded.place_T].tolist() == positions.tolist()


def test_groups_with_a_common_instruction_share_what_saves_more() -> None:
    rng = np.random.default_rng(0)
    instruction = rng.integers(0, VOCAB, 10).tolist()
    long_prompts = [grown(rng, instruction, 40), grown(rng, instruction, 40)]
    tokens, lengths = batch(*(grown(rng, long_prompts[member % 2], 8) for member in range(8)))
    assert len(fold(tokens, lengths).tokens_F) == 2 * 50 + 8 * 8, "two prompts, not one instruction"
    short_prompts = [grown(rng, instruction * 4, 1) for _ in range(4)]
    tokens, lengths = batch(*(grown(rng, short_prompts[member % 4], 8) for member in range(8)))
    assert len(fold(tokens, lengths).tokens_F) <= 40 + 8 * 9, "one instruction, not four prompts"


def test_little_in_common_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    tokens, lengths = batch(*(grown(rng, [1, 2, 3], 40) for _ in range(4)))
    assert fold(tokens, lengths).tokens_F.tolist() == tokens.tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_scores_and_gradients_are_those_of_each_sequence_alone(kind: str) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, 40).tolist()
    sequences = [grown(rng, prompt, count) for count in (90, 70, 3, 80)] + [grown(rng, [], 25), [*prompt, 5]]
    plain = plain_model(kind)
    ours = our_model(plain)
    tokens, lengths = batch(*sequences)
    assert len(fold(tokens, lengths).tokens_F) < len(tokens)
    together = packed_scores(ours, tokens, lengths)
    (together.logprobs_T.sum() + together.entropy_T.pow(2).sum()).backward()  # type: ignore[no-untyped-call]
    gradients = {name: weight.grad.clone() for name, weight in ours.named_parameters() if weight.grad is not None}
    ours.zero_grad(set_to_none=True)
    alone = [packed_scores(ours, torch.tensor(each), [len(each)]) for each in sequences]
    torch.stack([each.logprobs_T.sum() + each.entropy_T.pow(2).sum() for each in alone]).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(
        together.logprobs_T, torch.cat([each.logprobs_T for each in alone]), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(together.entropy_T, torch.cat([each.entropy_T for each in alone]), atol=1e-4, rtol=1e-4)
    assert gradients
    for name, weight in ours.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], weight.grad, atol=2e-3, rtol=2e-3)


sequence = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(sequence, min_size=1, max_size=7), st.sampled_from([0.0, 0.2]))
def test_any_batch_is_laid_down_whole(sequences: list[list[int]], least: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "MIN_SAVED", least)
        tokens, lengths = batch(*sequences)
        folded = fold(tokens, lengths)
    assert folded.tokens_F[folded.place_T].tolist() == tokens.tolist()
    positions = [position for length in lengths for position in range(length)]
    assert folded.plan.positions_T[folded.place_T].tolist() == positions
    assert sorted(set(folded.place_T.tolist())) == list(range(len(folded.tokens_F))), "nothing is there for nobody"
    assert folded.first_tokens.tolist() == [sum(lengths[:number]) for number in range(len(lengths))]

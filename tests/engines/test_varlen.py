"""Attention over sequences of different lengths in one call: on a CPU the formula, on CUDA flash attention."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollart.model import network
from rollart.model.compiled import run_layers
from rollart.model.network import packed_scores
from rollart.model.packed import ALIGNED_TOKENS, fold
from rollart.model.varlen import VarlenPlan

from .reference import VOCAB, our_model, plain_model

LENGTHS = (21, 34, 3, 70)


def packed(lengths: Sequence[int]) -> torch.Tensor:
    return torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(0))


def run(ours: Any, tokens: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ours.zero_grad()
    scores = packed_scores(ours, tokens, lengths)
    torch.autograd.backward((scores.logprobs_T * torch.linspace(0, 1, len(tokens))).sum() + scores.entropy_T.sum())
    return scores.logprobs_T.detach(), {name: param.grad.clone() for name, param in ours.named_parameters()}


def with_common_beginnings() -> tuple[torch.Tensor, tuple[int, ...]]:
    tokens, lengths = packed((60, 63, 61, 40)), (60, 63, 61, 40)
    for first in (60, 123):
        tokens[first : first + 50] = tokens[:50]
    return tokens, lengths


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_varlen_attention_gives_what_padded_attention_gives(
    kind: str, folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, lengths = with_common_beginnings() if folded else (packed(LENGTHS), LENGTHS)
    assert (len(fold(tokens, lengths).tokens_F) < len(tokens)) == folded
    ours = our_model(plain_model(kind))
    logprobs, grads = run(ours, tokens, lengths)
    monkeypatch.setattr(network, "flash_runs", lambda *_: True)
    found, found_grads = run(ours, tokens, lengths)
    torch.testing.assert_close(found, logprobs)
    for name, grad in grads.items():
        torch.testing.assert_close(found_grads[name], grad, atol=1e-4 * float(grad.abs().max()), rtol=1e-4)


def test_a_varlen_row_is_aligned_by_a_sequence_that_nobody_asks_for() -> None:
    tokens = packed(LENGTHS)
    found = fold(tokens, LENGTHS, varlen=True)
    assert isinstance(found.plan, VarlenPlan)
    assert len(found.tokens_F) % ALIGNED_TOKENS == 0 == len(found.plan.positions_T) % ALIGNED_TOKENS
    assert found.tokens_F[found.place_T].tolist() == tokens.tolist()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_layers_give_the_same_to_the_last_bit(recompute: str) -> None:
    ours, tokens = our_model(plain_model("qwen3")), packed(LENGTHS)
    logprobs, grads = run(ours, tokens, LENGTHS)
    run_layers(ours, recompute=recompute)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found, found_grads = run(ours, tokens, LENGTHS)
    torch.testing.assert_close((found, found_grads), (logprobs, grads), atol=0, rtol=0)

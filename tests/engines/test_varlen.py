"""Attention over sequences of different lengths in one call: on a CPU the formula, on CUDA flash attention."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch

from rollart.errors import JobError
from rollart.model import network
from rollart.model.compiled import run_layers, run_plainly
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


def test_recomputed_layers_give_the_same_to_the_last_bit_and_keep_less() -> None:
    ours, tokens = our_model(plain_model("qwen3")), packed(LENGTHS)
    expected = run(ours, tokens, LENGTHS)
    kept_bytes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept_bytes[-1] += tensor.nbytes
        return tensor

    for recompute in (0, 1, 2):
        run_layers(ours, recompute=recompute)
        kept_bytes.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scores = packed_scores(ours, tokens, LENGTHS)
        del scores
        torch.testing.assert_close(run(ours, tokens, LENGTHS), expected, atol=0, rtol=0)
    assert kept_bytes[0] > 1.3 * kept_bytes[1] > 1.3 * 1.3 * kept_bytes[2]


def test_a_copy_of_a_model_runs_its_own_layers() -> None:
    """Layers that were told how to run must not run the original's weights."""
    ours, tokens = our_model(plain_model("qwen3")), packed(LENGTHS)
    run_layers(ours, recompute=2)
    copied = run_plainly(deepcopy(ours))
    with torch.no_grad():
        before = packed_scores(copied, tokens, LENGTHS).logprobs_T
        for param in ours.parameters():
            param.zero_()
        torch.testing.assert_close(packed_scores(copied, tokens, LENGTHS).logprobs_T, before, atol=0, rtol=0)


def test_layers_that_are_not_found_are_refused() -> None:
    ours = our_model(plain_model("qwen3"))
    model: Any = ours.base_model
    model.blocks = model._modules.pop("layers")
    run_layers(ours)
    with pytest.raises(JobError, match=r"train.recompute: the layers of qwen3"):
        run_layers(ours, recompute=2)

"""The engine's own forward of dense models against transformers' code, with and without packed matrices."""

import warnings

import numpy as np
import pytest
import torch

from rollart.engines.embedded import dense
from rollart.engines.embedded.dense import dense_forward
from rollart.model.network import forward_hidden, named_weights, project
from rollart.model.packed import PackedPlan
from tests.engines.reference import (
    KINDS,
    VOCAB,
    check,
    drain,
    make_engine,
    our_model,
    plain_model,
    random_tokens,
    request,
)

DENSE = [kind for kind in KINDS if "moe" not in kind]


@pytest.mark.parametrize("pack_min", [0, 1 << 17])
@pytest.mark.parametrize("kind", DENSE)
def test_hidden_states_and_logits_agree(kind: str, pack_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "PACK_MIN", pack_min)
    model = our_model(plain_model(kind))
    tokens = torch.randint(VOCAB, (50,))
    plan = PackedPlan([7, 30, 13], model.device)
    with torch.no_grad():
        theirs = forward_hidden(model, tokens, plan.positions_T, plan)
        logits = project(model, theirs)
        fast = dense_forward(model, 64)
        assert fast is not None
        ours = fast(tokens, plan.positions_T, plan)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(fast.project(ours), logits, atol=1e-5, rtol=1e-5)
        # its fused weights are the model's own
        torch.testing.assert_close(forward_hidden(model, tokens, plan.positions_T, plan), theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pack_min", [0, 1 << 17])
@pytest.mark.parametrize("kind", DENSE)
def test_a_swap_reaches_every_weight(kind: str, pack_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "PACK_MIN", pack_min)
    first, second = plain_model(kind), plain_model(kind, seed=1)
    engine = make_engine(first)
    assert dense_forward(our_model(first), 64) is not None
    rng = np.random.default_rng(0)
    for version, plain in enumerate((first, second)):
        if version:
            engine.swap(version, named_weights(plain))
        asked = request(random_tokens(rng, 40), f"s/{version}", max_tokens=20, temperature=1.0)
        engine.add(asked)
        check(asked, drain(engine)[asked.id], {version: plain})


def test_other_models_run_through_transformers_code() -> None:
    assert dense_forward(our_model(plain_model("qwen3-moe")), 64) is None


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_bias_after_attention_is_not_for_the_fast_forward(kind: str) -> None:
    """Not even one that is zero now: training may change it."""
    assert dense_forward(our_model(plain_model(kind, attention_bias=True)), 64) is None


def test_a_forward_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_model("qwen3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dense_forward(our_model(plain), 64) is not None
    monkeypatch.setattr(dense.Matrix, "added_to", lambda self, residual, rows: self(rows))
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert dense_forward(our_model(plain), 64) is None

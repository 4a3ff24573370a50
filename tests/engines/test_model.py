"""The packed forward agrees with transformers one sequence at a time, and weights go in and out by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GemmaConfig, PreTrainedModel

from rollart.errors import WeightError
from rollart.model import scoring as model_module
from rollart.model.network import (
    adopt,
    forward_hidden,
    load_model,
    load_weights_,
    named_weights,
    packed_logprobs,
    packed_scores,
    project,
)
from rollart.model.packed import PackedPlan
from tests.engines.reference import KINDS, VOCAB, build, our_model, plain_model

LENGTHS = (3, 90, 1, 70, 33, 33, 200, 80)


def packed_logits(model: PreTrainedModel, tokens_T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Of sequences laid end to end, each seeing only itself."""
    plan = PackedPlan(lengths, tokens_T.device)
    return project(model, forward_hidden(model, tokens_T, plan.positions_T, plan))


def packed(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [LENGTHS, (40,), (16, 16, 16)])
def test_packed_forward_and_gradient_agree_with_one_sequence_at_a_time(kind: str, lengths: tuple[int, ...]) -> None:
    plain, temperature = plain_model(kind), 0.7
    ours = our_model(plain)
    tokens = packed(lengths)
    logits, expected_logprobs = [], []
    for sequence in torch.split(tokens, list(lengths)):
        logits.append(plain(input_ids=sequence[None]).logits[0])
        scores = (logits[-1][:-1] / temperature).log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
        expected_logprobs += [torch.zeros(1), scores]
    torch.testing.assert_close(packed_logits(ours, tokens, lengths), torch.cat(logits), atol=2e-5, rtol=1e-5)

    logprobs = packed_logprobs(ours, tokens, lengths, temperature)
    expected = torch.cat(expected_logprobs)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    weight = torch.linspace(-1, 1, len(tokens))
    torch.autograd.backward((logprobs * weight).sum())
    torch.autograd.backward((expected * weight).sum())
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        grad = theirs[name].grad
        assert grad is not None
        torch.testing.assert_close(parameter.grad, grad, atol=1e-5 * float(grad.abs().max()) + 1e-7, rtol=1e-5)


def test_scores_in_chunks_are_the_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, tokens = our_model(plain_model("qwen3")), packed(LENGTHS)
    whole = packed_scores(ours, tokens, LENGTHS)
    torch.autograd.backward(whole.logprobs_T.sum())
    grads = {name: parameter.grad for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    monkeypatch.setattr(model_module, "LOGITS_PER_CHUNK", 40 * VOCAB)
    chunked = packed_scores(ours, tokens, LENGTHS)
    torch.autograd.backward(chunked.logprobs_T.sum())
    torch.testing.assert_close(chunked, whole)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3-tied"])
def test_the_head_s_gradients_add_up_in_float32_over_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 each further chunk would be rounded away against the sum of those before it."""
    plain, lengths = plain_model(kind), (300, 211)
    ours, tokens = our_model(plain), packed(lengths)
    torch.nn.Module.to(ours, torch.bfloat16)
    head = ours.get_output_embeddings().weight  # type: ignore[no-untyped-call]

    def gradient() -> torch.Tensor:
        ours.zero_grad()
        scores = packed_scores(ours, tokens, lengths, temperature=0.8)
        torch.autograd.backward(scores.logprobs_T.sum() + scores.entropy_T.sum())
        assert head.grad is not None
        return cast(torch.Tensor, head.grad).float()

    whole = gradient()
    monkeypatch.setattr(model_module, "LOGITS_PER_CHUNK", 3 * VOCAB)
    chunked = gradient()
    # A few units of the last place of the gradients' own size, for the one rounding that both have.
    assert float((chunked - whole).norm() / whole.norm()) < 0.004


def test_a_frozen_head_gets_no_gradient_from_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, tokens = our_model(plain_model("llama")), packed((40,))
    monkeypatch.setattr(model_module, "LOGITS_PER_CHUNK", 7 * VOCAB)
    head = ours.get_output_embeddings().weight.requires_grad_(False)  # type: ignore[no-untyped-call]
    torch.autograd.backward(packed_logprobs(ours, tokens, [40]).sum())
    assert head.grad is None
    assert cast(Any, ours).model.norm.weight.grad is not None


def test_only_the_wanted_tokens_are_scored() -> None:
    ours, tokens = our_model(plain_model("llama")), packed((20, 30))
    wanted = torch.arange(50) % 3 == 0
    with torch.no_grad():
        everything, some = packed_scores(ours, tokens, (20, 30)), packed_scores(ours, tokens, (20, 30), wanted_T=wanted)
        nothing = packed_logprobs(ours, tokens[:2], (1, 1))
    torch.testing.assert_close(some.logprobs_T, everything.logprobs_T * wanted)
    torch.testing.assert_close(some.entropy_T, everything.entropy_T * wanted)
    assert nothing.tolist() == [0.0, 0.0]


def test_entropy_is_that_of_the_distribution() -> None:
    plain, tokens = plain_model("qwen3"), packed((25,))
    with torch.no_grad():
        logprobs = (plain(input_ids=tokens[None]).logits[0, :-1] / 0.5).log_softmax(-1)
        scores = packed_scores(our_model(plain), tokens, (25,), temperature=0.5)
    torch.testing.assert_close(scores.entropy_T[1:], -(logprobs.exp() * logprobs).sum(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_travel_by_name_and_through_a_directory(kind: str, tmp_path: Path) -> None:
    first, second = plain_model(kind, seed=0), plain_model(kind, seed=1)
    tokens = packed((30,))
    ours = our_model(first)
    published = {name: tensor.clone() for name, tensor in named_weights(second).items()}
    assert ("lm_head.weight" in published) == (kind != "qwen3-tied")
    load_weights_(ours, published)
    expected = second(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(packed_logits(ours, tokens, [30]), expected, atol=2e-5, rtol=1e-5)

    ours.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("model.layers.0.mlp.experts.3.down_proj.weight" in names) == (kind == "qwen3-moe")
    for loaded in (load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        plan_free = loaded.config._attn_implementation != "rollart"
        logits = loaded(input_ids=tokens[None]).logits[0] if plan_free else packed_logits(loaded, tokens, [30])
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_a_tied_weight_may_come_under_either_name() -> None:
    first, second = plain_model("qwen3-tied", seed=0), plain_model("qwen3-tied", seed=1)
    ours = our_model(first)
    weights = dict(named_weights(second))
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    load_weights_(ours, weights)
    tokens = packed((12,))
    torch.testing.assert_close(packed_logits(ours, tokens, [12]), second(input_ids=tokens[None]).logits[0])


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_wrong_weights_change_nothing(damage: str) -> None:
    ours = our_model(plain_model("qwen3"))
    before = {name: tensor.clone() for name, tensor in named_weights(ours).items()}
    weights = dict(named_weights(plain_model("qwen3", seed=1)))
    if damage == "missing":
        del weights["model.norm.weight"]
    elif damage == "unknown":
        weights["model.norm.bias"] = weights["model.norm.weight"]
    else:
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    with pytest.raises(WeightError, match=r"model\.norm"):
        load_weights_(ours, weights)
    torch.testing.assert_close(dict(named_weights(ours)), before, atol=0, rtol=0)


def test_what_would_be_computed_wrongly_is_refused() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    plain: Any = build(GemmaConfig(**sizes, vocab_size=VOCAB, intermediate_size=32, head_dim=16, pad_token_id=0))
    plain.lm_head = torch.nn.Sequential(plain.lm_head)
    plain.get_output_embeddings = lambda: torch.nn.Linear(32, VOCAB)
    with pytest.raises(ValueError, match="output embedding"):
        adopt(plain)

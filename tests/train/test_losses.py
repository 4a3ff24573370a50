"""Every loss against its slow reference, value and gradient; and the sum over micro-batches against the whole."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollart.config.load import build_job
from rollart.config.settings import CLIP_RANGES, TrainSettings
from rollart.errors import JobError
from rollart.train.losses import (
    LossInputs,
    Totals,
    batch_advantages,
    kl_k3,
    merge_reports,
    policy_loss,
)
from tests.train import reference
from tests.train.reference import Sequences, Token

JOB: dict[str, Any] = {
    "name": "base",
    "tasks": [{"name": "bandit"}],
    "pools": [{"name": "cpu", "engines": {}, "slots": 8}],
}
ALGORITHMS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++")
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"correction": "decoupled"},
    {"correction": "decoupled", "weight_level": "sequence"},
    {"correction": "decoupled", "over_cap": "mask", "weight_floor": 0.5},
    {"correction": "decoupled", "over_cap": "mask", "weight_level": "sequence"},
    {"correction": "bypass"},
    {"correction": "bypass", "over_cap": "mask"},
    {"correction": "none"},
)


def train(**keys: Any) -> TrainSettings:
    """Of two updates a step, so that no clip range is refused as one that never acts."""
    return TrainSettings(**{"updates_per_step": 2, **keys})


def make_sequences(seed: int, count: int = 6, spread: float = 0.4) -> Sequences:
    """Sequences of uneven length whose policies differ enough for every clip and cap to bite."""
    rng = random.Random(seed)
    sequences: Sequences = []
    for _ in range(count):
        advantage = rng.gauss(0, 1)
        tokens = []
        for _ in range(rng.randint(1, 9)):
            current = -rng.expovariate(0.7)
            tokens.append(
                Token(
                    current=torch.tensor(current, dtype=torch.float64, requires_grad=True),
                    proximal=current + rng.gauss(0, spread),
                    behaviour=current + rng.gauss(0, 2 * spread),
                    reference=current + rng.gauss(0, spread),
                    entropy=rng.random(),
                    advantage=advantage,
                )
            )
        sequences.append(tokens)
    return sequences


def as_inputs(sequences: Sequences, current_N: Tensor, advantages_N: Tensor, first: int = 0) -> LossInputs:
    tokens = [token for sequence in sequences for token in sequence]
    chosen = slice(first, first + len(tokens))
    return LossInputs(
        current_N=current_N[chosen],
        proximal_N=torch.tensor([token.proximal for token in tokens]),
        behaviour_N=torch.tensor([token.behaviour for token in tokens]),
        advantages_N=advantages_N[chosen],
        sequence_N=torch.tensor([at for at, sequence in enumerate(sequences) for _ in sequence]),
        num_sequences=len(sequences),
        entropy_N=torch.tensor([token.entropy for token in tokens]),
        reference_N=torch.tensor([token.reference for token in tokens]),
    )


def packed(
    settings: TrainSettings, sequences: Sequences, cuts: Sequence[int] = ()
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient and metrics over micro-batches that end at `cuts`."""
    tokens = [token for sequence in sequences for token in sequence]
    current_N = torch.tensor([token.current.item() for token in tokens], requires_grad=True)
    advantages_N = batch_advantages(settings, torch.tensor([token.advantage for token in tokens]))
    totals = Totals(tokens=len(tokens), sequences=len(sequences))
    loss, reports, first = torch.zeros(()), [], 0
    for begin, end in itertools.pairwise([0, *cuts, len(sequences)]):
        part = sequences[begin:end]
        share, report = policy_loss(settings, as_inputs(part, current_N, advantages_N, first), totals)
        torch.autograd.backward(share)
        loss = loss + share.detach()
        reports.append(report)
        first += sum(len(sequence) for sequence in part)
    assert current_N.grad is not None
    return loss, current_N.grad, merge_reports(reports)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda value: "-".join(str(part) for part in value.values()))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_reference(algorithm: Any, correction: dict[str, Any]) -> None:
    eps: dict[str, float] = {} if algorithm == "rloo" else {"eps_low": 0.15, "eps_high": 0.3}
    constant = {"length_constant": 7} if algorithm == "dr_grpo" else {}
    cap = {} if correction["correction"] == "none" else {"weight_cap": 1.5}
    settings = train(algorithm=algorithm, kl_coef=0.3, **cap, **correction, **eps, **constant)
    for seed in range(5):
        sequences = make_sequences(seed)
        expected = reference.loss(
            sequences,
            algorithm=algorithm,
            low=0.15,
            high=0.3,
            length_constant=7,
            correction=settings.correction,
            level=settings.weight_level,
            over=settings.over_cap,
            cap=1.5,
            floor=settings.weight_floor,
            kl_coef=0.3,
        )
        torch.autograd.backward(expected)
        gradient = torch.tensor([t.current.grad.item() for s in sequences for t in s if t.current.grad is not None])
        loss, grad_N, metrics = packed(settings, sequences)
        torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grad_N, gradient, atol=1e-5, rtol=1e-5)
        assert metrics["actor/loss"] == pytest.approx(float(expected.detach()), abs=1e-5)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda value: "-".join(str(part) for part in value.values()))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_micro_batch_split_changes_nothing(algorithm: Any, correction: dict[str, Any]) -> None:
    settings = train(algorithm=algorithm, kl_coef=0.1, entropy_coef=0.01, **correction)
    sequences = make_sequences(3, count=7)
    whole_loss, whole_grad_N, whole = packed(settings, sequences)
    for cuts in ((1,), (3,), (2, 5), (1, 2, 3, 4, 5, 6)):
        loss, grad_N, metrics = packed(settings, sequences, cuts)
        torch.testing.assert_close(loss, whole_loss, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(grad_N, whole_grad_N, atol=1e-7, rtol=1e-5)
        assert metrics == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_policy_all_agree_on_direction(algorithm: Any) -> None:
    """With all policies equal, every loss is plain policy gradient up to its own scale."""
    settings = train(algorithm=algorithm)
    sequences = make_sequences(1, spread=0.0)
    _, grad_N, metrics = packed(settings, sequences)
    advantages_N = batch_advantages(settings, torch.tensor([t.advantage for s in sequences for t in s]))
    assert torch.equal(grad_N.sign(), -advantages_N.sign())
    assert metrics["actor/clipfrac"] == 0
    assert metrics["actor/truncated_share"] == 0
    assert metrics["actor/ratio_max"] == pytest.approx(1, abs=1e-6)
    assert metrics["actor/kl_mismatch"] == pytest.approx(0, abs=1e-6)


def test_clip_higher_keeps_gradient_where_grpo_stops() -> None:
    """Ratio 1.25 with a positive advantage: beyond GRPO's range, within DAPO's."""
    current = torch.tensor(0.0, dtype=torch.float64)
    token = Token(current=current - 1, proximal=-1.2231, behaviour=-1.2231, reference=-1, entropy=0, advantage=1)
    grads = {}
    for algorithm in ("grpo", "dapo"):
        _, grad_N, metrics = packed(train(algorithm=algorithm), [[token]])
        grads[algorithm] = float(grad_N[0])
        assert metrics["actor/clipfrac"] == (algorithm == "grpo")
    assert grads["grpo"] == 0
    assert grads["dapo"] < -1


def test_by_default_each_algorithm_clips_in_its_own_way() -> None:
    """Tokens of older weights in a step of one update, where current and proximal weights are the same."""
    current = torch.tensor(-1.0, dtype=torch.float64)
    tokens = [Token(current, -1, behaviour, -1, 0, advantage) for behaviour in (-1.24, -3.0) for advantage in (1, -1)]
    grads = {}
    for algorithm in ("grpo", "dapo", "cispo", "rloo"):
        _, grad_N, metrics = packed(train(algorithm=algorithm), [[token] for token in tokens])
        grads[algorithm] = tuple(round(float(grad), 6) for grad in grad_N)
        assert (metrics["actor/clipfrac"] > 0) == (algorithm != "rloo")
    assert len({*grads.values()}) == len(grads)


def test_the_default_cap_leaves_the_clip_range_whole() -> None:
    assert train(algorithm="cispo").cap == 10
    assert train(algorithm="cispo", correction="decoupled").cap == 2
    assert train(algorithm="rloo").cap == 2
    assert train(algorithm="grpo", eps_high=3.0).cap == 8
    assert train(algorithm="grpo", weight_cap=1.5).cap == 1.5


def test_cap_bounds_the_weight() -> None:
    """The engine found a token e^5 times less likely than the trainer does: its weight is the cap, and counted."""
    token = Token(torch.tensor(-1.0, dtype=torch.float64), -1, -6, -1, 0, 1)
    _, grad_N, metrics = packed(train(correction="decoupled", weight_cap=3), [[token]])
    assert float(grad_N[0]) == pytest.approx(-3)
    assert metrics["actor/truncated_share"] == 1
    assert metrics["actor/ratio_max"] == pytest.approx(148.4, abs=0.1)
    assert metrics["actor/kl_mismatch"] == pytest.approx(148.4 - 1 - 5, abs=0.1)


def test_impossible_token_stays_finite() -> None:
    token = Token(torch.tensor(-1.0, dtype=torch.float64), -1, -1e4, -1e4, 0, -1)
    for correction in CORRECTIONS:
        _, grad_N, metrics = packed(train(kl_coef=0.1, **correction), [[token]])
        assert torch.isfinite(grad_N).all()
        assert all(value == value and abs(value) < 1e12 for value in metrics.values())


def test_entropy_bonus_raises_entropy() -> None:
    logits_V = torch.tensor([2.0, 0.0, 0.0], requires_grad=True)
    log_probs_V = torch.log_softmax(logits_V, -1)
    inputs = LossInputs(
        current_N=log_probs_V[:1],
        proximal_N=log_probs_V[:1].detach(),
        behaviour_N=log_probs_V[:1].detach(),
        advantages_N=torch.zeros(1),
        sequence_N=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        entropy_N=-(log_probs_V.exp() * log_probs_V).sum()[None],
    )
    loss, _ = policy_loss(train(entropy_coef=0.5), inputs, Totals(tokens=1, sequences=1))
    torch.autograd.backward(loss)
    assert logits_V.grad is not None
    assert logits_V.grad[0] > 0 > logits_V.grad[1]


def test_k3_is_a_kl() -> None:
    """Averaged over samples of p it is KL(p || q), and it is never negative."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.2, 0.6]).log()
    estimate = kl_k3(p, q)
    assert (estimate >= 0).all()
    torch.testing.assert_close((p.exp() * estimate).sum(), (p.exp() * (p - q)).sum())


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"algorithm": "ppo"}, "algorithm"),
        ({"correction": "tis"}, "correction"),
        ({"eps_low": -0.1}, "eps_low"),
        ({"algorithm": "rloo", "eps_high": 0.2}, "eps_high"),
        ({"length_constant": 5}, "length_constant"),
        ({"algorithm": "dr_grpo", "length_constant": 0}, "length_constant"),
        ({"weight_cap": 0.5}, "weight_cap"),
        ({"weight_level": "sequence", "correction": "bypass"}, "weight_level"),
        ({"over_cap": "mask", "correction": "none"}, "over_cap"),
        ({"weight_floor": 0.5}, "weight_floor"),
        ({"weight_floor": 1.5, "over_cap": "mask"}, "weight_floor"),
        ({"kl_coef": -1}, "kl_coef"),
        ({"entropy_coef": -1}, "entropy_coef"),
    ],
)
def test_settings_name_the_key(values: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError, match=rf"^train\.{key}: .*(;|one of)"):
        build_job({**JOB, "train": {"updates_per_step": 2, **values}})


def test_every_clipping_algorithm_has_a_range() -> None:
    assert set(CLIP_RANGES) == set(ALGORITHMS) - {"rloo"}

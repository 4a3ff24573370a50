"""Policy losses, as pure functions over flat packed tensors.

Owns: what each algorithm means, the off-policy correction, and what is measured of both. The trainer calls
`policy_loss` once per micro-batch.
Invariant: a micro-batch's loss is its *share* of the batch's loss, since every sum is divided by the totals of the
whole batch. So the gradients of the micro-batches add up to the batch's gradient, however it was cut.

Shapes: N = sampled tokens of a micro-batch (prompt and observation tokens are left out), sequence after sequence;
S = its sequences (one `Sample` each). Three policies have a log-probability for each sampled token:

    current     with gradient: the weights as they are now
    proximal    the trainer's weights when the step began (equal to current, where a step is one update)
    behaviour   the engine's, of the moment the token was sampled: older weights, other kernels

| algorithm     | per token                                             | summed over tokens, divided by          |
|---------------|-------------------------------------------------------|-----------------------------------------|
| `grpo`        | -min(r A, clip(r) A)                                  | tokens of the batch                     |
| `dapo`        | the same with a higher upper bound                    | tokens of the batch                     |
| `dr_grpo`     | as grpo                                               | sequences x `length_constant`           |
| `gspo`        | as grpo, r = geometric mean of the sequence's ratios  | own sequence's length x sequences       |
| `cispo`       | -stop_gradient(clip(r)) A log p                       | tokens of the batch                     |
| `rloo`        | -stop_gradient(r) A log p                             | sequences                               |
| `reinforce++` | as grpo, A normalised over the batch                  | tokens of the batch                     |

`r` is current / proximal where `correction` is `decoupled` (then the token also gets the weight proximal /
behaviour, truncated or masked at `weight_cap`) or `none`; it is current / behaviour, cut at `weight_cap`, where it
is `bypass`. Group baselines (GRPO's, RLOO's) are in the advantages already. KL and entropy are token means always.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.config.settings import TrainSettings

DEFAULT_LENGTH_CONSTANT = 1024
MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp, so that a token the engine found impossible cannot make an infinity."""
ADVANTAGE_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the sums are divided by: counted over the whole batch of one optimizer update."""

    tokens: int
    """Sampled tokens."""
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch. All (N,) float32 unless said otherwise."""

    current_N: Tensor
    """Log-probabilities under the current weights, with gradient."""
    proximal_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    """int64: which of the S sequences a token belongs to."""
    num_sequences: int
    """S."""
    entropy_N: Tensor | None = None
    """Entropy of the distribution each token was drawn from; with gradient where `entropy_coef` is set."""
    reference_N: Tensor | None = None
    """Log-probabilities under the reference model; needed where `kl_coef` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """What one micro-batch adds to the step's metrics, or several. Scalars, no gradient; those of one micro-batch are
    still on the device."""

    shares: Mapping[str, Tensor | float]
    """Already divided by the batch's totals: added up over micro-batches and ranks."""
    maxima: Mapping[str, Tensor | float]


def policy_loss(settings: TrainSettings, inputs: LossInputs, totals: Totals) -> tuple[Tensor, LossReport]:
    """This micro-batch's share of the batch's loss, and of its metrics. At least one token is needed."""
    anchor_N = inputs.behaviour_N if settings.correction == "bypass" else inputs.proximal_N
    ratio_N = _ratio(inputs.current_N, anchor_N)
    if settings.algorithm == "gspo":
        ratio_N = _sequence_ratio(inputs, anchor_N)
    ratio_N, weight_N, over_N = _correct(settings, inputs, ratio_N)
    surrogate_N, clipped_N = _surrogate(settings, inputs, ratio_N)
    policy = -(surrogate_N * weight_N * _scale(settings, inputs, totals)).sum()
    loss = policy
    shares: dict[str, Tensor | float] = {"actor/pg_loss": policy.detach()}
    if inputs.entropy_N is not None:
        entropy = inputs.entropy_N.sum() / totals.tokens
        shares["actor/entropy"] = entropy.detach()
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * entropy
    if inputs.reference_N is not None:
        kl = kl_k3(inputs.current_N, inputs.reference_N).sum() / totals.tokens
        shares["actor/kl_ref"] = kl.detach()
        if settings.kl_coef:
            loss = loss + settings.kl_coef * kl
    assert inputs.entropy_N is not None or not settings.entropy_coef, "entropy_coef needs entropy_N"
    assert inputs.reference_N is not None or not settings.kl_coef, "kl_coef needs reference_N"
    shares["actor/loss"] = loss.detach()
    maxima: dict[str, Tensor | float] = {}
    with torch.no_grad():
        # The tokens are the engine's samples: this is KL(engine || trainer).
        mismatch_N = kl_k3(inputs.behaviour_N, inputs.proximal_N)
        drift_N = _ratio(inputs.current_N, inputs.behaviour_N)
        means = {
            "actor/kl_mismatch": mismatch_N,
            "actor/ratio_mean": drift_N,
            "actor/clipfrac": clipped_N.float(),
            "actor/truncated_share": over_N.float(),
            "actor/weight_mean": weight_N,
        }
        shares |= {name: value_N.sum() / totals.tokens for name, value_N in means.items()}
        maxima["actor/ratio_max"] = drift_N.max()
        maxima["actor/logprob_diff_max"] = (inputs.proximal_N - inputs.behaviour_N).abs().max()
    return loss, LossReport(shares=shares, maxima=maxima)


def add_reports(reports: Sequence[LossReport]) -> LossReport:
    """One report of several micro-batches."""
    shares: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for report in reports:
        for name, share in report.shares.items():
            shares[name] = shares.get(name, 0.0) + float(share)
        for name, value in report.maxima.items():
            maxima[name] = max(maxima.get(name, float("-inf")), float(value))
    return LossReport(shares=shares, maxima=maxima)


def merge_reports(reports: Sequence[LossReport]) -> dict[str, float]:
    """The metrics of an update from the reports of all its micro-batches."""
    added = add_reports(reports)
    return {name: float(value) for name, value in (*added.shares.items(), *added.maxima.items())}


def batch_advantages(settings: TrainSettings, advantages_N: Tensor) -> Tensor:
    """The advantages to train on, from those of all sampled tokens of the whole batch.

    REINFORCE++ takes them to mean 0 and deviation 1 over the batch; the other algorithms leave them as they are.
    """
    if settings.algorithm != "reinforce++" or advantages_N.numel() == 0:
        return advantages_N
    wide_N = advantages_N.double()
    centred_N = wide_N - wide_N.mean()
    return (centred_N / (centred_N.square().mean().sqrt() + ADVANTAGE_EPS)).to(advantages_N.dtype)


def kl_k3(sampled_N: Tensor, other_N: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(sampled || other) per token, for tokens drawn from `sampled`. Never negative."""
    log_ratio_N = (other_N - sampled_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_N.expm1() - log_ratio_N


def _ratio(over_N: Tensor, under_N: Tensor) -> Tensor:
    return (over_N - under_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sequence_sum(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """(S,) sums over each sequence."""
    return values_N.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_N, values_N)


def _lengths(inputs: LossInputs) -> Tensor:
    """(N,) sampled tokens of the sequence each token belongs to."""
    return _sequence_sum(torch.ones_like(inputs.advantages_N), inputs)[inputs.sequence_N]


def _sequence_ratio(inputs: LossInputs, anchor_N: Tensor) -> Tensor:
    """(N,) GSPO's ratio: the geometric mean over the token's sequence, with gradient to all its tokens."""
    mean_N = _sequence_sum(inputs.current_N - anchor_N, inputs)[inputs.sequence_N] / _lengths(inputs)
    return mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _correct(settings: TrainSettings, inputs: LossInputs, ratio_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The ratio to use, the token's weight (no gradient), and which tokens were cut or left out."""
    one_N = torch.ones_like(inputs.advantages_N)
    match settings.correction:
        case "none":
            return ratio_N, one_N, torch.zeros_like(one_N, dtype=torch.bool)
        case "bypass":
            measured_N = ratio_N.detach()
        case "decoupled":
            difference_N = (inputs.proximal_N - inputs.behaviour_N).detach()
            if settings.weight_level == "sequence":
                difference_N = _sequence_sum(difference_N, inputs)[inputs.sequence_N]
            measured_N = difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    over_N = (measured_N > settings.cap) | (measured_N < settings.weight_floor)
    weight_N = measured_N.clamp(max=settings.cap) if settings.correction == "decoupled" else one_N
    if settings.over_cap == "mask":
        weight_N = weight_N.masked_fill(over_N, 0.0)
    if settings.correction == "bypass":
        ratio_N = ratio_N.clamp(max=settings.cap)
    return ratio_N, weight_N, over_N


def _surrogate(settings: TrainSettings, inputs: LossInputs, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) what is maximised, and where the clip range was in force."""
    advantages_N = inputs.advantages_N
    low, high = settings.clip_range
    within_N = ratio_N.clamp(1 - low, 1 + high)
    match settings.algorithm:
        case "rloo":
            return ratio_N.detach() * advantages_N * inputs.current_N, torch.zeros_like(ratio_N, dtype=torch.bool)
        case "cispo":
            return within_N.detach() * advantages_N * inputs.current_N, (within_N != ratio_N).detach()
        case _:
            free_N, held_N = ratio_N * advantages_N, within_N * advantages_N
            return torch.minimum(free_N, held_N), (held_N < free_N).detach()


def _scale(settings: TrainSettings, inputs: LossInputs, totals: Totals) -> Tensor | float:
    """What each token counts for in the batch's loss."""
    match settings.algorithm:
        case "dr_grpo":
            return 1.0 / (totals.sequences * (settings.length_constant or DEFAULT_LENGTH_CONSTANT))
        case "gspo":
            return 1.0 / (totals.sequences * _lengths(inputs))
        case "rloo":
            return 1.0 / totals.sequences
        case _:
            return 1.0 / totals.tokens

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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rollart.config.settings import CLIP_RANGES

Algorithm = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++"]
Correction = Literal["decoupled", "bypass", "none"]
Level = Literal["token", "sequence"]
OverCap = Literal["truncate", "mask"]

DEFAULT_LENGTH_CONSTANT = 1024
DEFAULT_WEIGHT_CAP = 2.0
MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp, so that a token the engine found impossible cannot make an infinity."""
ADVANTAGE_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Which loss. Example: `LossSettings(algorithm="dapo", correction="decoupled", weight_cap=2.0)`."""

    algorithm: Algorithm = "grpo"
    eps_low: float | None = None
    """Lower clip range; None means the algorithm's own (`CLIP_RANGES`)."""
    eps_high: float | None = None
    length_constant: int | None = None
    """`dr_grpo` only: what a sequence's sum is divided by instead of its length. None means 1024."""
    correction: Correction = "bypass"
    weight_cap: float | None = None
    """Largest importance weight (decoupled) or ratio (bypass). None means 2, or twice the top of the clip range where
    that is higher than 2: a cap below it would keep the clip from acting."""
    weight_level: Level = "token"
    """`decoupled` only: one weight per token, or the product over a sequence for all its tokens."""
    over_cap: OverCap = "truncate"
    """What happens beyond the cap: the weight is cut to it, or the token (sequence) is left out."""
    weight_floor: float = 0.0
    """With `mask` only: what lies below is left out as well."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference model (k3 estimator). 0 needs no reference."""
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for key, value, kind in (
            ("algorithm", self.algorithm, Algorithm),
            ("correction", self.correction, Correction),
            ("weight_level", self.weight_level, Level),
            ("over_cap", self.over_cap, OverCap),
        ):
            if value not in get_args(kind):
                raise ValueError(f"{key}: {value!r} is not known; one of {', '.join(get_args(kind))}")
        for key, number in (("eps_low", self.eps_low), ("eps_high", self.eps_high)):
            if number is not None and self.algorithm == "rloo":
                raise ValueError(f"{key}: has no effect with algorithm rloo, which does not clip; remove it")
            if number is not None and number <= 0:
                raise ValueError(f"{key}: {number} is not positive; give a range such as 0.2")
        if self.eps_low is not None and self.eps_low >= 1 and self.algorithm != "cispo":
            raise ValueError(
                f"eps_low: {self.eps_low:g} has no effect with algorithm {self.algorithm}: ratios are above 0, and "
                f"never get down to 1 - eps_low; give less than 1, such as {CLIP_RANGES[self.algorithm][0]:g}"
            )
        if self.length_constant is not None and self.algorithm != "dr_grpo":
            raise ValueError("length_constant: has an effect with algorithm dr_grpo only; remove it")
        if self.length_constant is not None and self.length_constant < 1:
            raise ValueError(
                f"length_constant: {self.length_constant} is not a length; give the longest answer, such as 1024"
            )
        if self.weight_cap is not None and self.weight_cap < 1:
            raise ValueError(
                f"weight_cap: {self.weight_cap} would shrink on-policy tokens too; give 1 or more, such as 2.0"
            )
        if self.weight_level == "sequence" and self.correction != "decoupled":
            raise ValueError("weight_level: sequence needs correction decoupled; set that, or remove weight_level")
        if self.over_cap == "mask" and self.correction == "none":
            raise ValueError("over_cap: has no effect with correction none; remove it")
        if not 0 <= self.weight_floor < 1:
            raise ValueError(
                f"weight_floor: {self.weight_floor} is out of range; give at least 0 and below 1, such as 0.5"
            )
        if self.weight_floor > 0 and self.over_cap != "mask":
            raise ValueError("weight_floor: has an effect with over_cap mask only; set that, or remove weight_floor")
        for key, number in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if number < 0:
                raise ValueError(f"{key}: {number} is negative; give 0 or more")

    @property
    def cap(self) -> float:
        """The cap in force."""
        if self.weight_cap is not None:
            return self.weight_cap
        top = 1 + self.clip_range[1]
        beyond = self.correction == "bypass" and DEFAULT_WEIGHT_CAP < top < math.inf
        return 2 * top if beyond else DEFAULT_WEIGHT_CAP

    @property
    def clip_range(self) -> tuple[float, float]:
        """(eps_low, eps_high) in force; infinite for `rloo`."""
        low, high = CLIP_RANGES.get(self.algorithm, (float("inf"), float("inf")))
        return (low if self.eps_low is None else self.eps_low, high if self.eps_high is None else self.eps_high)


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


def policy_loss(settings: LossSettings, inputs: LossInputs, totals: Totals) -> tuple[Tensor, LossReport]:
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


def batch_advantages(settings: LossSettings, advantages_N: Tensor) -> Tensor:
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


def _correct(settings: LossSettings, inputs: LossInputs, ratio_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def _surrogate(settings: LossSettings, inputs: LossInputs, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
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


def _scale(settings: LossSettings, inputs: LossInputs, totals: Totals) -> Tensor | float:
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

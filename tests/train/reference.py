"""Each algorithm's loss written from its definition: Python loops over sequences and tokens, one scalar at a time.

Slow on purpose, and independent of `rollart.train.losses`: a sequence is a list of scalars, nothing is packed. Scalars
are float64 tensors only so that autograd gives the gradient of what is written here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Token:
    """One sampled token under the four policies, with its advantage."""

    current: Tensor
    proximal: float
    behaviour: float
    reference: float
    entropy: float
    advantage: float


Sequences = list[list[Token]]


def _anchor(token: Token, correction: str) -> float:
    return token.behaviour if correction == "bypass" else token.proximal


def _weight(
    sequence: list[Token], position: int, correction: str, level: str, over: str, cap: float, floor: float
) -> float:
    """Truncated importance weight of the proximal against the behaviour policy."""
    if correction != "decoupled":
        return 1.0
    weight = 1.0
    for token in sequence if level == "sequence" else [sequence[position]]:
        weight *= float(torch.tensor(token.proximal - token.behaviour, dtype=torch.float64).exp())
    if over == "mask":
        return 0.0 if weight > cap or weight < floor else weight
    return min(weight, cap)


def _cut(ratio: Tensor, correction: str, over: str, cap: float, floor: float) -> tuple[Tensor, float]:
    """In bypass mode the ratio itself is truncated; or the token is left out."""
    if correction != "bypass":
        return ratio, 1.0
    value = ratio.item()
    if over == "mask" and (value > cap or value < floor):
        return ratio, 0.0
    return (ratio if value <= cap else torch.tensor(cap, dtype=torch.float64)), 1.0


def _clip(ratio: Tensor, low: float, high: float) -> Tensor:
    if ratio.item() < 1 - low:
        return torch.tensor(1 - low, dtype=torch.float64)
    if ratio.item() > 1 + high:
        return torch.tensor(1 + high, dtype=torch.float64)
    return ratio


def _ppo(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    free, held = ratio * advantage, _clip(ratio, low, high) * advantage
    return -(free if free.item() <= held.item() else held)


def loss(
    sequences: Sequences,
    *,
    algorithm: str,
    low: float = 0.2,
    high: float = 0.2,
    length_constant: int = 1024,
    correction: str = "decoupled",
    level: str = "token",
    over: str = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
    kl_coef: float = 0.0,
) -> Tensor:
    num_tokens = sum(len(sequence) for sequence in sequences)
    advantages = [token.advantage for sequence in sequences for token in sequence]
    mean = sum(advantages) / num_tokens
    deviation = (sum((advantage - mean) ** 2 for advantage in advantages) / num_tokens) ** 0.5
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        of_sequence = torch.zeros((), dtype=torch.float64)
        log_ratio = sum((token.current - _anchor(token, correction) for token in sequence), start=torch.tensor(0.0))
        for position, token in enumerate(sequence):
            weight = _weight(sequence, position, correction, level, over, cap, floor)
            ratio = (token.current - _anchor(token, correction)).exp()
            if algorithm == "gspo":
                ratio = (log_ratio / len(sequence)).exp()
            ratio, kept = _cut(ratio, correction, over, cap, floor)
            if algorithm == "cispo":
                term = -_clip(ratio, low, high).detach() * token.advantage * token.current
            elif algorithm == "rloo":
                term = -ratio.detach() * token.advantage * token.current
            elif algorithm == "reinforce++":
                term = _ppo(ratio, (token.advantage - mean) / (deviation + 1e-6), low, high)
            else:
                term = _ppo(ratio, token.advantage, low, high)
            of_sequence = of_sequence + weight * kept * term
        if algorithm == "dr_grpo":
            total = total + of_sequence / length_constant / len(sequences)
        elif algorithm == "gspo":
            total = total + of_sequence / len(sequence) / len(sequences)
        elif algorithm == "rloo":
            total = total + of_sequence / len(sequences)
        else:
            total = total + of_sequence / num_tokens
    for sequence in sequences:
        for token in sequence:
            difference = token.reference - token.current
            total = total + kl_coef * (difference.exp() - difference - 1) / num_tokens
    return total

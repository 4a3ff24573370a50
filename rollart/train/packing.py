"""Samples to micro-batches: flat, no padding, within a token budget.

Owns: the order of training data within a step.
Invariant: the same samples give the same micro-batches, in whatever order they came. Called by the trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rollart.model.varlen import on_device
from rollart.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences laid end to end. T = all tokens, N = sampled tokens, S = sequences.

    Example, two sequences [p a a] and [p p b]: tokens_T = [p a a p p b], lengths = (3, 3), positions_N = [1 2 5],
    sequence_N = [0 0 1].
    """

    samples: tuple[Sample, ...]
    lengths: tuple[int, ...]
    """(S,) tokens of each sequence."""
    tokens_T: Tensor
    """int64; always on the CPU, where common beginnings are looked for."""
    wanted_T: Tensor
    """bool, on the CPU: which are sampled."""
    positions_N: Tensor
    """int64: where in T the sampled tokens are. Never the first token of a sequence."""
    sequence_N: Tensor
    """int64: the sequence of each sampled token."""
    behaviour_N: Tensor
    """float32: the engine's log-probabilities."""
    advantages_N: Tensor
    """float32."""
    temperature: float
    """All its tokens were sampled at."""

    def to(self, device: torch.device) -> Self:
        """What the loss is computed from on another device."""
        return replace(
            self,
            positions_N=on_device(self.positions_N, device),
            sequence_N=on_device(self.sequence_N, device),
            behaviour_N=on_device(self.behaviour_N, device),
            advantages_N=on_device(self.advantages_N, device),
        )


def check_sample(sample: Sample, vocab_size: int) -> str:
    """What would fail, or mislead, deep inside a step; empty where nothing would."""
    size = len(sample.tokens)
    for key in ("mask", "logprobs", "versions", "advantages"):
        if len(getattr(sample, key)) != size:
            return f"{key} has {len(getattr(sample, key))} entries for {size} tokens"
    if size == 0 or not sample.mask.any():
        return ""
    if sample.mask[0]:
        return "its first token is marked as sampled, but has no prefix to be sampled from"
    if sample.tokens.min() < 0 or sample.tokens.max() >= vocab_size:
        return f"token ids {sample.tokens.min()} to {sample.tokens.max()}; the model knows 0 to {vocab_size - 1}"
    for key in ("logprobs", "advantages"):
        if not np.isfinite(getattr(sample, key)[sample.mask]).all():
            return f"{key} has a value that is not finite on a sampled token"
    return ""


def order(samples: Sequence[Sample]) -> list[Sample]:
    """The trainable samples, cut after their last sampled token, longest first; ties by id, then by content."""
    cut = [_cut(sample) for sample in samples if sample.mask.any()]
    return sorted(cut, key=lambda sample: (-len(sample.tokens), sample.trajectory, sample.tokens.tobytes()))


def bins(
    samples: Sequence[Sample], max_tokens: int, temperatures: Mapping[str, float] | None = None
) -> list[list[Sample]]:
    """The members of micro-batches of at most `max_tokens` tokens, first-fit decreasing.

    A sample longer than the budget gets a micro-batch of its own. Samples without a sampled token are left out.
    `temperatures` is by domain; a domain not named was sampled at 1. Each micro-batch is of one temperature.
    """
    by_temperature: dict[float, list[Sample]] = {}
    for sample in order(samples):
        by_temperature.setdefault(_temperature(sample, temperatures), []).append(sample)
    return [
        members
        for temperature in sorted(by_temperature)
        for members in _first_fit(by_temperature[temperature], max_tokens)
    ]


def _temperature(sample: Sample, temperatures: Mapping[str, float] | None) -> float:
    return (temperatures or {}).get(sample.domain, 1.0)


def _first_fit(ordered: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    bins: list[list[Sample]] = []
    room: list[int] = []
    first_open = 0
    for sample in ordered:
        size = len(sample.tokens)
        place = next((at for at in range(first_open, len(bins)) if room[at] >= size), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(sample)
        room[place] -= size
        while first_open < len(bins) and room[first_open] <= 0:
            first_open += 1
    return bins


def deal(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Split into `parts` of about equal tokens, one per optimizer update or rank; parts may be empty."""
    hands: list[list[Sample]] = [[] for _ in range(parts)]
    load = [0] * parts
    for sample in order(samples):
        lightest = load.index(min(load))
        hands[lightest].append(sample)
        load[lightest] += len(sample.tokens)
    return hands


def _cut(sample: Sample) -> Sample:
    """Without what follows the last sampled token: it has no influence on the loss."""
    end = int(np.flatnonzero(sample.mask)[-1]) + 1
    if end == len(sample.tokens):
        return sample
    return Sample(
        trajectory=sample.trajectory,
        domain=sample.domain,
        tokens=sample.tokens[:end],
        mask=sample.mask[:end],
        logprobs=sample.logprobs[:end],
        versions=sample.versions[:end],
        advantages=sample.advantages[:end],
    )


def micro_batch(samples: Sequence[Sample], temperatures: Mapping[str, float] | None = None) -> MicroBatch:
    """Samples of one temperature, laid end to end."""
    mask_T = np.concatenate([sample.mask for sample in samples])
    sampled = [int(sample.mask.sum()) for sample in samples]

    def flat(key: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, key)[sample.mask] for sample in samples]))

    return MicroBatch(
        samples=tuple(samples),
        lengths=tuple(len(sample.tokens) for sample in samples),
        tokens_T=torch.from_numpy(np.concatenate([sample.tokens for sample in samples]).astype(np.int64)),
        wanted_T=torch.from_numpy(mask_T),
        positions_N=torch.from_numpy(np.flatnonzero(mask_T)),
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(samples)), sampled)),
        behaviour_N=flat("logprobs").float(),
        advantages_N=flat("advantages").float(),
        temperature=_temperature(samples[0], temperatures),
    )

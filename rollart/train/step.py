"""What a train step is, whatever it runs on: who computes what, and the metrics of it all.

Owns: the cut of a batch into optimizer updates, ranks and micro-batches. `SingleTrainer` plans for one rank,
`RankedTrainer` for several; the learner of each rank works its shares off.
Invariants: in an update every rank has the same number of micro-batches (some may be empty), since sharded ranks must
call the network together; every share knows the totals of the whole update, so that the ranks' gradients add up to
those of one device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from rollart.errors import TrainerError
from rollart.samples import filled
from rollart.train.losses import LossReport, LossSettings, Totals, batch_advantages, merge_reports
from rollart.train.packing import bins, check_sample, deal
from rollart.train.settings import TrainerSettings
from rollart.types import Batch, Sample, WeightVersion


class Share(NamedTuple):
    """What one rank does in one optimizer update."""

    totals: Totals
    """Of the update, over all ranks."""
    parts: tuple[tuple[Sample, ...], ...]
    """Micro-batches. An empty one is computed for company only, and adds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one optimizer update gave: on one rank, or over all."""

    loss: LossReport
    grad_norm: float
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, cut up."""

    step: int
    shares: tuple[tuple[Share, ...], ...]
    """By rank, then by update. Updates without a sample are left out."""

    def metrics(self, reports: Sequence[Sequence[UpdateReport]], lr: float, seconds: float) -> dict[str, float]:
        """Of the step, from the ranks' reports, rank by rank: means over its updates (largest of `_max`, sum of
        `skipped_updates`), and counts."""
        updates = [_over_ranks(ranks) for ranks in zip(*reports, strict=True)]
        merged: dict[str, float] = {}
        for name in sorted({name for update in updates for name in update}):
            values = [update[name] for update in updates if name in update]
            match name.rpartition("_")[2]:
                case "max":
                    merged[name] = max(values)
                case "updates":
                    merged[name] = sum(values)
                case _:
                    merged[name] = sum(values) / len(values)
        parts = [part for shares in self.shares for share in shares for part in share.parts if part]
        samples = [sample for part in parts for sample in part]
        merged["perf/tokens"] = float(sum(len(sample.tokens) for sample in samples))
        merged["perf/sampled_tokens"] = float(sum(int(sample.mask.sum()) for sample in samples))
        merged["perf/microbatches"] = float(len(parts))
        if samples:
            ages_N = self.step - np.concatenate([sample.versions[sample.mask] for sample in samples])
            merged["actor/age_mean"], merged["actor/age_max"] = float(ages_N.mean()), float(ages_N.max())
        merged |= {"actor/lr": lr, "timing_s/train": seconds, "perf/tokens_per_s": merged["perf/tokens"] / seconds}
        return merged


def check_step(step: int, version: WeightVersion) -> None:
    """Step n runs on version n only."""
    if step != version:
        kind = "was already trained on" if step < version else "is ahead of the trainer"
        raise TrainerError(
            f"step {step} {kind}, which is at version {version}; "
            f"send the batch of step {version}, or restore another checkpoint first"
        )


def plan_step(batch: Batch, settings: TrainerSettings, *, vocab_size: int, ranks: int) -> StepPlan:
    """Cut a batch up. Raises ValueError for samples that no trainer could use."""
    settings = settings.at(batch.step)
    if batch.groups:
        batch = filled(batch, skip_zero_variance=settings.skip_zero_variance)
    for sample in batch.samples:
        check_sample(sample, vocab_size)
    samples = _with_advantages(settings.loss, [sample for sample in batch.samples if sample.mask.any()])
    updates = [hand for hand in deal(samples, settings.updates_per_step) if hand]
    by_update = [_shares(hand, settings, ranks) for hand in updates]
    return StepPlan(step=batch.step, shares=tuple(tuple(shares[rank] for shares in by_update) for rank in range(ranks)))


def _shares(hand: Sequence[Sample], settings: TrainerSettings, ranks: int) -> list[Share]:
    """One update's samples, rank by rank."""
    totals = Totals(tokens=sum(int(sample.mask.sum()) for sample in hand), sequences=len(hand))
    packed = [bins(part, settings.microbatch_tokens, settings.temperatures) for part in deal(hand, ranks)]
    most = max(len(parts) for parts in packed)
    return [Share(totals, tuple(tuple(part) for part in parts) + ((),) * (most - len(parts))) for parts in packed]


def _with_advantages(settings: LossSettings, samples: list[Sample]) -> list[Sample]:
    """The samples with the advantages to train on: an algorithm may normalise them over the whole batch."""
    if not samples:
        return samples
    sizes = [int(sample.mask.sum()) for sample in samples]
    given_N = torch.from_numpy(np.concatenate([sample.advantages[sample.mask] for sample in samples]))
    wanted_N = batch_advantages(settings, given_N)
    if wanted_N is given_N:
        return samples
    changed: list[Sample] = []
    for sample, own_N in zip(samples, torch.split(wanted_N, sizes), strict=True):
        advantages = np.zeros_like(sample.advantages)
        advantages[sample.mask] = own_N.numpy()
        changed.append(replace(sample, advantages=advantages))
    return changed


def _over_ranks(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """One update's metrics. Norm and skipping are of the whole gradient, so all ranks say the same."""
    return merge_reports([report.loss for report in reports]) | {
        "actor/grad_norm": reports[0].grad_norm,
        "actor/skipped_updates": float(reports[0].skipped),
    }

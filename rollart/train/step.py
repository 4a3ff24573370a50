"""What a train step is, whatever it runs on: who computes what, what is left out, and the metrics of it all.

Owns: the cut of a batch into optimizer updates, ranks and micro-batches, and what becomes of data that cannot be
trained on. `SingleTrainer` works a `Step` off on one rank, `RankedTrainer` on several.
Invariants: in an update every rank has the same number of micro-batches (some may be empty), since sharded ranks must
call the network together; every share knows the totals of the whole update, so that the ranks' gradients add up to
those of one device; a trajectory that is set aside has no part in any update from then on, and is noted (`Aside`)
before the step goes on, so that the step leaves it out again whenever it is repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from rollart.config.settings import TrainSettings
from rollart.errors import TrainerError
from rollart.train.aside import Aside
from rollart.train.losses import LossReport, Totals, batch_advantages, merge_reports
from rollart.train.packing import bins, check_sample, deal
from rollart.train.samples import filled
from rollart.train.settings import TrainerSettings, temperatures
from rollart.types import Batch, Sample, SetAside, StepResult, TrajectoryId, WeightVersion
from rollart.workers.wire import allow

NOT_FINITE = "its loss is not a finite number"


class RankWork(NamedTuple):
    """What one rank does in one optimizer update."""

    totals: Totals
    """Of the update, over all ranks."""
    parts: tuple[tuple[Sample, ...], ...]
    """Micro-batches. An empty one is computed only because other ranks compute one, and adds nothing."""


class _Update(NamedTuple):
    """An optimizer update that is still to be made."""

    number: int
    """Its place in the deal. Those before it were made, or nothing is left of them."""
    ranks: list[list[list[Sample]]]
    """By rank: micro-batches."""


class Failed(NamedTuple):
    """A micro-batch that cannot be trained on as it is."""

    update: int
    """Updates after the one that is reported."""
    part: int
    reason: str
    memory: bool = False
    """There was not enough of it."""
    raised: bool = False
    """It was not computed to its end: other ranks may be waiting for this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one optimizer update gave: on one rank, or over all."""

    loss: LossReport
    grad_norm: float
    skipped: bool
    """It was not made: the gradient is not finite. All ranks say the same."""
    failed: tuple[Failed, ...] = ()
    """Of this rank's micro-batches. Then the update is made again without what is at fault."""


allow(Totals, LossReport, RankWork, Failed, UpdateReport)


class Step:
    """One step under way. Ask for `shares`, `book` what the ranks report of each update, until none are left."""

    def __init__(
        self, batch: Batch, settings: TrainerSettings, aside: Aside, *, vocab_size: int, ranks: int = 1
    ) -> None:
        self._batch = batch
        self._job = job = settings.at(batch.step)
        self._aside = aside
        self._ranks = ranks
        self.updates_made = 0
        """Optimizer updates that changed the weights."""
        self._booked: list[dict[str, float]] = []
        self._done: list[tuple[Sample, ...]] = []
        """Micro-batches of the updates that are over."""
        self._left: list[_Update] = []
        reasons: dict[TrajectoryId, str] = {}
        given = batch
        if batch.groups:
            given = filled(batch, skip_zero_variance=job.rollout.zero_variance == "skip", failed=reasons)
        for sample in given.samples:
            if wrong := check_sample(sample, vocab_size):
                reasons[sample.trajectory] = wrong
        if reasons:
            aside.put(batch, reasons)
        self._samples = [sample for sample in given.samples if sample.mask.any()]
        self._plan()

    def shares(self, rank: int) -> list[RankWork]:
        """What this rank has to do, update by update. Empty when the step is over."""
        found: list[RankWork] = []
        for update in self._left:
            samples = [sample for parts in update.ranks for part in parts for sample in part]
            totals = Totals(tokens=sum(int(sample.mask.sum()) for sample in samples), sequences=len(samples))
            most = max(len(parts) for parts in update.ranks)
            own = [tuple(part) for part in update.ranks[rank]]
            found.append(RankWork(totals, (*own, *[()] * (most - len(own)))))
        return found

    def book(self, reports: Sequence[UpdateReport]) -> None:
        """What the ranks report of the next update. One that failed is cut anew, without what is at fault."""
        failed = [(rank, fault) for rank, report in enumerate(reports) for fault in report.failed]
        if failed:
            self._cut_anew(failed)
            return
        self._booked.append(_over_ranks(reports))
        self._done += [tuple(part) for parts in self._left.pop(0).ranks for part in parts]
        self.updates_made += not reports[0].skipped

    def note(self, rank: int, failed: Failed) -> str:
        """Write down what the next trainer has to do otherwise, where this one cannot go on; returns why."""
        if not self._judge(rank, failed):
            self._shrink(rank, failed)
        return (
            f"a micro-batch of rank {rank} could not be computed ({failed.reason}); the next trainer will cut it anew"
        )

    def result(self, version: WeightVersion, lr: float, seconds: float) -> StepResult:
        known = self._aside.reasons(self._batch.step)
        ids = dict.fromkeys(
            [member.id for group in self._batch.groups for member in group.members]
            + [sample.trajectory for sample in self._batch.samples]
        )
        aside = tuple(SetAside(name, known[str(name)]) for name in ids if str(name) in known)
        return StepResult(version=version, metrics=self._metrics(lr, seconds), set_aside=aside)

    def _plan(self) -> None:
        """Cut all of the step, less what was set aside. A sample that was so only after some updates were made had its
        place in the deal: without it those would be others."""
        samples = _with_advantages(self._job.train, self._kept(self._samples, update=0))
        hands = deal(samples, self._job.train.updates_per_step)
        self._left = self._cut([(number, deal(hand, self._ranks)) for number, hand in enumerate(hands)])

    def _cut(self, hands: Sequence[tuple[int, Sequence[Sequence[Sample]]]]) -> list[_Update]:
        """Updates from their numbers and the samples of each rank, less what each goes without."""
        cut = [_Update(number, [self._bins(self._kept(own, number)) for own in ranks]) for number, ranks in hands]
        return [update for update in cut if any(update.ranks)]

    def _kept(self, samples: Sequence[Sample], update: int) -> list[Sample]:
        out = self._aside.left_out(self._batch.step, update)
        return [sample for sample in samples if str(sample.trajectory) not in out]

    def _bins(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        tokens = self._aside.microbatch_tokens(self._batch.step, self._job.train.microbatch_tokens)
        return bins(samples, tokens, temperatures(self._job))

    def _cut_anew(self, failed: Sequence[tuple[int, Failed]]) -> None:
        halves = [fault for fault in failed if not self._judge(*fault)]
        if len(halves) < len(failed) and not self.updates_made:
            self._booked.clear()
            self._done.clear()
            self._plan()
        elif len(halves) < len(failed):  # what the updates made so far had is theirs, and a rank keeps its samples
            hands = [(update.number, [list(chain(*parts)) for parts in update.ranks]) for update in self._left]
            self._left = self._cut(hands)
        else:
            for rank, fault in sorted(halves, key=lambda found: -found[1].part):
                parts = self._left[fault.update].ranks[rank]
                part = parts[fault.part]
                parts[fault.part : fault.part + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]

    def _judge(self, rank: int, failed: Failed) -> bool:
        """A single sample is set aside; a micro-batch too large for memory makes all smaller from here on. False for
        one that is to be halved, to find the sample at fault."""
        parts = self._left[failed.update].ranks[rank]
        members = parts[failed.part] if failed.part < len(parts) else []
        if not members:
            raise TrainerError(f"step {self._batch.step}: a micro-batch without a sample failed: {failed.reason}")
        if len(members) == 1:
            reason = f"{failed.reason} (alone, {len(members[0].tokens)} tokens)" if failed.memory else failed.reason
            update = self._left[0].number if self.updates_made else 0
            self._aside.put(self._batch, {members[0].trajectory: reason}, update)
            return True
        if failed.memory:
            self._shrink(rank, failed)
        return failed.memory

    def _shrink(self, rank: int, failed: Failed) -> None:
        """Halve the micro-batches: of this step, and of all that follow where it is memory that they lack."""
        tokens = sum(len(sample.tokens) for sample in self._left[failed.update].ranks[rank][failed.part])
        self._aside.shrink(
            self._batch.step,
            max(1, tokens // 2),
            failed.reason,
            lasting=failed.memory,
            instead_of=self._job.train.microbatch_tokens,
        )

    def _metrics(self, lr: float, seconds: float) -> dict[str, float]:
        """Means over the updates (largest of `_max`, sum of `skipped_updates`), and counts."""
        merged: dict[str, float] = {}
        for name in sorted({name for update in self._booked for name in update}):
            values = [update[name] for update in self._booked if name in update]
            match name.rpartition("_")[2]:
                case "max":
                    merged[name] = max(values)
                case "updates":
                    merged[name] = sum(values)
                case _:
                    merged[name] = sum(values) / len(values)
        merged["actor/updates"] = float(self.updates_made)
        samples = [sample for part in self._done for sample in part]
        merged["perf/tokens"] = float(sum(len(sample.tokens) for sample in samples))
        merged["perf/sampled_tokens"] = float(sum(int(sample.mask.sum()) for sample in samples))
        merged["perf/microbatches"] = float(len([part for part in self._done if part]))
        if samples:
            ages_N = self._batch.step - np.concatenate([sample.versions[sample.mask] for sample in samples])
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


def _with_advantages(train: TrainSettings, samples: list[Sample]) -> list[Sample]:
    """The samples with the advantages to train on: an algorithm may normalise them over the whole batch."""
    if not samples:
        return samples
    sizes = [int(sample.mask.sum()) for sample in samples]
    given_N = torch.from_numpy(np.concatenate([sample.advantages[sample.mask] for sample in samples]))
    wanted_N = batch_advantages(train, given_N)
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

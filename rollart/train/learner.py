"""One device's work in a train step: forward, loss, backward, update.

Invariant: it knows nothing of other ranks. Where the network is sharded, the scorer and the optimizer talk to the other
ranks by themselves; all that is asked here is that every rank makes the same calls, which its shares see to.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rollart.model import Scores
from rollart.train.losses import LossInputs, LossReport, Totals, add_reports, policy_loss
from rollart.train.optimizer import MasterAdamW
from rollart.train.packing import MicroBatch, micro_batch
from rollart.train.settings import TrainerSettings
from rollart.train.step import Share, UpdateReport
from rollart.types import Sample, TrajectoryId

COMPANY = Sample(
    trajectory=TrajectoryId("", 0, 0),
    domain="",
    tokens=np.zeros(2, dtype=np.int32),
    mask=np.array([False, True]),
    logprobs=np.zeros(2, dtype=np.float32),
    versions=np.array([-1, 0], dtype=np.int32),
    advantages=np.zeros(2, dtype=np.float32),
)
"""Stands in for an empty micro-batch: the smallest that uses every weight."""


class Scorer(Protocol):
    """A network, as a function of packed tokens: see `rollart.model.packed_scores`."""

    def __call__(self, tokens_T: Tensor, lengths: Sequence[int], temperature: float, wanted_T: Tensor) -> Scores: ...


class Learner:
    def __init__(
        self,
        settings: TrainerSettings,
        scorer: Scorer,
        reference: Scorer | None,
        optimizer: MasterAdamW,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._now = settings
        """Of the step under way."""
        self._scorer = scorer
        self._reference = reference
        self._optimizer = optimizer
        self._device = device

    def updates(self, step: int, shares: Sequence[Share], lr: float) -> Iterator[UpdateReport]:
        """Do one update after another. What must be of the step's beginning is taken before the first."""
        self._now = self._settings.at(step)
        self._optimizer.tune(weight_decay=self._now.weight_decay, grad_clip=self._now.grad_clip)
        parts = [[self._micro_batch(part) for part in share.parts] for share in shares]
        proximal: list[list[Tensor | None]] = [[None] * len(own) for own in parts]
        if self._now.updates_per_step > 1:
            with torch.no_grad():
                proximal = [[self._score(self._scorer, part)[0] for part in own] for own in parts]
        for share, own, anchors in zip(shares, parts, proximal, strict=True):
            yield self._update(share, own, anchors, lr)

    def _micro_batch(self, members: Sequence[Sample]) -> MicroBatch:
        return micro_batch(members or [COMPANY], self._now.temperatures).to(self._device)

    def _update(self, share: Share, parts: list[MicroBatch], proximal: list[Tensor | None], lr: float) -> UpdateReport:
        """One optimizer update over the micro-batches' accumulated gradients."""
        reports: list[LossReport] = []
        for members, part, proximal_N in zip(share.parts, parts, proximal, strict=True):
            loss, report = self._loss(part, proximal_N, share.totals)
            torch.autograd.backward(loss if members else 0 * loss)
            if members:
                reports.append(report)
        norm = self._optimizer.clip()
        # A step that overflowed is skipped, not repeated: the same batch would overflow again after a restart.
        finite = math.isfinite(norm)
        if finite:
            self._optimizer.update(lr)
        else:
            self._optimizer.zero()
        return UpdateReport(loss=add_reports(reports), grad_norm=norm, skipped=not finite)

    def _loss(self, part: MicroBatch, proximal_N: Tensor | None, totals: Totals) -> tuple[Tensor, LossReport]:
        current_N, entropy_N = self._score(self._scorer, part)
        reference_N = None
        if self._reference is not None:
            with torch.no_grad():
                reference_N = self._score(self._reference, part)[0]
        inputs = LossInputs(
            current_N=current_N,
            proximal_N=current_N.detach() if proximal_N is None else proximal_N,
            behaviour_N=part.behaviour_N,
            advantages_N=part.advantages_N,
            sequence_N=part.sequence_N,
            num_sequences=len(part.lengths),
            entropy_N=entropy_N if self._now.loss.entropy_coef else entropy_N.detach(),
            reference_N=reference_N,
        )
        return policy_loss(self._now.loss, inputs, totals)

    def _score(self, scorer: Scorer, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropy_N) of the sampled tokens."""
        wanted_T = torch.zeros_like(part.tokens_T, dtype=torch.bool)
        wanted_T[part.positions_N] = True
        scores = scorer(part.tokens_T, part.lengths, part.temperature, wanted_T)
        return scores.logprobs_T[part.positions_N], scores.entropy_T[part.positions_N]

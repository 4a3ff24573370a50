"""One device's work in a train step: forward, loss, backward, update.

Invariant: it knows nothing of other ranks. Where the network is sharded, the scorer and the optimizer talk to the other
ranks by themselves; all that is asked here is that every rank makes the same calls, which its shares see to.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rollart.model.network import Scores
from rollart.model.packed import ALIGNED_TOKENS
from rollart.train.losses import LossInputs, LossReport, Totals, add_reports, policy_loss
from rollart.train.optimizer import MasterAdamW
from rollart.train.packing import MicroBatch, micro_batch
from rollart.train.settings import TrainerSettings, temperatures
from rollart.train.step import NOT_FINITE, Failed, RankWork, UpdateReport
from rollart.types import Sample, TrajectoryId

PADDING_SAMPLE = Sample(
    trajectory=TrajectoryId("", 0, 0),
    domain="",
    tokens=np.zeros(2, dtype=np.int32),
    mask=np.array([False, True]),
    logprobs=np.zeros(2, dtype=np.float32),
    versions=np.array([-1, 0], dtype=np.int32),
    advantages=np.zeros(2, dtype=np.float32),
)
"""Stands in for an empty micro-batch: the smallest that uses every weight."""

ALIKE_TOKENS, OWN_TOKENS = 64, 64
"""Of each sequence that layers are compiled with: what it may have in common with the others, and what not."""
SMALL = 8
"""The last micro-batch of a step is shorter than the others. From some length on (9,102 tokens of 576 values, with
torch 2.11 on a GPU) a layer's code is another."""

OF_DATA = (AssertionError, ValueError, IndexError, ArithmeticError)
"""Raised while a micro-batch is computed, these say that it cannot be. Any other error is the trainer's own."""
NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""What torch says of it where it raises no error of its own kind for it: on a CPU, and where CUDA or one of its
libraries asked for the memory, not torch."""


def _drawn(number: int, alike: bool) -> Sample:
    """A sequence for `Updater.warm_up`, of token ids that every vocabulary has."""
    tokens = np.random.default_rng(number).integers(0, 2, ALIKE_TOKENS + OWN_TOKENS).astype(np.int32)
    if alike:
        tokens[:ALIKE_TOKENS] = 0
    mask = np.arange(len(tokens)) == len(tokens) - 1
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return Sample(
        trajectory=TrajectoryId("", number, 0),
        domain="",
        tokens=tokens,
        mask=mask,
        logprobs=zeros,
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=zeros,
    )


class PackedScorer(Protocol):
    """A network, as a function of packed tokens: see `rollart.model.network.packed_scores`."""

    def __call__(self, tokens_T: Tensor, lengths: Sequence[int], temperature: float, wanted_T: Tensor) -> Scores: ...


class Updater:
    def __init__(
        self,
        settings: TrainerSettings,
        scorer: PackedScorer,
        reference: PackedScorer | None,
        optimizer: MasterAdamW,
        device: torch.device,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._now = settings.job
        """Of the step under way."""
        self.scorer = scorer
        self._reference = reference
        self.optimizer = optimizer
        self._device = device
        self._before_update = before_update
        """Called before the weights change."""
        self._proximal: dict[tuple[TrajectoryId, bytes, bytes], Tensor] = {}
        """By sample: how it is cut may change on the way. Empty where a step is one update."""

    def updates(self, step: int, shares: Sequence[RankWork], lr: float, *, begin: bool) -> Iterator[UpdateReport]:
        """Do one update after another, up to the first that is not made. `begin`: the weights are those that the step
        began with, and what must be of then is taken now."""
        self._now = self._settings.at(step)
        self.optimizer.tune(self._now.train)
        if begin:
            self._proximal.clear()
            if self._now.train.updates_per_step > 1 and (failed := self._anchor(shares)):
                yield _not_made(failed)
                return
        for share in shares:
            report = self._update(share, lr)
            yield report
            if report.skipped:
                return

    def warm_up(self) -> None:
        """Compute micro-batches like those of a step, and make no update: so the layers are compiled before the first
        step is waited for. Code is compiled by itself for sequences that have their beginning in common, and for large
        and for small micro-batches."""
        largest = self._now.train.microbatch_tokens
        for tokens, alike in itertools.product((largest, largest // SMALL), (True, False)):
            blocks = tokens // ALIGNED_TOKENS
            # An odd number: what is as long as the network is wide the first time, is taken to be so always.
            rows = ALIGNED_TOKENS * max(1, blocks - (blocks + 1) % 2)
            count = (rows - ALIKE_TOKENS) // OWN_TOKENS if alike else rows // (ALIKE_TOKENS + OWN_TOKENS)
            if not self._tried([_drawn(number, alike) for number in range(count)]):
                self._free()
        self.optimizer.zero()

    def _tried(self, members: Sequence[Sample]) -> bool:
        """Whether these could be computed. Nothing of them is held afterwards but gradients."""
        try:
            part = self.micro_batch(members)
            if self._now.train.updates_per_step > 1:  # as `_anchor` does: code without gradients is another
                with torch.no_grad():
                    self._score(self.scorer, part)
            loss, _ = self._loss(part, Totals(tokens=len(members), sequences=len(members)))
            torch.autograd.backward(loss)
        except Exception:  # a step that fails so says why, and knows what to do
            return False
        return True

    def _anchor(self, shares: Sequence[RankWork]) -> tuple[Failed, ...]:
        """The log-probabilities of all samples under the weights of now: the proximal policy of each update."""
        for update, share in enumerate(shares):
            for place, members in enumerate(share.parts):
                try:
                    part = self.micro_batch(members)
                    with torch.no_grad():
                        found_N = self._score(self.scorer, part)[0]
                except Exception as error:
                    failed = _failed(update, place, error)
                else:
                    sizes = [int(sample.mask.sum()) for sample in part.samples]
                    for sample, own_N in zip(part.samples, torch.split(found_N, sizes), strict=True):
                        self._proximal[_key(sample)] = own_N
                    continue
                self._free()
                return (failed,)
        return ()

    def micro_batch(self, members: Sequence[Sample]) -> MicroBatch:
        return micro_batch(members or [PADDING_SAMPLE], temperatures(self._now)).to(self._device)

    def _update(self, share: RankWork, lr: float) -> UpdateReport:
        """One optimizer update over the micro-batches' accumulated gradients."""
        reports: list[LossReport] = []
        losses: list[Tensor | float] = []
        for place, members in enumerate(share.parts):
            try:
                loss, report = self._loss(self.micro_batch(members), share.totals)
                torch.autograd.backward(loss if members else 0 * loss)
            except Exception as error:
                failed = _failed(0, place, error)
            else:
                losses.append(report.shares["actor/loss"])
                if members:
                    reports.append(report)
                continue
            self._free()
            return _not_made((failed,))
        norm = self.optimizer.clip()
        if math.isfinite(norm):
            self._before_update()
            self.optimizer.update(lr)
            return UpdateReport(loss=add_reports(reports), grad_norm=norm, skipped=False)
        # Skipped, not repeated as it is: the same gradient would overflow again after a restart.
        self.optimizer.zero()
        wrong = [place for place, loss in enumerate(losses) if not math.isfinite(float(loss))]
        failures = tuple(Failed(0, place, NOT_FINITE) for place in wrong)
        return UpdateReport(loss=add_reports(reports), grad_norm=norm, skipped=True, failed=failures)

    def _free(self) -> None:
        """After a micro-batch that was not computed to its end."""
        self.optimizer.zero()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _loss(self, part: MicroBatch, totals: Totals) -> tuple[Tensor, LossReport]:
        current_N, entropy_N = self._score(self.scorer, part)
        anchors = [self._proximal[key] for sample in part.samples if (key := _key(sample)) in self._proximal]
        # None where the step is one update, or for `PADDING_SAMPLE`, whose loss does not count.
        proximal_N = torch.cat(anchors) if anchors else current_N.detach()
        reference_N = None
        if self._reference is not None:
            with torch.no_grad():
                reference_N = self._score(self._reference, part)[0]
        inputs = LossInputs(
            current_N=current_N,
            proximal_N=proximal_N,
            behaviour_N=part.behaviour_N,
            advantages_N=part.advantages_N,
            sequence_N=part.sequence_N,
            num_sequences=len(part.lengths),
            entropy_N=entropy_N if self._now.train.entropy_coef else entropy_N.detach(),
            reference_N=reference_N,
        )
        loss, report = policy_loss(self._now.train, inputs, totals)
        # Clamps let no gradient through where a value is not a number, so that it could pass unseen. A loss that is not
        # finite makes the gradient so, on all ranks: then none of them makes the update. Otherwise this adds 0.
        unseen = torch.where(torch.isfinite(loss.detach()), 0.0, math.nan)
        return loss + unseen * current_N.sum(), report

    def _score(self, scorer: PackedScorer, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropy_N) of the sampled tokens."""
        scores = scorer(part.tokens_T, part.lengths, part.temperature, part.wanted_T)
        return scores.logprobs_T[part.positions_N], scores.entropy_T[part.positions_N]


def _key(sample: Sample) -> tuple[TrajectoryId, bytes, bytes]:
    """Of one prefix of one trajectory."""
    return sample.trajectory, sample.tokens.tobytes(), sample.mask.tobytes()


def _failed(update: int, part: int, error: Exception) -> Failed:
    """Whether it is the data's fault. Raises the error again where the trainer itself is at fault, or lost."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY):
        return Failed(update, part, f"out of memory: {text}", memory=True, raised=True)
    if isinstance(error, OF_DATA):
        return Failed(update, part, text, raised=True)
    raise error


def _not_made(failed: tuple[Failed, ...]) -> UpdateReport:
    nothing = LossReport(shares={}, maxima={})
    return UpdateReport(loss=nothing, grad_norm=math.nan, skipped=True, failed=failed)

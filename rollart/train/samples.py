"""From scored trajectories to flat samples. Called where they are trained on: in the trainer's process.

Invariant: concatenating a trajectory's turns gives, per prefix, exactly the token sequence the engine saw, and the
mask is true exactly on sampled tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollart.types import Batch, Group, Sample, Trajectory, TrajectoryId, Turn


def filled(batch: Batch, *, skip_zero_variance: bool = False, failed: dict[TrajectoryId, str] | None = None) -> Batch:
    """The batch with its samples; of groups that teach nothing none, where so asked. A trajectory that makes no
    samples raises, or is noted in `failed`, with the reason, where that is given."""
    groups = [group for group in batch.groups if any(group.advantages) or not skip_zero_variance]
    return replace(batch, samples=tuple(sample for group in groups for sample in flatten(group, failed)))


def flatten(group: Group, failed: dict[TrajectoryId, str] | None = None) -> list[Sample]:
    """The samples of a group: one per prefix of each member."""
    samples: list[Sample] = []
    for trajectory, advantage in zip(group.members, group.advantages, strict=True):
        try:
            samples.extend(_prefixes(trajectory, advantage))
        except (AssertionError, ValueError, TypeError) as error:
            if failed is None:
                raise
            failed[trajectory.id] = str(error)
    return samples


def _prefixes(trajectory: Trajectory, advantage: float) -> list[Sample]:
    runs: list[list[Turn]] = []
    for turn in trajectory.turns:
        if turn.fresh or not runs:
            runs.append([])
        runs[-1].append(turn)
    return [_sample(trajectory, turns, advantage) for turns in runs]


def _sample(trajectory: Trajectory, turns: Sequence[Turn], advantage: float) -> Sample:
    length = sum(len(turn.context) + len(turn.completion.tokens) for turn in turns)
    tokens = np.zeros(length, dtype=np.int32)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    at = 0
    for turn in turns:
        completion = turn.completion
        tokens[at : at + len(turn.context)] = turn.context
        at += len(turn.context)
        end = at + len(completion.tokens)
        tokens[at:end] = completion.tokens
        mask[at:end] = True
        logprobs[at:end] = completion.logprobs
        for span in completion.spans:
            versions[at : at + span.length] = span.version
            at += span.length
        assert at == end, f"{trajectory.id}: spans do not cover the completion"
    return Sample(
        trajectory=trajectory.id,
        domain=trajectory.task.domain,
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        advantages=np.where(mask, np.float32(advantage), np.float32(0.0)),
    )

"""Data that cannot be trained on is set aside, with the reason, in a file; the step goes on with the rest."""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from rollart.errors import StoreFull
from rollart.model.network import Scores
from rollart.store.journal import FileJournal
from rollart.train.aside import Aside
from rollart.train.settings import TrainerSettings
from rollart.train.single import SingleTrainer
from rollart.types import (
    Batch,
    Completion,
    Finish,
    Group,
    Sample,
    Span,
    Status,
    StepResult,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)
from tests.train.samples import VOCAB, make_batch, make_sample, random_samples, tiny_model
from tests.train.settings import changed, elsewhere, trainer_settings

PROMPT, BAD = 7, 13
"""`BAD` is a token that the tests' networks stumble over."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(model_path: Path, tmp_path: Path) -> TrainerSettings:
    return trainer_settings(model_path, tmp_path, lr=1e-2, microbatch_tokens=64)


def without_bad(count: int, seed: int = 0) -> list[Sample]:
    """None of these has the token `BAD`."""
    return [
        replace(sample, tokens=np.where(sample.tokens == BAD, 1, sample.tokens).astype(np.int32))
        for sample in random_samples(seed, count)
    ]


def bad_one(name: str = "bad", size: int = 5) -> Sample:
    return make_sample(name, [1, *[BAD] * (size - 1)], [0, *[1] * (size - 1)])


def rows(settings: TrainerSettings) -> list[dict[str, Any]]:
    path = settings.set_aside_path
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def names(result: StepResult) -> list[str]:
    return [str(one.trajectory) for one in result.set_aside]


def assert_same_weights(one: SingleTrainer, other: SingleTrainer, within: float = 0.0) -> None:
    for name, tensor in one.named_tensors().items():
        torch.testing.assert_close(tensor, other.named_tensors()[name], atol=within, rtol=0)


class Stumbles:
    """The trainer's own network, which does something about micro-batches that hold `BAD`, or are too long."""

    def __init__(
        self,
        trainer: SingleTrainer,
        *,
        raises: Exception | None = None,
        most_tokens: int = 1 << 30,
        only_in_updates: bool = False,
    ) -> None:
        self._scorer = trainer.updater.scorer
        self._raises = raises
        self._most_tokens = most_tokens
        self._only_in_updates = only_in_updates
        self.sizes: list[int] = []
        trainer.updater.scorer = self

    def __call__(self, tokens_T: Tensor, lengths: Sequence[int], temperature: float, wanted_T: Tensor) -> Scores:
        self.sizes.append(len(tokens_T))
        if len(tokens_T) > self._most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        scores = self._scorer(tokens_T, lengths, temperature, wanted_T)
        if (tokens_T == BAD).any() and (torch.is_grad_enabled() or not self._only_in_updates):
            if self._raises is not None:
                raise self._raises
            spoilt_T = torch.where(tokens_T == BAD, torch.nan, 0.0)
            return Scores(scores.logprobs_T + spoilt_T, scores.entropy_T)
        return scores


def trajectory(name: str, *, logprobs: list[float], spans: tuple[Span, ...] = (Span(0, 2),)) -> Trajectory:
    completion = Completion(
        tokens=np.array([3, 4], dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        spans=spans,
        finish=Finish.STOP,
        engine="e0",
    )
    turn = Turn(context=np.array([PROMPT], dtype=np.int32), fresh=True, completion=completion)
    group, member, attempt = name.split(".")
    return Trajectory(
        id=TrajectoryId(group, int(member), int(attempt)),
        task=Task(id="a/0", domain="a", index=0),
        turns=(turn,),
        status=Status.DONE,
        born=0,
        oldest=0,
        reward=1.0,
    )


def test_a_log_probability_that_is_no_number_sets_its_trajectory_aside_and_the_rest_is_trained_on(
    settings: TrainerSettings,
) -> None:
    """As a journal holds it: groups of trajectories, one of them with what a server's null became."""
    good = [trajectory("g0.0.0", logprobs=[-1.0, -2.0]), trajectory("g0.2.0", logprobs=[-1.0, -2.5])]
    bad = trajectory("g0.1.0", logprobs=[-1.0, float("nan")])

    def batch(*members: Trajectory) -> Batch:
        advantages = tuple(0.5 if member.id.member else -1.0 for member in members)
        group = Group(id="g0", task=members[0].task, members=members, born=0, advantages=advantages)
        return Batch(step=0, serving=0, groups=(group,))

    trainer, expected = SingleTrainer(settings), SingleTrainer(settings)
    journal = FileJournal(settings.out / "journal")
    journal.write_batch(batch(good[0], bad, good[1]))
    [replayed] = journal.batches(0)
    result = trainer.train_step(replayed)
    expected.train_step(batch(*good))
    assert names(result) == ["g0.1.0"]
    assert "logprobs has a value that is not finite" in result.set_aside[0].reason
    assert_same_weights(trainer, expected)
    [row] = rows(settings)
    assert (row["step"], row["trajectory"], row["task"]) == (0, "g0.1.0", "a/0")
    assert row["turns"][0]["tokens"] == [3, 4]
    assert row["turns"][0]["logprobs"] == [-1.0, None]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (make_sample("bad", [1, VOCAB], [0, 1]), "the model knows 0 to"),
        (make_sample("bad", [1, 2], [1, 1]), "its first token is marked as sampled"),
        (make_sample("bad", [1, 2], [0, 1], logprobs=[-1.0, -np.inf]), "logprobs has a value that is not finite"),
        (
            replace(make_sample("bad", [1, 2], [0, 1]), advantages=np.array([0, np.inf], np.float32)),
            "advantages has a value that is not finite",
        ),
    ],
)
def test_what_no_model_could_be_trained_on_is_set_aside(settings: TrainerSettings, bad: Sample, reason: str) -> None:
    trainer, expected = SingleTrainer(settings), SingleTrainer(settings)
    samples = random_samples(0, 6)
    result = trainer.train_step(make_batch(0, [*samples, bad]))
    expected.train_step(make_batch(0, samples))
    assert names(result) == ["bad.0.0"]
    assert reason in result.set_aside[0].reason
    assert_same_weights(trainer, expected)


def test_spans_that_do_not_cover_their_tokens_are_set_aside(settings: TrainerSettings) -> None:
    """An assertion of our own, about one trajectory."""
    wrong = trajectory("g0.0.0", logprobs=[-1.0, -1.0], spans=(Span(0, 1),))
    group = Group(id="g0", task=wrong.task, members=(wrong,), born=0, advantages=(1.0,))
    result = SingleTrainer(settings).train_step(Batch(step=0, serving=0, groups=(group,)))
    assert result.version == 1
    assert names(result) == ["g0.0.0"]
    assert "spans do not cover the completion" in result.set_aside[0].reason


@pytest.mark.parametrize("raises", [None, AssertionError("a shape"), IndexError("index out of range in self")])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_sample_that_a_micro_batch_fails_for_is_found(
    settings: TrainerSettings, raises: Exception | None, updates: int
) -> None:
    """Whether its loss is not finite or it raises: no other sample of the micro-batch is lost with it."""
    settings = changed(settings, microbatch_tokens=1000, updates_per_step=updates)
    trainer, expected = SingleTrainer(settings), SingleTrainer(elsewhere(settings))
    Stumbles(trainer, raises=raises)
    samples = without_bad(12)
    result = trainer.train_step(make_batch(0, [*samples, bad_one("bad1"), bad_one("bad2", size=9)]))
    metrics = expected.train_step(make_batch(0, samples)).metrics
    assert sorted(names(result)) == ["bad1.0.0", "bad2.0.0"]
    assert result.metrics["perf/tokens"] == metrics["perf/tokens"]
    assert result.metrics["actor/skipped_updates"] == 0
    if updates == 1:
        assert_same_weights(trainer, expected)
    else:  # which of them share an update has changed
        assert all(np.isfinite(value) for value in result.metrics.values())


def test_a_step_of_which_nothing_is_left_makes_its_version_with_the_weights_as_they_were(
    settings: TrainerSettings,
) -> None:
    trainer = SingleTrainer(settings)
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors().items()}
    Stumbles(trainer)
    result = trainer.train_step(make_batch(0, [bad_one("bad1"), bad_one("bad2")]))
    assert result.version == 1
    assert names(result) == ["bad1.0.0", "bad2.0.0"]
    assert result.metrics["perf/tokens"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_tensors().items())


def test_out_of_memory_halves_the_micro_batches_from_then_on_and_loses_nothing(settings: TrainerSettings) -> None:
    settings = changed(settings, microbatch_tokens=200)
    trainer, expected = SingleTrainer(settings), SingleTrainer(elsewhere(settings))
    network = Stumbles(trainer, most_tokens=60)
    samples = without_bad(24)
    result, wanted = (one.train_step(make_batch(0, samples)) for one in (trainer, expected))
    assert result.set_aside == ()
    assert result.metrics["perf/tokens"] == wanted.metrics["perf/tokens"]
    assert_same_weights(trainer, expected, within=1e-4)
    [row] = [row for row in rows(settings) if row["microbatch_tokens"] <= 60]
    assert "CUDA out of memory" in row["reason"]
    network.sizes.clear()
    trainer.train_step(make_batch(1, samples))
    assert max(network.sizes) <= 60, "the next step does not run into it again"


def test_a_job_that_asks_for_other_micro_batches_gets_them(settings: TrainerSettings) -> None:
    """Resumed with another `train.microbatch_tokens`, say on a larger GPU; the step that was cut stays cut."""
    settings = changed(settings, microbatch_tokens=200)
    trainer = SingleTrainer(settings)
    Stumbles(trainer, most_tokens=60)
    samples = without_bad(24)
    steps = [trainer.train_step(make_batch(step, samples)).metrics["perf/microbatches"] for step in range(2)]
    for asked, changes in ((200, False), (400, True)):
        again = SingleTrainer(changed(settings, microbatch_tokens=asked))
        found = [again.train_step(make_batch(step, samples)).metrics["perf/microbatches"] for step in range(2)]
        assert found[0] == steps[0]
        assert (found[1] < steps[1]) == changes


def test_a_sample_that_is_alone_too_long_for_memory_is_set_aside(settings: TrainerSettings) -> None:
    settings = changed(settings, microbatch_tokens=200)
    trainer, expected = SingleTrainer(settings), SingleTrainer(elsewhere(settings))
    Stumbles(trainer, most_tokens=25)
    samples = without_bad(8)
    long = make_sample("long", [1] * 30, [0] + [1] * 29)
    result = trainer.train_step(make_batch(0, [*samples, long]))
    expected.train_step(make_batch(0, samples))
    assert names(result) == ["long.0.0"]
    assert "out of memory" in result.set_aside[0].reason
    assert "30 tokens" in result.set_aside[0].reason
    assert_same_weights(trainer, expected, within=1e-4)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_want_of_memory_is_known_by_its_other_words_too(settings: TrainerSettings, error: Exception) -> None:
    trainer = SingleTrainer(settings)
    Stumbles(trainer, raises=error)
    result = trainer.train_step(make_batch(0, [*without_bad(6), bad_one()]))
    assert names(result) == ["bad.0.0"]
    assert "out of memory" in result.set_aside[0].reason


def test_gradients_of_a_backward_pass_that_did_not_end_do_not_stay(settings: TrainerSettings) -> None:
    """Memory runs out between one layer's backward pass and the next."""
    settings = changed(settings, microbatch_tokens=1000)
    trainer, expected = SingleTrainer(settings), SingleTrainer(elsewhere(settings))
    first = next(iter(trainer.network.parameters()))
    left = iter([True])

    def out_of_memory(gradient: Tensor) -> None:
        if next(left, False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    first.register_hook(out_of_memory)  # type: ignore[no-untyped-call]
    samples = without_bad(8)
    for one in (trainer, expected):
        one.train_step(make_batch(0, samples))
    assert_same_weights(trainer, expected, within=1e-4)
    assert rows(settings), "it did run out"


def test_an_error_that_is_not_the_datas_is_the_trainers(settings: TrainerSettings) -> None:
    trainer = SingleTrainer(settings)
    Stumbles(trainer, raises=RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side"):
        trainer.train_step(make_batch(0, [bad_one()]))
    assert rows(settings) == []


def test_a_step_that_is_repeated_sets_the_same_aside_whatever_memory_there_is(settings: TrainerSettings) -> None:
    settings = changed(settings, microbatch_tokens=200)
    batch = make_batch(0, [*without_bad(8), make_sample("long", [1] * 30, [0] + [1] * 29)])
    first = SingleTrainer(settings)
    Stumbles(first, most_tokens=25)
    result = first.train_step(batch)
    written = rows(settings)
    again = SingleTrainer(settings)
    repeated = again.train_step(batch)
    assert repeated.set_aside == result.set_aside
    assert_same_weights(again, first)
    assert rows(settings) == written, "nothing is written twice"


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++"])
def test_updates_before_the_one_that_set_a_sample_aside_are_repeated_as_they_were(
    settings: TrainerSettings, algorithm: Literal["grpo", "reinforce++"]
) -> None:
    """The sample had its place in the deal, and in the advantages of the batch, when the first update was made."""
    settings = changed(settings, updates_per_step=2, algorithm=algorithm)
    longest = make_sample("long", [1] * 24, [0] + [1] * 23)
    batch = make_batch(0, [*without_bad(12), longest, bad_one(size=22)])  # the second longest: in the second update
    whole_tokens = SingleTrainer(elsewhere(settings)).train_step(batch).metrics["perf/tokens"]
    trainers: list[SingleTrainer] = []
    for _ in range(2):
        trainers.append(SingleTrainer(settings))
        Stumbles(trainers[-1], only_in_updates=True)
        result = trainers[-1].train_step(batch)
        assert names(result) == ["bad.0.0"]
        assert result.metrics["actor/updates"] == 2
        assert result.metrics["perf/tokens"] == whole_tokens - 22, "no other is lost"
        assert [row["update"] for row in rows(settings)] == [1]
    first, again = trainers
    assert_same_weights(again, first)


def test_a_sample_that_fails_in_an_earlier_update_than_is_noted_is_noted_again(settings: TrainerSettings) -> None:
    aside = Aside(settings.set_aside_path)
    batch, sample = make_batch(0, []), bad_one()
    for update in (1, 2, 0, 1):
        aside.put(batch, {sample.trajectory: f"in update {update}"}, update)
    assert [row["update"] for row in rows(settings)] == [1, 0]
    for known in (aside, Aside(settings.set_aside_path)):
        assert known.left_out(0, 0) == {"bad.0.0"}
        assert known.reasons(0) == {"bad.0.0": "in update 0"}


def test_a_row_that_was_cut_short_by_a_kill_never_was(settings: TrainerSettings) -> None:
    path = settings.set_aside_path
    path.write_text('{"step": 0, "trajectory": "g0000.0.0", "reason": "x"}\n{"step": 0, "trajec')
    trainer = SingleTrainer(settings)
    result = trainer.train_step(make_batch(0, [*random_samples(0, 3), make_sample("bad", [1, VOCAB], [0, 1])]))
    assert sorted(names(result)) == ["bad.0.0", "g0000.0.0"]
    assert [row["trajectory"] for row in rows(settings)] == ["g0000.0.0", "bad.0.0"]


def test_a_disk_without_room_for_it_is_no_loss_of_the_trainer(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for (`StoreFull`), and the step then sets the same aside."""
    batch = make_batch(0, [*random_samples(0, 3), make_sample("bad", [1, VOCAB], [0, 1])])
    trainer = SingleTrainer(settings)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rollart.train.aside.os.fsync", full)
    with pytest.raises(StoreFull):
        trainer.train_step(batch)
    assert rows(settings) == []
    monkeypatch.undo()
    assert names(trainer.train_step(batch)) == ["bad.0.0"]
    assert len(rows(settings)) == 1


def test_what_was_set_aside_crosses_to_the_coordinator(settings: TrainerSettings) -> None:
    from rollart.workers.wire import pack, unpack

    result = SingleTrainer(settings).train_step(make_batch(0, [make_sample("bad", [1, VOCAB], [0, 1])]))
    assert unpack(pack(result)) == result

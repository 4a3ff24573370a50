"""The sharded trainer gives what the single-device one gives, with one rank and with two; and it fails whole.

Ranks are real processes that talk over gloo. They take seconds to start, so the fast tests share two of them.
"""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from rollart.config.settings import LimitSettings, WeightSettings
from rollart.errors import BoundaryError, ClusterError, JobError, StartAgain, StoreFull, TrainerError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.worker import build
from rollart.model import network as model
from rollart.model import scoring
from rollart.ports import Trainer
from rollart.store.shm import ShmStore
from rollart.train import fsdp2
from rollart.train.aside import Aside
from rollart.train.checkpoints import optimizer_files
from rollart.train.fsdp2 import ShardedTrainer
from rollart.train.losses import LossReport
from rollart.train.packing import MicroBatch, order
from rollart.train.ranks import AsyncRank, RankedTrainer
from rollart.train.settings import TrainerSettings
from rollart.train.single import SingleTrainer
from rollart.train.step import Failed, Step, UpdateReport
from rollart.train.updater import Updater
from rollart.types import Batch, Sample, StepResult, WeightManifest
from rollart.workers.handles import as_raised
from rollart.workers.setup import RankSetup, StoreSetup, WorkerSetup
from rollart.workers.wire import pack, unpack
from rollart_recipes.tiny import make_tiny
from tests.contracts.trainer import TrainerBench, TrainerContract
from tests.small_disk import small_disk
from tests.train.samples import VOCAB, make_batch, make_sample, random_samples, tiny_model
from tests.train.settings import changed, elsewhere, trainer_settings

T = TypeVar("T")
PLAIN = {"algorithm": "grpo", "kl_coef": 0.0, "entropy_coef": 0.0}
LOSS = {"algorithm": "reinforce++", "kl_coef": 0.1, "entropy_coef": 0.1}


def settings_in(folder: Path, **changes: Any) -> TrainerSettings:
    """Several micro-batches in each of two updates, clipping, decay, a reference: all that ranks must agree on."""
    path = folder / "model"
    if not path.exists():
        tiny_model(path, tied=True)
    own = {
        "engines": "vllm",  # the probe is asked for
        # A large eps keeps Adam nearly linear in the gradient, so that a wrong scale or a stray token shows.
        "adam_eps": 1e-2,
        "lr": 0.1,
        "weight_decay": 0.01,
        "grad_clip": 0.1,
        "updates_per_step": 2,
        "microbatch_tokens": 48,
    }
    return trainer_settings(path, folder, **(own | LOSS | changes))


def batches(count: int, first: int = 0) -> list[Batch]:
    """Odd numbers of samples: one rank has a micro-batch less than the other."""
    return [make_batch(step, random_samples(step, 13)) for step in range(first, first + count)]


class Bench:
    """A ranked trainer as its worker process builds it, and what it published."""

    def __init__(self, trainer: RankedTrainer, store: ShmStore) -> None:
        self.trainer = trainer
        self.store = store

    async def weights(self, version: int) -> dict[str, Tensor]:
        manifest = await self.trainer.publish(version)
        assert manifest.version == version
        return {name: tensor.clone() for name, tensor in self.store.fetch(manifest).items()}


@asynccontextmanager
async def ranked(settings: TrainerSettings, world_size: int, folder: Path) -> AsyncIterator[Bench]:
    run_id = f"test-fsdp2-{os.getpid()}-{time.monotonic_ns()}"
    own = changed(settings, type="fsdp2", gpus=world_size)
    where = StoreSetup(weights=WeightSettings(bucket_mb=1), run_id=run_id, model=str(own.model_path))
    store = ShmStore(run_id)
    trainer = await build(WorkerSetup(job=own.job, out=folder, store=where))
    try:
        yield Bench(trainer, store)
    finally:
        await trainer.close()
        store.close()


class Here:
    """A rank in this process: a world of one needs no other."""

    pid = os.getpid()

    def __init__(self, rank: AsyncRank) -> None:
        self.behind = rank

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        return await getattr(self.behind, method)(*unpack(pack(list(arguments))))

    async def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@asynccontextmanager
async def alone(settings: TrainerSettings, folder: Path) -> AsyncIterator[Bench]:
    """One rank, in this process."""
    store = ShmStore(f"test-fsdp2-{os.getpid()}-{time.monotonic_ns()}", bucket_bytes=4096)
    at = RankSetup(rank=0, world_size=1, rendezvous=f"file://{folder}/meet-{time.monotonic_ns()}")
    trainer = RankedTrainer(settings, [Here(AsyncRank(ShardedTrainer(settings, at), store))])
    try:
        yield Bench(trainer, store)
    finally:
        await trainer.close()
        store.close()


def actor(result: StepResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if name.startswith("actor/")}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, atol=within, rtol=0)


class Shared:
    """One loop and two ranks for all the fast tests; each begins with the initial weights."""

    def __init__(self, folder: Path) -> None:
        self.settings = settings_in(folder)
        self.folder = folder
        self._loop = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._bench: Bench | None = None

    def play(self, work: Callable[[Bench], Awaitable[T]]) -> T:
        async def fresh() -> T:
            if self._bench is None or self._bench.trainer.lost:
                self._bench = await self._stack.enter_async_context(ranked(self.settings, 2, self.folder))
            assert await self._bench.trainer.restore("") == 0
            return await work(self._bench)

        return self._loop.run(fresh())

    def close(self) -> None:
        self._loop.run(self._stack.aclose())
        self._loop.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    two = Shared(tmp_path_factory.mktemp("ranks"))
    yield two
    two.close()


async def compare_with_single(bench: Bench, settings: TrainerSettings) -> None:
    single = SingleTrainer(settings)
    for batch in batches(3):
        expected, found = single.train_step(batch), await bench.trainer.train_step(batch)
        assert found.version == expected.version
        assert actor(found) == pytest.approx(actor(expected), rel=1e-4, abs=1e-5)
        for name in ("perf/tokens", "perf/sampled_tokens"):
            assert found.metrics[name] == expected.metrics[name]
    assert found.metrics["actor/grad_norm"] > settings.job.train.grad_clip
    assert_same(await bench.weights(3), single.named_tensors(), within=1e-5)
    probe, expected_probe = (await bench.trainer.publish(3)).probe, single.versions.of(3)[1]
    assert probe is not None and expected_probe is not None  # noqa: PT018
    assert probe.tokens == expected_probe.tokens
    assert probe.logprobs == pytest.approx(expected_probe.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("rows", "recompute"), [(100_000, "none"), (5, "none"), (5, "full")], ids=["whole", "chunks", "recomputed"]
)
def test_one_rank_gives_what_one_device_gives(
    rows: int, recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the vocabulary projection is computed in chunks, and layers twice, with weights that come and go."""
    monkeypatch.setattr(scoring, "LOGITS_PER_CHUNK", rows * VOCAB)

    async def work() -> None:
        settings = settings_in(tmp_path, recompute=recompute)
        async with alone(settings, tmp_path) as bench:
            await compare_with_single(bench, changed(settings, recompute="none"))

    asyncio.run(work())


def test_a_start_and_a_restore_hold_no_whole_float32_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is sharded before it has weights; rank 0 reads them in the files' type; the old one goes first."""
    settings = settings_in(tmp_path, **PLAIN)
    auto: Any = AutoModelForCausalLM
    read, init = auto.from_pretrained, fsdp2.ShardedNetwork.__init__
    seen: list[Any] = []

    def reading(path: str, **options: Any) -> Any:
        assert alive() == 0, "the old shards and moments are still held"
        seen.append(options["dtype"])
        return read(path, **options)

    def sharding(own: fsdp2.ShardedNetwork, network: Any, *arguments: Any, **options: Any) -> None:
        seen.append({param.device.type for param in network.parameters()})
        init(own, network, *arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reading)
    monkeypatch.setattr(fsdp2.ShardedNetwork, "__init__", sharding)
    old: list[weakref.ref[Tensor]] = []

    def alive() -> int:
        return sum(one() is not None for one in old)

    at = RankSetup(rank=0, world_size=1, rendezvous=f"file://{tmp_path}/meet")
    trainer = ShardedTrainer(settings, at)
    try:
        step = Step(batches(1)[0], settings, Aside(settings.set_aside_path), vocab_size=VOCAB)
        trainer.train_step(0, step.shares(0), 0.1, True)
        trainer.end_step()
        reference = trainer.save()
        old += [weakref.ref(param) for param in trainer.sharded.parameters()]
        old += [weakref.ref(one) for name, one in trainer.optimizer.tensors().items() if name.startswith("exp_avg/")]
        assert old
        assert trainer.restore(reference) == 1
    finally:
        trainer.close()
    assert seen == [{"meta"}, torch.float32] * 2


@pytest.mark.parametrize(("saved", "said"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_weights_are_read_in_the_type_of_their_files(
    saved: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever config.json says: a coarser type would round them, a finer one takes more memory."""
    settings = settings_in(tmp_path, **PLAIN)
    path = settings.model_path
    auto: Any = AutoModelForCausalLM
    auto.from_pretrained(path, dtype=getattr(torch, saved)).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": said}))
    files = load_file(path / "model.safetensors")
    read, held = auto.from_pretrained, []

    def reading(*arguments: Any, **options: Any) -> Any:
        source = read(*arguments, **options)
        held.append(source.dtype)
        return source

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reading)
    trainer = ShardedTrainer(settings, RankSetup(rank=0, world_size=1, rendezvous=f"file://{tmp_path}/meet"))
    try:
        params: dict[str, Any] = dict(trainer.sharded.network.named_parameters())
        weights = {name: param.full_tensor() for name, param in params.items()}
        assert files.keys() == weights.keys()
        assert all(torch.equal(weights[name], tensor.float()) for name, tensor in files.items())
        assert held == [getattr(torch, saved)]
    finally:
        trainer.close()


def test_a_model_whose_layers_are_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    GPT2Config(vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    at = RankSetup(rank=0, world_size=1, rendezvous=f"file://{tmp_path}/meet")
    try:
        with pytest.raises(JobError, match=r"gpt2: its layers .* train.type=single"):
            ShardedTrainer(settings_in(tmp_path, **PLAIN), at)
    finally:
        dist.destroy_process_group()


def test_two_ranks_give_what_one_device_gives(shared: Shared) -> None:
    step = Step(batches(1)[0], shared.settings, Aside(shared.settings.set_aside_path), vocab_size=VOCAB, ranks=2)
    counts = [[len([part for part in share.parts if part]) for share in step.shares(rank)] for rank in range(2)]
    assert counts[0] != counts[1], "one rank should have to keep the other company"
    shared.play(lambda bench: compare_with_single(bench, shared.settings))


@pytest.mark.slow
def test_compiled_layers_give_what_plain_ones_do(tmp_path: Path) -> None:
    """They are compiled at the start, by all ranks together, which changes nothing."""
    settings = settings_in(tmp_path, microbatch_tokens=512)

    async def norms(how: str) -> list[float]:
        async with ranked(changed(settings, compile=how), 2, tmp_path) as bench:
            return [actor(await bench.trainer.train_step(batch))["actor/grad_norm"] for batch in batches(2)]

    assert asyncio.run(norms("on")) == pytest.approx(asyncio.run(norms("off")), rel=1e-5)


def test_a_version_is_published_beside_the_next_step_and_again_after_it(shared: Shared) -> None:
    async def work(bench: Bench) -> None:
        first, second, third = batches(3)
        await bench.trainer.train_step(first)
        before = await bench.weights(1)
        _, beside = await asyncio.gather(bench.trainer.train_step(second), bench.weights(1))
        assert_same(beside, before, within=0)
        after = await bench.weights(2)
        assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
        assert_same(await bench.weights(1), before, within=0)
        await bench.trainer.train_step(third)
        with pytest.raises(TrainerError, match=r"version 1 is not held.*held: \[2, 3\]"):
            await bench.trainer.publish(1)
        assert_same(await bench.weights(2), after, within=0)

    shared.play(work)


def test_a_full_disk_or_store_loses_no_rank(shared: Shared) -> None:
    """Rank 0 writes for all; the others must not be left waiting for it."""

    async def work(bench: Bench) -> None:
        checkpoints = shared.settings.checkpoint_dir
        for size in ("4k", "40k"):  # no room for a folder; for a part of it
            with small_disk(checkpoints, size), pytest.raises(StoreFull, match="No space left"):
                await bench.trainer.save()
        with small_disk(bench.store.directory, "8k"), pytest.raises(StoreFull, match="No space left"):
            await bench.trainer.publish(0)
        assert not bench.trainer.lost
        [batch] = batches(1)
        assert (await bench.trainer.train_step(batch)).version == 1
        assert await bench.trainer.save()
        assert await bench.weights(1)

    shared.play(work)


def test_a_refused_call_leaves_the_ranks_as_they_are(shared: Shared) -> None:
    async def work(bench: Bench) -> None:
        trainer: Trainer = bench.trainer
        with pytest.raises(TrainerError, match="step 7 is ahead"):
            await trainer.train_step(make_batch(7, []))
        with pytest.raises(TrainerError, match=r"checkpoint /nowhere: no trainer.json there; give"):
            await trainer.restore("/nowhere")
        before = await bench.weights(0)
        assert (await trainer.train_step(make_batch(0, []))).version == 1
        assert_same(await bench.weights(1), before, within=0)

    shared.play(work)


def test_two_ranks_set_aside_what_one_device_does(shared: Shared) -> None:
    async def work(bench: Bench) -> None:
        bad = [make_sample("bad", [1, VOCAB], [0, 1]), make_sample("worse", [1, 2], [0, 1], logprobs=[-1.0, -np.inf])]
        batch = make_batch(0, [*random_samples(0, 13), *bad])
        single = SingleTrainer(shared.settings)
        found, expected = await bench.trainer.train_step(batch), single.train_step(batch)
        assert [str(one.trajectory) for one in found.set_aside] == ["bad.0.0", "worse.0.0"]
        assert found.set_aside == expected.set_aside
        assert_same(await bench.weights(1), single.named_tensors(), within=1e-5)
        nothing = await bench.trainer.train_step(make_batch(1, bad))
        assert (nothing.version, len(nothing.set_aside)) == (2, 2)
        assert_same(await bench.weights(2), await bench.weights(1), within=0)

    shared.play(work)


@pytest.mark.slow
def test_ranks_agree_on_a_sample_whose_loss_only_one_of_them_sees(tmp_path: Path) -> None:
    """One rank's micro-batch is at fault: neither makes the update, both go on without the sample."""
    settings = settings_in(tmp_path, **PLAIN, correction="decoupled", updates_per_step=1, microbatch_tokens=200)
    good = random_samples(0, 13)
    overflows = make_sample("bad", [1, 2], [0, 1], advantage=3e38, logprobs=[0.0, -30.0])

    async def work() -> tuple[StepResult, dict[str, Tensor]]:
        async with ranked(settings, 2, tmp_path) as bench:
            result = await bench.trainer.train_step(make_batch(0, [*good, overflows]))
            return result, await bench.weights(1)

    result, weights = asyncio.run(work())
    assert [str(one.trajectory) for one in result.set_aside] == ["bad.0.0"]
    assert "not a finite number" in result.set_aside[0].reason
    assert result.metrics["actor/skipped_updates"] == 0
    single = SingleTrainer(elsewhere(settings))
    single.train_step(make_batch(0, good))
    assert_same(weights, single.named_tensors(), within=1e-5)


def test_ranks_that_run_out_of_memory_are_started_again_with_smaller_micro_batches(tmp_path: Path) -> None:
    """The rank that did cannot go on, nor can those that wait for it: what to do otherwise is noted for the next."""
    settings = settings_in(tmp_path, microbatch_tokens=200)
    batch = batches(1)[0]

    async def work() -> None:
        async with alone(settings, tmp_path) as bench:
            updater = bench.trainer.ranks[0].behind.core.updater  # type: ignore[attr-defined]
            scorer = updater.scorer

            def limited(tokens_T: Tensor, *rest: Any) -> Any:
                if len(tokens_T) > 60:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return scorer(tokens_T, *rest)

            updater.scorer = limited
            with pytest.raises(StartAgain, match=r"rank 0 could not be computed \(out of memory.*the next trainer"):
                await bench.trainer.train_step(batch)
            with pytest.raises(StartAgain, match=r"no ranks any more"):
                await bench.trainer.publish(0)
        async with alone(settings, tmp_path) as bench:
            result = await bench.trainer.train_step(batch)
            assert result.set_aside == ()
            whole = SingleTrainer(elsewhere(settings)).train_step(batch)
            assert result.metrics["perf/microbatches"] > whole.metrics["perf/microbatches"]
            assert result.metrics["perf/tokens"] == whole.metrics["perf/tokens"]

    asyncio.run(work())


async def started_until_trained(
    settings: TrainerSettings, folder: Path, batch: Batch, spoil: Callable[[Updater], None]
) -> tuple[StepResult, int]:
    """As control does it: another trainer for each that asks for it. Returns how many there were."""
    for life in range(1, 30):
        async with alone(settings, folder) as bench:
            spoil(bench.trainer.ranks[0].behind.core.updater)  # type: ignore[attr-defined]
            try:
                return await bench.trainer.train_step(batch), life
            except StartAgain:
                pass
    raise AssertionError("no trainer gets through the step")


def test_ranks_find_the_sample_that_a_micro_batch_of_many_fails_for(tmp_path: Path) -> None:
    """Each trainer that is lost with it leaves the next one smaller micro-batches, in this step alone."""
    settings = settings_in(tmp_path, microbatch_tokens=1000)
    samples = random_samples(0, 8)
    bad = samples[3].trajectory

    def spoil(updater: Updater) -> None:
        lay_out = updater.micro_batch

        def stumble(members: Sequence[Sample]) -> MicroBatch:
            if any(sample.trajectory == bad for sample in members):
                raise ValueError("a shape that cannot be")
            return lay_out(members)

        updater.micro_batch = stumble  # type: ignore[method-assign]

    result, _ = asyncio.run(started_until_trained(settings, tmp_path, make_batch(0, samples), spoil))
    assert [(str(one.trajectory), one.reason) for one in result.set_aside] == [
        (str(bad), "ValueError: a shape that cannot be")
    ]
    assert result.metrics["perf/tokens"] == sum(len(order([one])[0].tokens) for one in samples if one.trajectory != bad)
    assert Aside(settings.set_aside_path).microbatch_tokens(1, 1000) == 1000


def test_ranks_ask_to_be_started_again_for_each_sample_that_is_too_long_for_memory(tmp_path: Path) -> None:
    """More often than a trainer may be lost: control does not count these."""
    settings = settings_in(tmp_path, microbatch_tokens=64)
    long = [make_sample(f"long{number}", [1] * 32, [0] + [1] * 31) for number in range(7)]

    def spoil(updater: Updater) -> None:
        scorer = updater.scorer

        def limited(tokens_T: Tensor, *rest: Any) -> Any:
            if len(tokens_T) > 25:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return scorer(tokens_T, *rest)

        updater.scorer = limited  # type: ignore[assignment]

    batch = make_batch(0, [*random_samples(0, 8), *long])
    result, lives = asyncio.run(started_until_trained(settings, tmp_path, batch, spoil))
    assert [str(one.trajectory) for one in result.set_aside] == [f"long{number}.0.0" for number in range(7)]
    assert lives > LimitSettings().trainer_restarts + 1


class Waiting:
    """A rank that is in a collective call, and will be until the other makes it too, or it is stopped."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers
        self._stop = asyncio.Event()
        self.given_up: list[str] = []
        """Calls that nobody waits for any more."""

    @property
    def pid(self) -> int | None:
        return None if self.stopped else 1

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        if method not in self._answers:
            try:
                await self._stop.wait()
            except asyncio.CancelledError:
                self.given_up.append(method)
                raise
            raise error("its process has ended")
        return self._answers[method]

    async def stop(self) -> None:
        self._stop.set()


@pytest.mark.parametrize("memory", [True, False])
def test_a_rank_that_could_not_compute_its_part_ends_those_that_wait_for_it(tmp_path: Path, memory: bool) -> None:
    settings = settings_in(tmp_path, microbatch_tokens=200)
    nothing = LossReport(shares={}, maxima={})
    failed = [
        UpdateReport(loss=nothing, grad_norm=0.0, skipped=True, failed=(Failed(0, 0, "it broke", memory, raised=True),))
    ]
    batch = make_batch(0, [make_sample("one", [1, 2], [0, 1]), make_sample("two", [1, 2, 3], [0, 1, 1])])

    async def work() -> None:
        ranks = [Waiting({"vocab_size": VOCAB, "train_step": failed}), Waiting({"vocab_size": VOCAB})]
        trainer = RankedTrainer(settings, ranks)
        push = asyncio.create_task(trainer.publish(0))
        await asyncio.sleep(0)
        with pytest.raises(StartAgain, match="it broke"):
            await trainer.train_step(batch)
        assert all(rank.stopped for rank in ranks)
        with pytest.raises(StartAgain, match="it broke"):
            await push

    asyncio.run(asyncio.wait_for(work(), 30))
    step = Step(batch, settings, Aside(settings.set_aside_path), vocab_size=VOCAB, ranks=2)
    left = [sample for rank in range(2) for share in step.shares(rank) for part in share.parts for sample in part]
    assert len(left) == 1, "the one sample of that rank's micro-batch is not tried a second time"


def test_a_call_that_is_given_up_is_given_up_on_every_rank(tmp_path: Path) -> None:
    async def work() -> None:
        ranks = [Waiting({}), Waiting({})]
        push = asyncio.create_task(RankedTrainer(settings_in(tmp_path), ranks).publish(0))
        await asyncio.sleep(0.01)
        push.cancel()
        await asyncio.wait([push])
        await asyncio.sleep(0.01)
        assert [rank.given_up for rank in ranks] == [["publish"], ["publish"]]

    asyncio.run(asyncio.wait_for(work(), 30))


def test_what_a_trainer_noted_is_no_loss_on_the_other_side_of_its_process_either() -> None:
    for kind in (StartAgain, TrainerError):
        assert type(as_raised("trainer", kind.__name__, "it broke", TrainerError)) is kind


def test_ranks_end_where_there_is_no_room_to_note_what_one_of_them_could_not_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is tried again when there is room: not with ranks of which some still wait for the first try."""
    settings = settings_in(tmp_path)
    nothing = LossReport(shares={}, maxima={})
    broke = Failed(0, 0, "it broke", raised=True)
    failed = [UpdateReport(loss=nothing, grad_norm=0.0, skipped=True, failed=(broke,))]

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rollart.train.aside.os.fsync", full)

    async def work() -> None:
        ranks = [Waiting({"vocab_size": VOCAB, "train_step": failed}), Waiting({"vocab_size": VOCAB})]
        with pytest.raises(StoreFull):
            await RankedTrainer(settings, ranks).train_step(batches(1)[0])
        assert all(rank.stopped for rank in ranks)

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_checkpoint_continues_with_two_ranks_with_one_and_on_one_device(shared: Shared) -> None:
    async def work(bench: Bench) -> None:
        for batch in batches(2):
            await bench.trainer.train_step(batch)
        reference = await bench.trainer.save()
        rest = [actor(await bench.trainer.train_step(batch)) for batch in batches(2, first=2)]
        expected = await bench.weights(4)
        assert await bench.trainer.restore(reference) == 2
        again = [actor(await bench.trainer.train_step(batch)) for batch in batches(2, first=2)]
        assert again == rest
        assert_same(await bench.weights(4), expected, within=0)
        single = SingleTrainer(shared.settings)
        assert single.restore(reference) == 2
        for batch in batches(2, first=2):
            single.train_step(batch)
        assert_same(single.named_tensors(), expected, within=1e-5)
        async with alone(shared.settings, shared.folder) as other:
            assert await other.trainer.restore(reference) == 2
            for batch in batches(2, first=2):
                await other.trainer.train_step(batch)
            assert_same(await other.weights(4), expected, within=1e-6)
        saved = Path(reference) / "model"
        loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
        single.restore(reference)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in single.named_tensors().items())
        assert (saved / "tokenizer.json").read_text() == "{}"

    shared.play(work)


def test_a_checkpoint_of_one_device_continues_with_two_ranks(shared: Shared) -> None:
    async def work(bench: Bench) -> None:
        single = SingleTrainer(shared.settings)
        for batch in batches(2):
            single.train_step(batch)
        assert await bench.trainer.restore(single.save()) == 2
        single.train_step(batches(1, first=2)[0])
        await bench.trainer.train_step(batches(1, first=2)[0])
        assert_same(await bench.weights(3), single.named_tensors(), within=1e-5)

    shared.play(work)


def test_bf16_keeps_float32_masters(tmp_path: Path) -> None:
    """Updates far below bfloat16's resolution add up; what is published is bfloat16, as the single trainer's."""

    async def work() -> None:
        settings = settings_in(tmp_path, bf16=True, lr=1e-5, adam_eps=1e-8, weight_decay=0.0, updates_per_step=1)
        single = SingleTrainer(settings)
        async with alone(settings, tmp_path) as bench:
            for batch in batches(3):
                expected, found = single.train_step(batch), await bench.trainer.train_step(batch)
                assert found.metrics["actor/loss"] == pytest.approx(expected.metrics["actor/loss"], abs=2e-3)
                assert found.metrics["actor/grad_norm"] == pytest.approx(expected.metrics["actor/grad_norm"], rel=0.05)
            assert_same(await bench.weights(3), single.named_tensors(), within=4e-3)
            reference = await bench.trainer.save()
            masters = load_file(optimizer_files(Path(reference))[0])
            moved = masters["master/model.norm.weight"] - 1
            assert moved.dtype == torch.float32
            assert float(moved.abs().max()) == pytest.approx(3e-5, rel=0.1)
            assert (
                load_file(Path(reference) / "model" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
            )
            before = await bench.trainer.train_step(batches(1, first=3)[0])
            assert await bench.trainer.restore(reference) == 3
            assert actor(await bench.trainer.train_step(batches(1, first=3)[0])) == actor(before)
            single.restore(reference)
            assert torch.equal(single.optimizer.tensors()["master/model.norm.weight"] - 1, moved)

    asyncio.run(work())


def test_what_a_bf16_trainer_says_of_the_probe_is_not_rounded(tmp_path: Path) -> None:
    """But said of the weights that it publishes, which are. A step of 0.005 is seen behind none of its own noise."""

    async def work() -> None:
        settings = settings_in(tmp_path, bf16=True)
        single = SingleTrainer(settings)
        plain: Any = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=torch.float32)
        async with alone(settings, tmp_path) as bench:
            for version in range(2):
                copy, probe = single.versions.of(version)
                weights = copy.whole()
                manifest = await bench.trainer.publish(version)
                ours = bench.store.fetch(manifest)
                for published, found in ((weights, probe), (ours, manifest.probe)):
                    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
                    plain.load_state_dict(published, strict=False)
                    assert found is not None
                    assert found.logprobs == pytest.approx(model.probe(model.adopt(plain)).logprobs, abs=1e-4)
                single.train_step(batches(1, first=version)[0])
                await bench.trainer.train_step(batches(1, first=version)[0])

    asyncio.run(work())


def test_a_mixture_of_experts_is_saved_under_its_usual_names_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp2, "FILE_BYTES", 1)

    async def work() -> None:
        path = tmp_path / "model"
        config = Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_experts=4,
            num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=64,
        )  # fmt: skip
        auto: Any = AutoModelForCausalLM
        auto.from_config(config).save_pretrained(path)
        settings = settings_in(tmp_path)
        async with alone(settings, tmp_path) as bench:
            await compare_with_single(bench, settings)
            reference = await bench.trainer.save()
            single = SingleTrainer(settings)
            assert single.restore(reference) == 3
            assert_same(single.named_tensors(), await bench.weights(3), within=0)
        files = sorted(file.name for file in (Path(reference) / "model").glob("*.safetensors"))
        assert len(files) >= 4
        assert len(optimizer_files(Path(reference))) >= 4
        index = json.loads((Path(reference) / "model" / "model.safetensors.index.json").read_text())
        original = sorted(load_file(path / "model.safetensors"))
        assert sorted(index["weight_map"]) == original
        assert sorted(set(index["weight_map"].values())) == files

    asyncio.run(work())


def test_a_rank_that_dies_in_a_step_ends_them_all_at_once(shared: Shared) -> None:
    async def work(bench: Bench) -> None:
        pids = [rank.pid for rank in bench.trainer.ranks]
        assert None not in pids
        os.kill(pids[1] or 0, signal.SIGSTOP)  # so that the other waits for it in the middle of the step
        step = asyncio.create_task(bench.trainer.train_step(batches(1)[0]))
        await asyncio.sleep(1)
        assert not step.done()
        os.kill(pids[1] or 0, signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"rank-1: its process was ended by signal 9"):
            await asyncio.wait_for(step, 10)
        assert [rank.pid for rank in bench.trainer.ranks] == [None, None]
        for call in (bench.trainer.publish(0), bench.trainer.save(), bench.trainer.restore("")):
            with pytest.raises(TrainerError, match=r"no ranks any more \(rank-1.*start it again"):
                await call

    shared.play(work)


@pytest.mark.slow
def test_a_rank_that_cannot_start_is_named_and_the_others_end(tmp_path: Path) -> None:
    async def work() -> None:
        settings = trainer_settings(tmp_path / "nothing", tmp_path)
        with pytest.raises(ClusterError, match=r"rank-\d could not start: .*nothing"):
            async with ranked(settings, 2, tmp_path):
                pass

    asyncio.run(work())


@pytest.mark.slow
def test_three_ranks_continue_what_two_began(tmp_path: Path) -> None:
    """Three do not divide any of the model's dimensions: shards are uneven."""

    async def work() -> None:
        settings = settings_in(tmp_path)
        async with ranked(settings, 2, tmp_path) as bench:
            for batch in batches(2):
                await bench.trainer.train_step(batch)
            reference = await bench.trainer.save()
            rest = [await bench.trainer.train_step(batch) for batch in batches(2, first=2)]
            expected = await bench.weights(4)
        async with ranked(settings, 3, tmp_path) as bench:
            assert await bench.trainer.restore(reference) == 2
            for batch, before in zip(batches(2, first=2), rest, strict=True):
                assert actor(await bench.trainer.train_step(batch)) == pytest.approx(actor(before), rel=1e-4, abs=1e-6)
            assert_same(await bench.weights(4), expected, within=1e-6)

    asyncio.run(work())


class TestShardedTrainer(TrainerContract):
    def play(self, work: Callable[[TrainerBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                async with AsyncExitStack() as stack:
                    opened = AsyncExitStack()
                    await stack.enter_async_context(opened)
                    settings = settings_in(folder)

                    stores: list[ShmStore] = []

                    async def another() -> Trainer:
                        await opened.aclose()
                        bench = await opened.enter_async_context(alone(settings, folder))
                        stores.append(bench.store)
                        return bench.trainer

                    def complete(manifest: WeightManifest) -> bool:
                        return stores[-1].fetch(manifest).keys() == SingleTrainer(settings).named_tensors().keys()

                    def batch(step: int) -> Batch:
                        return batches(1, first=step)[0]

                    await work(TrainerBench(trainer=await another(), another=another, batch=batch, complete=complete))

        asyncio.run(awaited())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_real_job_goes_on_when_a_rank_is_killed(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", warmup_steps=20)
    job = {
        "name": "sharded",
        "model": {"path": str(tmp_path / "tiny"), "context_tokens": 256},
        "tasks": [
            {"name": "lake", "use": "rollart.tasks.frozen_lake", "group_size": 4, "max_turns": 4, "max_tokens": 4}
        ],
        "rollout": {"groups_per_step": 4, "zero_variance": "skip"},
        "pools": [
            {"name": "cpu", "engines": {"type": "embedded", "count": 1, "kv_tokens": 16384}},
            {"name": "environments", "slots": 32, "isolation": "inline"},
        ],
        "train": {"type": "fsdp2", "gpus": 2, "pool": "cpu", "steps": 5, "lr": 1e-4},
        "weights": {"bucket_mb": 1},
        "checkpoint": {"every": 2},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "rollart.cli", "train", str(tmp_path / "job.yaml"), "--out", str(out), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        patience = time.monotonic() + 400
        while not (out / "checkpoints" / "step-00000002").exists():
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < patience
            time.sleep(0.02)
        [ranks] = [own for worker in children(run.pid) if len(own := children(worker)) == 2]
        os.kill(ranks[1], signal.SIGKILL)
        said, _ = run.communicate(timeout=400)
    assert run.returncode == 0, said
    events = list(read_events(out / "events.jsonl"))
    [down] = [event for event in events if isinstance(event, schema.TrainerDown)]
    assert "rank-1: its process was ended by signal 9" in down.reason
    assert [event.version for event in events if isinstance(event, schema.StepEnd)] == [1, 2, 3, 4, 5]
    assert (out / "checkpoints" / "step-00000005" / "model" / "config.json").exists()
    assert not Path(f"/proc/{ranks[0]}").exists()

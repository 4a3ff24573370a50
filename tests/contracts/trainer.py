"""What every Trainer, every Journal and every Cluster must do: one suite each, run against each adapter."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from rollart.errors import BoundaryError
from rollart.ports import Cluster, Journal, Trainer
from rollart.types import Batch, BreakerState, Checkpoint, EngineSpec, MixState, OpenGroup, Task, WeightManifest


@dataclass
class TrainerBench:
    trainer: Trainer
    """Fresh, with the initial weights."""
    another: Callable[[], Awaitable[Trainer]]
    """One more, started after the first was lost."""
    batch: Callable[[int], Batch]
    """For step n, always the same."""
    complete: Callable[[WeightManifest], bool]
    """All buckets of it are in the store."""


class TrainerContract(ABC):
    @abstractmethod
    def play(self, work: Callable[[TrainerBench], Awaitable[None]]) -> None: ...

    def test_each_step_mints_the_next_version(self) -> None:
        async def work(bench: TrainerBench) -> None:
            for step in range(3):
                assert (await bench.trainer.train_step(bench.batch(step))).version == step + 1

        self.play(work)

    def test_the_current_and_the_previous_version_can_be_published_completely(self) -> None:
        async def work(bench: TrainerBench) -> None:
            await bench.trainer.train_step(bench.batch(0))
            await bench.trainer.train_step(bench.batch(1))
            for version in (2, 1, 2):
                manifest = await bench.trainer.publish(version)
                assert manifest.version == version
                assert manifest.buckets
                assert manifest.num_bytes > 0
                assert bench.complete(manifest)

        self.play(work)

    def test_a_version_can_be_published_while_the_next_step_is_under_way(self) -> None:
        async def work(bench: TrainerBench) -> None:
            await bench.trainer.train_step(bench.batch(0))
            result, manifest = await asyncio.gather(bench.trainer.train_step(bench.batch(1)), bench.trainer.publish(1))
            assert (result.version, manifest.version) == (2, 1)
            assert bench.complete(manifest)

        self.play(work)

    def test_a_saved_state_is_restored_in_another_trainer_which_goes_on_from_there(self) -> None:
        async def work(bench: TrainerBench) -> None:
            await bench.trainer.train_step(bench.batch(0))
            await bench.trainer.train_step(bench.batch(1))
            reference = await bench.trainer.save()
            await bench.trainer.train_step(bench.batch(2))
            another = await bench.another()
            assert await another.restore(reference) == 2
            assert (await another.train_step(bench.batch(2))).version == 3
            assert (await another.publish(3)).version == 3

        self.play(work)

    def test_no_reference_means_the_initial_state(self) -> None:
        async def work(bench: TrainerBench) -> None:
            await bench.trainer.train_step(bench.batch(0))
            assert await bench.trainer.restore("") == 0
            assert (await bench.trainer.train_step(bench.batch(0))).version == 1

        self.play(work)


def empty_batch(step: int) -> Batch:
    return Batch(step=step, serving=step, groups=(), samples=())


def checkpoint(step: int) -> Checkpoint:
    task = Task(id="a/7", domain="a", index=7, payload={"question": "2 + 3"})
    return Checkpoint(
        step=step,
        trainer=f"ref-{step}",
        breakers={"a": BreakerState(2, True, 1)},
        mix={"a": MixState(cursor=8, returned=(3,), consumed=4, skip=())},
        ready=(),
        open=(OpenGroup(id="g7", task=task),),
        next_group=9,
        incarnation=2,
    )


class JournalContract(ABC):
    @abstractmethod
    def journal(self) -> Journal:
        """An empty one."""

    def reopened(self, journal: Journal) -> Journal:
        """The same, as the next coordinator finds it."""
        return journal

    def test_an_empty_journal_has_nothing(self) -> None:
        journal = self.journal()
        assert journal.latest() is None
        assert list(journal.batches(0)) == []

    def test_batches_come_back_in_order_from_the_step_asked_for(self) -> None:
        journal = self.journal()
        for step in (0, 1, 2, 3):
            journal.write_batch(empty_batch(step))
        journal = self.reopened(journal)
        assert [batch.step for batch in journal.batches(0)] == [0, 1, 2, 3]
        assert [batch.step for batch in journal.batches(2)] == [2, 3]

    def test_a_batch_written_again_replaces_the_first(self) -> None:
        journal = self.journal()
        journal.write_batch(empty_batch(0))
        journal.write_batch(Batch(step=0, serving=5, groups=(), samples=()))
        assert [batch.serving for batch in self.reopened(journal).batches(0)] == [5]

    def test_a_checkpoint_replaces_the_last_and_covers_the_batches_before_it(self) -> None:
        journal = self.journal()
        for step in range(4):
            journal.write_batch(empty_batch(step))
        journal.commit(checkpoint(1))
        journal.commit(checkpoint(3))
        journal = self.reopened(journal)
        assert journal.latest() == checkpoint(3)
        assert [batch.step for batch in journal.batches(0)] == [3]
        journal.write_batch(empty_batch(4))
        assert [batch.step for batch in self.reopened(journal).batches(3)] == [3, 4]


@dataclass
class ClusterBench:
    cluster: Cluster
    spec: EngineSpec
    generates: Callable[["object"], Awaitable[int]]
    """Asks an engine something; the version that answered."""


class ClusterContract(ABC):
    @abstractmethod
    def play(self, work: Callable[[ClusterBench], Awaitable[None]]) -> None: ...

    def test_an_engine_starts_and_starts_again_with_the_initial_weights(self) -> None:
        async def work(bench: ClusterBench) -> None:
            for _ in range(2):
                assert await bench.generates(await bench.cluster.engine(bench.spec)) == 0

        self.play(work)

    def test_a_trainer_starts_and_starts_again_with_the_initial_weights(self) -> None:
        async def work(bench: ClusterBench) -> None:
            for _ in range(2):
                trainer = await bench.cluster.trainer()
                assert (await trainer.train_step(empty_batch(0))).version == 1

        self.play(work)

    def test_closing_stops_all_workers_and_may_be_done_twice(self) -> None:
        async def work(bench: ClusterBench) -> None:
            engine = await bench.cluster.engine(bench.spec)
            trainer = await bench.cluster.trainer()
            await bench.cluster.close()
            with pytest.raises(BoundaryError):
                await bench.generates(engine)
            with pytest.raises(BoundaryError):
                await trainer.save()
            await bench.cluster.close()

        self.play(work)

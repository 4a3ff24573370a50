"""The contracts of trainer, journal and cluster, on the simulated ones, on one device, and on files."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollart.config.sim import SimEngineSettings, SimTaskSettings, SimTrainSettings
from rollart.errors import WeightError
from rollart.events.log import EventLog
from rollart.hardware import HARDWARE, MODELS
from rollart.ports import Journal, Trainer
from rollart.sim.dice import Dice
from rollart.sim.engine import EngineWorld, SimEngine
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink, SimStore
from rollart.sim.trainer import SimCluster, SimJournal
from rollart.store.journal import FileJournal
from rollart.store.shm import ShmStore
from rollart.train.single import AsyncTrainer, SingleTrainer
from rollart.types import Batch, WeightManifest
from tests.contracts.trainer import (
    ClusterBench,
    ClusterContract,
    JournalContract,
    TrainerBench,
    TrainerContract,
    empty_batch,
)
from tests.sim.engines import SPEC, ask, now, run
from tests.train.samples import make_batch, random_samples, tiny_model
from tests.train.settings import trainer_settings


def sim_cluster() -> tuple[SimCluster, SimStore]:
    log = EventLog(now)
    store = SimStore(log)
    world = EngineWorld(
        model=MODELS["qwen3-8b"],
        hardware={"pool": HARDWARE["h20"]},
        settings=SimEngineSettings(),
        disaggregated={},
        max_batch={"pool": 8},
        tasks={"a": SimTaskSettings()},
        dice=Dice(0),
        store=store,
        pull=SimLink(1e9),
        blocking=False,
        log=log,
        faults=Faults((), log),
    )
    return SimCluster(world, SimTrainSettings(), HARDWARE["h800"], 8, 1e9, SimLink(1e9), Faults((), log), {}), store


class TestSimTrainer(TrainerContract):
    def play(self, work: Callable[[TrainerBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            cluster, store = sim_cluster()

            async def another() -> Trainer:
                return await cluster.trainer()

            def complete(manifest: WeightManifest) -> bool:
                try:
                    return set(store.read(manifest)) == {manifest.version}
                except WeightError:
                    return False

            await work(
                TrainerBench(trainer=await cluster.trainer(), another=another, batch=empty_batch, complete=complete)
            )

        run(awaited)


class TestSimJournal(JournalContract):
    def journal(self) -> Journal:
        return SimJournal()


class TestSimCluster(ClusterContract):
    def play(self, work: Callable[[ClusterBench], Awaitable[None]]) -> None:
        async def generates(engine: object) -> int:
            assert isinstance(engine, SimEngine)
            return (await engine.generate(ask("x"))).spans[0].version

        async def awaited() -> None:
            await work(ClusterBench(cluster=sim_cluster()[0], spec=SPEC, generates=generates))

        run(awaited)


class TestAsyncTrainer(TrainerContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def play(self, work: Callable[[TrainerBench], Awaitable[None]]) -> None:
        settings = trainer_settings(tiny_model(self.folder / "model"), self.folder, lr=1e-2)
        store = ShmStore(f"test-{uuid.uuid4().hex}", bucket_bytes=1 << 12)

        def batch(step: int) -> Batch:
            return make_batch(step, random_samples(step, 8))

        def complete(manifest: WeightManifest) -> bool:
            try:
                return bool(store.fetch(manifest))
            except WeightError:
                return False

        async def another() -> Trainer:
            return AsyncTrainer(SingleTrainer(settings), store)

        async def main() -> None:
            async with asyncio.timeout(60):
                await work(TrainerBench(trainer=await another(), another=another, batch=batch, complete=complete))

        try:
            asyncio.run(main())
        finally:
            store.close()


class TestFileJournal(JournalContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "journal"

    def journal(self) -> Journal:
        return FileJournal(self.folder)

    def reopened(self, journal: Journal) -> Journal:
        return FileJournal(self.folder)

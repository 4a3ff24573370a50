"""The contracts of trainer, journal and cluster, on the simulated ones."""

from collections.abc import Awaitable, Callable

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
from rollart.types import WeightManifest
from tests.contracts.trainer import (
    ClusterBench,
    ClusterContract,
    JournalContract,
    TrainerBench,
    TrainerContract,
    empty_batch,
)
from tests.sim.engines import SPEC, ask, now, run


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

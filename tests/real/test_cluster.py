"""The contracts of cluster, engine and trainer on real processes; and what only processes can do: die."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file

from rollart.cluster.inline import InlineCluster
from rollart.cluster.local import LocalCluster
from rollart.config.load import build_job
from rollart.errors import ClusterError, EngineError, WeightError
from rollart.launch.worker import START, build, start
from rollart.ports import Trainer
from rollart.types import Batch, Needs, WeightManifest, WeightVersion
from rollart.workers.launch import Process
from tests.contracts.engine import EngineBench, EngineContract
from tests.contracts.trainer import ClusterBench, ClusterContract, TrainerBench, TrainerContract
from tests.real.processes import MAX_BATCH, SPEC, local_cluster, small_setup
from tests.setups import JOB, worker_setup
from tests.train.samples import make_batch, random_samples


def batch(step: int) -> Batch:
    return make_batch(step, random_samples(step, 8))


class Given:
    @pytest.fixture(autouse=True)
    def _given(self, model: Path, tmp_path: Path) -> None:
        self.model, self.folder = model, tmp_path


@pytest.mark.slow
class TestLocalEngine(Given, EngineContract):
    engines: ClassVar[dict[str, Any]] = {}

    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None:
        async def main() -> None:
            async with local_cluster(self.model, self.folder, **self.engines) as (cluster, store):
                weights = load_file(self.model / "model.safetensors")

                async def put(version: WeightVersion) -> WeightManifest:
                    return store.push(version, weights)

                async def lose(manifest: WeightManifest) -> None:
                    (store.directory / manifest.buckets[0].name).unlink()

                engine = await cluster.engine(SPEC)
                await work(
                    EngineBench(
                        engine=engine,
                        max_batch=MAX_BATCH,
                        domain="a",
                        put=put,
                        lose=lose,
                        too_long=1024,
                        long_answer=512,
                    )
                )

        asyncio.run(main())


@pytest.mark.slow
class TestLocalPair(TestLocalEngine):
    """Two processes: one prefills, one decodes."""

    engines: ClassVar[dict[str, Any]] = {"prefill": {}}


@pytest.mark.slow
class TestLocalTrainer(Given, TrainerContract):
    def play(self, work: Callable[[TrainerBench], Awaitable[None]]) -> None:
        async def main() -> None:
            async with local_cluster(self.model, self.folder) as (cluster, store):

                async def another() -> Trainer:
                    return await cluster.trainer()

                def complete(manifest: WeightManifest) -> bool:
                    try:
                        return bool(store.fetch(manifest))
                    except WeightError:
                        return False

                await work(
                    TrainerBench(trainer=await cluster.trainer(), another=another, batch=batch, complete=complete)
                )

        asyncio.run(main())


async def generates(engine: Any) -> int:
    bench = EngineBench(engine, 1, "a", put=_put, lose=_lose, too_long=0)
    return (await engine.generate(bench.ask("x"))).spans[0].version


class TestInlineCluster(Given, ClusterContract):
    def play(self, work: Callable[[ClusterBench], Awaitable[None]]) -> None:
        async def main() -> None:
            cluster = InlineCluster(build, small_setup(self.model, self.folder))
            try:
                await work(ClusterBench(cluster=cluster, spec=SPEC, generates=generates))
            finally:
                await cluster.close()

        asyncio.run(main())


@pytest.mark.slow
class TestLocalCluster(Given, ClusterContract):
    def play(self, work: Callable[[ClusterBench], Awaitable[None]]) -> None:
        async def main() -> None:
            async with local_cluster(self.model, self.folder) as (cluster, _):
                await work(ClusterBench(cluster=cluster, spec=SPEC, generates=generates))

        asyncio.run(main())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestRayCluster(Given, ClusterContract):
    """On an embedded cluster of one node."""

    def play(self, work: Callable[[ClusterBench], Awaitable[None]]) -> None:
        pytest.importorskip("ray")
        from rollart.cluster.ray import RayCluster

        async def main() -> None:
            setup = small_setup(self.model, self.folder)
            needs = Needs(resource="", cpus=1.0)
            cluster = RayCluster(
                start, setup, engine_needs={SPEC.pool: needs}, trainer_needs=needs, room=[needs, needs]
            )
            try:
                async with asyncio.timeout(600):
                    await work(ClusterBench(cluster=cluster, spec=SPEC, generates=generates))
            finally:
                await cluster.close()

        asyncio.run(main())


async def _put(version: WeightVersion) -> WeightManifest:
    raise AssertionError("not asked for here")


async def _lose(manifest: WeightManifest) -> None:
    raise AssertionError("not asked for here")


@pytest.mark.slow
def test_the_death_of_an_idle_engine_is_told_at_once_and_one_that_was_stopped_is_not(
    model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        async with local_cluster(model, tmp_path, lambda *words: told.put_nowait(words)) as (cluster, _):
            engine = await cluster.engine(SPEC)
            await cluster.engine(SPEC)  # the first one is stopped for it
            pid = cluster.workers["cpu-0"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            name, how = await told.get()
            assert name == "cpu-0"
            assert "signal 9" in how
            with pytest.raises(EngineError, match="its process was killed"):
                await engine.stage(1)
        assert told.empty()

    asyncio.run(main())


def test_a_worker_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        nowhere = build_job({**JOB, "model": {"path": str(tmp_path / "nowhere")}})
        cluster = LocalCluster(START, worker_setup(nowhere, tmp_path))
        try:
            with pytest.raises(ClusterError, match=r"cpu-0 could not start: .*nowhere"):
                await cluster.engine(SPEC)
        finally:
            await cluster.close()

    asyncio.run(main())


def test_a_worker_that_dies_while_it_starts_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho these are my last words >&2\nexit 7\n")
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))
        worker = Process("w", START, tmp_path, os.environ)
        said = r"w could not start: its process exited with status 7; see .*w\.log\n.* my last words"
        with pytest.raises(ClusterError, match=said):
            await worker.start("")
        await worker.stop()
        await worker.stop()

    asyncio.run(main())


def variables_of(process: Process) -> list[bytes]:
    return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")


def test_a_worker_sees_no_gpus_but_those_it_was_given(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = LocalCluster("benchmarks.stub:start", worker_setup(None, tmp_path), devices={"cpu-0": ("2", "3")})
        try:
            for _ in range(2):  # and again after a restart
                await cluster.engine(SPEC)
                assert b"CUDA_VISIBLE_DEVICES=2,3" in variables_of(cluster.workers["cpu-0"])
            await cluster.engine(replace(SPEC, id="cpu-1"))
            others = variables_of(cluster.workers["cpu-1"])
            assert [value for value in others if value.startswith(b"CUDA_VISIBLE_DEVICES")] == []
        finally:
            await cluster.close()

    asyncio.run(main())

"""The shard contract: simulated, over the wire's codec, in a process of this machine, as an actor of Ray."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.control.world import Sharding
from rollart.errors import BoundaryError
from rollart.events.log import EventLog
from rollart.launch.simulation import simulated_world
from rollart.ports import Shard
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink
from rollart.sim.shards import SimShard
from rollart.sim.trainer import SimJournal
from rollart.workers.handles import ShardService, WorkerShard
from rollart.workers.wire import pack, unpack
from tests.contracts.shard import MEMBERS, ShardBench, ShardContract
from tests.sim.engines import run


def job(model: Path | None = None, **changes: Any) -> Job:
    return build_job(
        {
            "name": "shard-contract",
            "model": {"path": str(model or "models/tiny"), "context_tokens": 512},
            "tasks": [
                {
                    "name": "lake",
                    "use": "rollart.tasks.frozen_lake",
                    "group_size": MEMBERS,
                    "max_turns": 4,
                    "max_tokens": 4,
                }
            ],
            "rollout": {"zero_variance": "keep"},
            "pools": [
                {"name": "cpu", "engines": {"count": 2, "kv_tokens": 8192, "max_batch": 32}},
                {"name": "environments", "slots": 8, "isolation": "inline"},
            ],
            "rewards": {"workers": 2},
            "trajectories": {"keep": 0},
            "cluster": {"coordinators": 2},
            "weights": {"bucket_mb": 16},
            "sim": {"model": "qwen3-0.6b", "tasks": {"lake": {"turns": 3, "prompt_tokens": 30, "answer_tokens": 4}}},
            **changes,
        }
    )


class TestSimShard(ShardContract):
    def around(self, shard: SimShard) -> Shard:
        return shard

    def play(self, work: Callable[[ShardBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            log = EventLog(asyncio.get_running_loop().time)
            world = simulated_world(job(), log, Faults((), log), SimJournal(), SimLink(1e12), SimLink(1e12))
            assert isinstance(world.rollout, Sharding)
            shard = await world.rollout.start(1)
            assert isinstance(shard, SimShard)
            await work(
                ShardBench(
                    shard=self.around(shard),
                    engines=["cpu-1"],
                    task=world.task_sets["lake"].task(0),
                    pool="cpu",
                    kill=lambda: shard.die("killed"),
                )
            )
            await world.cluster.close()

        run(awaited)


class Codec:
    """A worker whose calls cross as bytes, as they do to another process."""

    def __init__(self, service: ShardService) -> None:
        self._service = service

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        return unpack(pack(await getattr(self._service, method)(*unpack(pack(arguments)))))


class TestShardOverTheCodec(TestSimShard):
    def around(self, shard: SimShard) -> Shard:
        async def close() -> None:
            shard.die("it was closed")

        return WorkerShard(Codec(ShardService(shard, close)))


@pytest.mark.slow
class TestShardOfAProcess(ShardContract):
    kind = "local"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

        self.folder, self.model = tmp_path, tmp_path / "model"
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(self.model)
        save(tiny_model(len(tokenizer)), self.model)

    def play(self, work: Callable[[ShardBench], Awaitable[None]]) -> None:
        from rollart.launch.real import real_world
        from rollart.store.journal import FileJournal
        from rollart.workers.setup import ShardSetup

        async def awaited() -> None:
            out = self.folder / "run"
            out.mkdir()
            settings = job(self.model, cluster={"type": self.kind, "coordinators": 2})
            journal = FileJournal(out / "journal")
            real = real_world(settings, out, journal, trains=False, shards=ShardSetup(trains=False))
            try:
                assert isinstance(real.world.rollout, Sharding)
                await work(
                    ShardBench(
                        shard=await real.world.rollout.start(1),
                        engines=["cpu-1"],
                        task=real.world.task_sets["lake"].task(0),
                        pool="cpu",
                        kill=lambda: kill(real.world.cluster),
                    )
                )
            finally:
                await real.close()

        asyncio.run(awaited())


def kill(cluster: Any) -> None:
    """kill -9 of its process, or the same of its actor."""
    worker = cluster.workers["shard-1"]
    (worker.kill if hasattr(worker, "kill") else worker.stop)()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestShardOnRay(TestShardOfAProcess):
    kind = "ray"

"""Each engine and the trainer in an OS process of its own on this machine. Handles have the call shape of the ports."""

import asyncio
import os
from collections.abc import Mapping, Sequence

from rollart.cluster.machine import VISIBLE
from rollart.cluster.mps import Mps, share_of
from rollart.types import EngineSpec
from rollart.workers.handles import WorkerEngine, WorkerShard, WorkerTrainer, close_shard
from rollart.workers.launch import Lost, Process
from rollart.workers.setup import WorkerSetup


class LocalCluster:
    """Starts workers as child processes. `target` builds each there, as `module:function`, from its set-up's JSON."""

    def __init__(
        self,
        target: str,
        setup: WorkerSetup,
        lost: Lost | None = None,
        devices: Mapping[str, Sequence[str]] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """`devices`: by worker, the only GPUs that it sees, as CUDA_VISIBLE_DEVICES names them; not there: all.
        `shares`: by worker, the share of its GPU that it may use at the same time as others."""
        self._target = target
        self.setup = setup
        self._lost = lost
        self._devices = devices or {}
        self._shares = shares or {}
        self._mps: Mps | None = None
        self.workers: dict[str, Process] = {}
        """By name: the engines' ids, and `trainer`."""

    async def engine(self, spec: EngineSpec) -> WorkerEngine:
        return WorkerEngine(await self._start(self.setup.engine(spec)))

    async def trainer(self) -> WorkerTrainer:
        return WorkerTrainer(await self._start(self.setup))

    async def shard(self, number: int) -> WorkerShard:
        return WorkerShard(await self._start(self.setup.as_shard(number)))

    async def close(self) -> None:
        shards = [worker for name, worker in self.workers.items() if name.startswith("shard-")]
        await asyncio.gather(*(close_shard(shard) for shard in shards))
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        if self._mps is not None:
            await asyncio.to_thread(self._mps.close)
            self._mps = None

    async def _start(self, setup: WorkerSetup) -> Process:
        before = self.workers.pop(setup.name, None)
        if before is not None:
            await before.stop()
        environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads)}
        if setup.name in self._devices:
            environment[VISIBLE] = ",".join(self._devices[setup.name])
        if setup.name in self._shares or (self._shares and setup.role == "shard"):
            environment |= self._daemon()
        if setup.name in self._shares:
            environment |= share_of(self._shares[setup.name])
        worker = Process(setup.name, self._target, setup.log_dir, environment, self._lost)
        self.workers[setup.name] = worker
        await worker.start(setup.model_dump_json())
        return worker

    def _daemon(self) -> dict[str, str]:
        """With which processes find the daemon that divides GPUs. There is one for the run: of the first coordinator,
        from which a shard has inherited these. Not in a thread: engines and the trainer start at the same time."""
        if self.setup.role == "shard":
            return {}
        self._mps = self._mps or Mps(self.setup.log_dir)
        return self._mps.variables

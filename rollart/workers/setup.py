"""What a worker is built from, wherever it runs: the job, and the few facts that are not in the job.

Crosses to the worker's process once, as JSON, and is checked again there. `rollart.launch.worker` builds from it.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from rollart.config.job import Job
from rollart.config.settings import PoolSettings, Settings, WeightSettings
from rollart.types import EngineSpec
from rollart.workers.carried import Carried, with_paths_here


class StoreSetup(Settings):
    """Where one life of a run has its weights. All its workers open the same store."""

    weights: WeightSettings
    """`path` is filled in."""
    run_id: str
    """No other life of any run has it, on any machine."""
    model: str
    """The Hugging Face directory that published weights look like."""
    token: str = Field(default="", repr=False)
    """What a store that listens asks for. Made for this life of the run; it is on no disk."""


class RankSetup(Settings):
    """Which rank of a trainer this is, and where it meets the others."""

    rank: int
    world_size: int
    rendezvous: str
    """`file:///PATH` for ranks of one machine (a new path each time), or `tcp://HOST:PORT`, where rank 0 listens."""
    device: str = "cpu"


class ShardSetup(Settings):
    """Which part of the rollout a shard has, and what it must know of the run."""

    number: int = 0
    life: int = 0
    """How often the run had been started before: its recorded trajectories say so."""
    began_at: float = 0.0
    """When the run began, by the wall's clock."""
    trains: bool = True
    """There is a trainer."""


class WorkerSetup(Settings):
    """One worker. That of a run's trainer, from which those of its other workers are derived."""

    job: Job
    out: Path
    """The run directory."""
    store: StoreSetup
    stop_tokens: tuple[int, ...] = ()
    """End an answer, beside those that the model's files name."""
    earlier: tuple[tuple[int, Job], ...] = ()
    """(n, the job that the steps before n are trained under), n rising."""
    role: Literal["engine", "trainer", "rank", "environments", "shard"] = "trainer"
    name: str = "trainer"
    pool: str = ""
    """Of an engine, or of environments."""
    prefills: bool = False
    """Of an engine: it is the process that computes prompts for another."""
    rendezvous: str = ""
    """Where a trainer's ranks meet, where they were placed for it."""
    rank: RankSetup | None = None
    shard: ShardSetup | None = None
    """Of a shard, and of what it starts."""
    carried: tuple[Carried, ...] = ()
    """Files that come from the coordinator's machine, where workers may be on others."""

    def engine(self, spec: EngineSpec) -> Self:
        return self.model_copy(update={"role": "engine", "name": spec.id, "pool": spec.pool})

    def environments(self, name: str, pool: str) -> Self:
        return self.model_copy(update={"role": "environments", "name": name, "pool": pool})

    def as_shard(self, number: int) -> Self:
        assert self.shard is not None, "this job has no shards"
        own = self.shard.model_copy(update={"number": number})
        return self.model_copy(update={"role": "shard", "name": f"shard-{number}", "shard": own})

    @property
    def needed(self) -> list[Carried]:
        """The files that this worker reads."""
        return [one for one in self.carried if self.role in one.roles]

    def on_this_machine(self) -> Self:
        """With the paths of these files as this machine has them. Raises ClusterError where it has not."""
        if not self.carried:
            return self
        return self.model_validate(with_paths_here(self.model_dump(mode="json", exclude={"carried"}), self.needed))

    @property
    def log_dir(self) -> Path:
        return self.out / "logs"

    @property
    def own_log_dir(self) -> Path:
        """Of what other shards start under the same names."""
        return self.log_dir if self.role != "shard" else self.log_dir / self.name

    @property
    def own_pool(self) -> PoolSettings:
        return next(pool for pool in self.job.pools if pool.name == self.pool)

    @property
    def threads(self) -> int:
        """CPU threads of its process."""
        if self.role == "shard":
            return 1
        engines = self.own_pool.engines if self.pool else None
        return engines.threads if engines else self.job.train.threads

    @property
    def cores(self) -> tuple[int, ...]:
        """That its process keeps to; empty: any."""
        if self.role == "shard":
            return ()
        engines = self.own_pool.engines if self.pool else None
        return engines.cores if engines else self.job.train.cores

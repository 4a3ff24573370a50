"""What a coordinator is given: everything outside the control plane, behind ports."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollart.policy.affinity import Affinity
from rollart.ports import (
    Cluster,
    DeadLetters,
    EnvHost,
    Journal,
    Recorder,
    RewardBackend,
    Shard,
    TaskSet,
    Tokenizer,
    WeightStore,
)
from rollart.types import EngineSpec

if TYPE_CHECKING:
    from rollart.control.env_manager import Agent
    from rollart.control.judges import JudgePool


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorld:
    """What plays trajectories: engines, environments and rewards."""

    cluster: Cluster
    """Starts the engines."""
    engines: tuple[EngineSpec, ...]
    host: EnvHost
    rewards: RewardBackend
    """Of the tasks that have none of their own."""
    tokenizer: Tokenizer
    task_rewards: Mapping[str, Sequence[RewardBackend]] = field(default_factory=dict)
    """By task, in the order of its `rewards`."""
    agents: "Mapping[str, Agent]" = field(default_factory=dict)
    """By task: who plays it. The others are played turn by turn: render, generate, step."""
    further_engines: tuple[EngineSpec, ...] = ()
    """May join while the job runs."""
    judges: "Sequence[JudgePool]" = ()
    """Frozen models of this job's own, which rewards ask."""
    stand_ins: Mapping[str, RewardBackend] = field(default_factory=dict)
    """By where a reward stands in the job: the local workers that score while its platform is down."""
    dead_letters: DeadLetters | None = None
    """Keeps reward calls that failed for good."""
    recorder: Recorder | None = None
    """Keeps finished trajectories, where somebody wants to read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The rollout in shards."""

    engines: Sequence[Sequence[EngineSpec]]
    """Of each shard."""
    start: Callable[[int], Awaitable[Shard]]
    """Starts, or starts again, the shard of this number; its engines start when it is told to begin. Raises
    ClusterError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything outside the control plane that a job touches, behind ports."""

    cluster: Cluster
    """Starts the trainer."""
    engines: tuple[EngineSpec, ...]
    """All of the job, judges' aside."""
    task_sets: Mapping[str, TaskSet]
    store: WeightStore
    journal: Journal
    affinity: Affinity
    rollout: RolloutWorld | Sharding
    """All of it, or how its shards are started."""
    recorder: Recorder | None = None
    """Is told what became of groups."""

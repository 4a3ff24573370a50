"""What `rollart sim --chaos` and `rollart pools` find: printed as JSON, or as tables by `rollart.report.show`."""

import msgspec


class FaultCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one kind of fault happened."""

    fired: int
    during_swap: int
    """While engines swapped."""


class FailedPlan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    text: str
    """Its first violations."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """Many fault plans together."""

    plans: int
    violations: int
    deadlocks: int
    lost: int
    """Groups."""
    trained_twice: int
    """Tasks."""
    finished: int
    stopped: int
    stopped_full: int
    """The store was full for longer than the job may wait."""
    faults: dict[str, FaultCount]
    wall_s: float
    failures: list[FailedPlan]


class Cluster(msgspec.Struct, frozen=True):
    type: str
    address: str | None


class Machine(msgspec.Struct, frozen=True):
    name: str
    resources: dict[str, float]


class Each(msgspec.Struct, frozen=True):
    """What one worker needs."""

    cpus: float
    gpus: float


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """One role of a pool, and how many of its workers can be placed."""

    role: str
    workers: int
    placed: int
    each: Each
    missing: str


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    hardware: str
    cost: float
    resource: str
    roles: list[Role]
    tasks: list[str]
    """That name this pool as their affinity."""
    stand_ins: list[str]
    """Pools that would serve its tasks, the first choice first."""


class PoolsReport(msgspec.Struct, frozen=True, kw_only=True):
    cluster: Cluster
    nodes: list[Machine]
    pools: list[Pool]
    devices: dict[str, list[str]]
    """By worker."""
    missing: list[str]
    """What keeps the job from being placed."""
    fallbacks: dict[str, str]
    """Pool without any engine -> the pool that would serve its tasks; empty where none would."""

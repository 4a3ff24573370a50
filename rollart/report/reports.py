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


class ClusterReport(msgspec.Struct, frozen=True):
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


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
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
    cluster: ClusterReport
    nodes: list[Machine]
    pools: list[PoolReport]
    devices: dict[str, list[str]]
    """By worker."""
    missing: list[str]
    """What keeps the job from being placed."""
    fallbacks: dict[str, str]
    """Pool without any engine -> the pool that would serve its tasks; empty where none would."""


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a sweep, simulated."""

    changes: list[str]
    state: str
    step_s: float
    p95_step_s: float
    tokens_per_s: float
    """Trained on."""
    cost: float
    stale: int
    """Trajectories that were thrown away for their age."""
    exposed_s: float
    """Of a swap, on average."""
    utilisation: dict[str, float]
    """By pool."""


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    keys: list[str]
    rows: list[SweepRow]


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use the devices."""

    train_gpus: int
    pools: dict[str, int]
    """Pool -> GPUs that roll out."""
    affinity: dict[str, dict[str, float]]
    """Task -> pool -> share, as predicted to be best."""
    predicted_s: float
    """A step, by the predictor alone: the longer of the next two."""
    rollout_s: float
    """The slowest pool."""
    other_s: float
    """Training, or the push, whichever is longer."""
    price: float
    """Of an hour of all of them."""
    bottleneck: str
    """What the predictor says is longest: training, push, or a pool."""
    simulated_s: list[float] = []
    """A step, one for each seed; empty where it was not simulated."""

    @property
    def step_s(self) -> float:
        return sum(self.simulated_s) / len(self.simulated_s) if self.simulated_s else self.predicted_s

    @property
    def cost_of_a_step(self) -> float:
        return self.price * self.step_s / 3600


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    goal: str
    considered: int
    """Splits that were predicted."""
    best: list[Split]
    """Simulated, the best first."""
    as_it_is: Split
    """The job's own."""
    model_error: float
    """How far costs were off at worst where they were measured."""
    wall_s: float
    job: dict[str, object]
    """The best one's."""

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


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill on workers of its own: so many of them, and so many that decode, make one engine."""

    decode: str
    """The pool whose engines these are."""
    prefill: str
    """The pool whose GPUs prefill."""
    gpus: int
    """Of one prefill worker."""
    workers: int
    decoders: int


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run."""

    seed: int
    step_s: float
    waits: float
    """Share of the time in which the trainer waits for a batch."""
    age: float
    """Versions between the weights that began a trajectory and those that train on it, on average."""
    wasted: float
    """Share of sampled tokens that are thrown away."""
    tokens: float
    """Sampled in a trajectory that is trained on: the mean of each task, by its share of a batch."""
    score_s: float | None = None
    """Seconds until the score is reached; None where no score was asked for."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use the devices."""

    train_gpus: int
    pools: dict[str, int]
    """Pool -> GPUs that roll out."""
    affinity: dict[str, dict[str, float]]
    """Task -> pool -> share, as predicted to be best."""
    bound: int
    free: bool = False
    """Tasks that name a pool may be on another one."""
    apart: Apart | None = None
    settings: dict[str, int] = {}
    """What else is changed in the job, by key."""
    predicted_s: float
    """A step, by the predictor alone, which knows nothing of `settings`: the longer of the next two."""
    rollout_s: float
    """The slowest pool."""
    other_s: float
    """Training, or the push, whichever is longer."""
    price: float
    """Of an hour of all of them."""
    bottleneck: str
    """What the predictor says is longest: training, push, or a pool."""
    played: list[Played] = []
    """One for each seed; empty where it was not simulated."""

    @property
    def step_s(self) -> float:
        return _mean([run.step_s for run in self.played]) if self.played else self.predicted_s

    @property
    def cost_of_a_step(self) -> float:
        return self.price * self.step_s / 3600

    def range_s(self, error: float) -> tuple[float, float]:
        """Of a step: between its seeds, and where costs are off by this share."""
        each = [run.step_s for run in self.played] or [self.predicted_s]
        return (1.0 - error) * min(each), (1.0 + error) * max(each)

    @property
    def waits(self) -> float:
        return _mean([run.waits for run in self.played])

    @property
    def tokens(self) -> float:
        return _mean([run.tokens for run in self.played])

    @property
    def age(self) -> float:
        return _mean([run.age for run in self.played])

    def value(self, goal: str, seed: int | None = None) -> float:
        """Less is better. Of one seed, or the mean of all."""
        runs = [run for run in self.played if seed in (None, run.seed)]
        each = [run.step_s if run.score_s is None else run.score_s for run in runs]
        return _mean(each) * (self.price / 3600 if goal == "cost" else 1.0)


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the best split, simulated with the first seed."""

    what: str
    """Which setting."""
    value: str
    gain: float
    """By so much less of the goal, as a share, it took alone. Below 0: more."""
    tokens: float
    """Sampled in a trajectory that is trained on, by those without the change."""
    predicted_s: float | None
    """A step with it, where there is a prediction of it."""
    kept: bool
    """It is in the best one: it still gained beside those kept before it, with every seed."""


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    goal: str
    score: float | None
    score_steps: float | None
    """On trajectories of no age, until the tasks' mean success is the score."""
    considered: int
    """Splits that were predicted."""
    runs: int
    """That were simulated."""
    best: list[Split]
    """Simulated, the best first."""
    as_it_is: Split
    """The job's own."""
    tried: list[Tried]
    """Other settings, on the best split."""
    model_error: float
    """How far costs were off at worst where they were measured."""
    wall_s: float
    job: dict[str, object]
    """The best one's."""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

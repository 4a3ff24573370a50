"""One job: all sections of a job file together, and what no single key shows.

Every check that can be made before anything starts is made here; each text names the key and the fix.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rollart.config.changes import Anytime, Fixed
from rollart.config.settings import (
    Advantage,
    CheckpointSettings,
    ClusterSettings,
    EvaluationSettings,
    LimitSettings,
    Mode,
    ModelSettings,
    PoolSettings,
    RewardSettings,
    RolloutSettings,
    Settings,
    TaskSettings,
    TrackSettings,
    TrainSettings,
    TrajectorySettings,
    WeightSettings,
)
from rollart.config.sim import SimSettings
from rollart.config.unused import unused
from rollart.hardware import HARDWARE, MODELS


class Job(Settings):
    """One training job."""

    name: Annotated[str, Fixed("the run is known by it")] = Field(pattern=r"^[A-Za-z0-9._+-]+$")
    seed: Annotated[int, Fixed("tasks and draws follow from it")] = 0
    mode: Annotated[Mode, Fixed("groups under way were admitted under it")] = "rollart"
    """A bundle of `rollout` settings: sync, sync+, one-off, areal or rollart."""
    model: Annotated[ModelSettings, Fixed("the run's weights are this model's")] = ModelSettings()
    tasks: Annotated[tuple[TaskSettings, ...], Fixed("the journal and the open groups hold its tasks")] = Field(
        min_length=1
    )
    rollout: Annotated[RolloutSettings, Fixed("groups under way were admitted under it")] = RolloutSettings()
    pools: Anytime[tuple[PoolSettings, ...]] = Field(min_length=1)
    rewards: Anytime[RewardSettings] = RewardSettings()
    train: TrainSettings = TrainSettings()
    weights: Anytime[WeightSettings] = WeightSettings()
    cluster: Anytime[ClusterSettings] = ClusterSettings()
    checkpoint: Anytime[CheckpointSettings] = CheckpointSettings()
    evaluation: Anytime[EvaluationSettings] = EvaluationSettings()
    track: Anytime[TrackSettings] = TrackSettings()
    trajectories: Anytime[TrajectorySettings] = TrajectorySettings()
    limits: Anytime[LimitSettings] = LimitSettings()
    sim: Anytime[SimSettings] = SimSettings()

    @property
    def engine_pools(self) -> tuple[PoolSettings, ...]:
        return tuple(pool for pool in self.pools if pool.engines)

    def prefill_pool(self, pool: PoolSettings) -> PoolSettings | None:
        """Where the engines of this pool have their prefill workers; None where prefill is not apart."""
        if pool.engines is None or pool.engines.prefill is None:
            return None
        wanted = pool.engines.prefill.pool or pool.name
        return next(other for other in self.pools if other.name == wanted)

    @property
    def train_pool(self) -> PoolSettings:
        wanted = self.train.pool or self.engine_pools[0].name
        return next(pool for pool in self.pools if pool.name == wanted)

    @property
    def task_variables(self) -> list[str]:
        """What environments see of our environment. All tasks': a process plays now this one, now that one."""
        return sorted({name for task in self.tasks for name in task.environment})

    @property
    def slots(self) -> int:
        """Most groups alive at a time."""
        return (self.rollout.staleness + 1) * self.rollout.groups_per_step + self.rollout.spare_groups

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        for problem in _problems(self):
            raise ValueError(problem)
        return self


def advantage_of(train: TrainSettings) -> Advantage:
    """The baseline that goes with the algorithm, unless the job names one."""
    if train.advantage is not None:
        return train.advantage
    own: dict[str, Advantage] = {"dr_grpo": "dr_grpo", "rloo": "rloo", "reinforce++": "dr_grpo"}
    return own.get(train.algorithm, "grpo")


def _problems(job: Job) -> list[str]:
    """What no single key shows. Each text names the key and the fix."""
    found: list[str] = []
    for kind, names in (("tasks", [t.name for t in job.tasks]), ("pools", [p.name for p in job.pools])):
        for position, name in enumerate(names):
            if name in names[:position]:
                found.append(f"{kind}.{position}.name: {name!r} is used twice; give each its own name")
    pools = [pool.name for pool in job.pools]
    engine_pools = [pool.name for pool in job.engine_pools]
    on_vllm = [pool.name for pool in job.engine_pools if pool.engines and pool.engines.type == "vllm"]
    prefilling = [pool.engines.prefill.pool for pool in job.engine_pools if pool.engines and pool.engines.prefill]
    if not job.engine_pools:
        found.append("pools: no pool has engines; add engines: {count: 1} to one of them")
    if not any(pool.slots for pool in job.pools):
        found.append("pools: no pool has environment slots; add a pool such as {name: environments, slots: 64}")
    for position, pool in enumerate(job.pools):
        if pool.hardware not in HARDWARE:
            near = nearest(pool.hardware, HARDWARE)
            found.append(
                f"pools.{position}.hardware: {pool.hardware!r} is not known{near}; one of {', '.join(HARDWARE)}"
            )
        prefill = pool.engines.prefill if pool.engines else None
        if prefill is not None and prefill.pool is not None and prefill.pool not in pools:
            found.append(
                f"pools.{position}.engines.prefill.pool: there is no pool {prefill.pool!r}"
                f"{nearest(prefill.pool, pools)}; one of {', '.join(pools)}"
            )
        if not pool.engines and not pool.slots and pool.name not in (job.train.pool, *prefilling):
            found.append(
                f"pools.{position}: pool {pool.name!r} has no engines and no slots, and neither trains nor prefills; "
                "give it one of them, or remove it"
            )
    if job.train.pool is not None and job.train.pool not in pools:
        found.append(
            f"train.pool: there is no pool {job.train.pool!r}{nearest(job.train.pool, pools)}; "
            f"one of {', '.join(pools)}"
        )
    for position, task in enumerate(job.tasks):
        key = f"tasks.{position}"
        if task.affinity != "auto" and task.affinity not in engine_pools:
            found.append(
                f"{key}.affinity: no pool with engines is called {task.affinity!r}"
                f"{nearest(task.affinity, engine_pools)}; one of auto, {', '.join(engine_pools)}"
            )
        if task.group_size < 2:
            found.append(
                f"{key}.group_size: {task.group_size} gives no group advantage, which compares members with each "
                "other; set it to 2 or more"
            )
        elif task.smallest_group > task.group_size:
            found.append(
                f"{key}.min_group_size: {task.min_group_size} is more than group_size {task.group_size}; lower it"
            )
        cut = "top_p" if task.top_p < 1 else "top_k" if task.top_k else None
        if cut and task.temperature and on_vllm:
            found.append(
                f"{key}.{cut}: vllm engines (pool {on_vllm[0]!r}) give log-probabilities of what it leaves, and "
                "training needs those of the whole distribution; remove it, or use embedded or sglang engines"
            )
        if task.max_tokens >= job.model.context_tokens:
            found.append(
                f"{key}.max_tokens: {task.max_tokens} leaves no room for a prompt in model.context_tokens "
                f"{job.model.context_tokens}; lower max_tokens or raise context_tokens"
            )
    quotas = sum(task.quota or 0 for task in job.tasks)
    free = [task for task in job.tasks if task.quota is None]
    if quotas > job.rollout.groups_per_step:
        found.append(
            f"tasks: the quotas add up to {quotas} groups, more than rollout.groups_per_step "
            f"{job.rollout.groups_per_step}; lower them or raise groups_per_step"
        )
    elif free and quotas == job.rollout.groups_per_step:
        found.append(
            f"tasks: the quotas leave no group for {free[0].name!r}; lower one, or raise rollout.groups_per_step"
        )
    elif not free and quotas < job.rollout.groups_per_step:
        found.append(
            f"tasks: every task has a quota and they add up to {quotas}, not rollout.groups_per_step "
            f"{job.rollout.groups_per_step}; make them equal, or give one task a weight instead"
        )
    found += _cluster_problems(job)
    found += unused(job)
    rollout = job.rollout
    if rollout.staleness == 0 and rollout.swap != "between_batches":
        found.append(
            f"rollout.staleness: 0 means on-policy, which swap {rollout.swap!r} cannot keep; "
            "set rollout.swap to between_batches, or rollout.staleness to 1 or more"
        )
    if rollout.rolling and rollout.swap == "drain":
        found.append("rollout.rolling: drain swaps all engines at once; set rolling to 0, or another swap")
    total_engines = sum(pool.engines.count for pool in job.engine_pools if pool.engines)
    if rollout.rolling >= total_engines and rollout.rolling:
        found.append(
            f"rollout.rolling: {rollout.rolling} at a time is all of the {total_engines} engines; "
            "set it to 0 (all at once) or below their number"
        )
    for name in job.sim.tasks:
        if name not in [task.name for task in job.tasks]:
            near = nearest(name, [task.name for task in job.tasks])
            found.append(f"sim.tasks.{name}: the job has no task of that name{near}; rename or remove it")
    for name in job.sim.engine.measured:
        if name not in engine_pools:
            near = nearest(name, engine_pools)
            found.append(f"sim.engine.measured.{name}: no pool with engines has that name{near}; rename or remove it")
    if job.sim.model not in MODELS:
        found.append(
            f"sim.model: {job.sim.model!r} is not known{nearest(job.sim.model, MODELS)}; one of {', '.join(MODELS)}"
        )
    if job.sim.chaos.faults[0] > job.sim.chaos.faults[1]:
        found.append("sim.chaos.faults: the first number is the fewest, the second the most; swap them")
    return found


def _cluster_problems(job: Job) -> list[str]:
    found: list[str] = []
    cluster = job.cluster
    if cluster.address is not None and cluster.type != "ray":
        found.append(
            f"cluster.address: has no effect with type {cluster.type}; set cluster.type to ray, or remove the address"
        )
    if cluster.address is not None and cluster.address.startswith("ray://"):
        found.append(
            "cluster.address: ray:// is Ray Client, which the coordinator cannot use; start `rollart train` on a "
            "machine of the cluster, with host:port or auto"
        )
    if cluster.type == "ray" and cluster.wait_s >= job.limits.start_s:
        found.append(
            f"cluster.wait_s: {cluster.wait_s:g} leaves no time to start in limits.start_s {job.limits.start_s:g}; "
            "lower wait_s or raise start_s"
        )
    for position, pool in enumerate(job.pools):
        if pool.engines and pool.engines.most is not None and pool.engines.most < pool.engines.count:
            found.append(
                f"pools.{position}.engines.most: {pool.engines.most} is less than count {pool.engines.count}; raise it"
            )
    return found


def nearest(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""

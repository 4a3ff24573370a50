"""One job: all sections of a job file together, and what no single key shows.

Every check that can be made before anything starts is made here; each text names the key and the fix.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Annotated, Self

from pydantic import Field, model_validator

from rollart.config import settings
from rollart.config.changes import Anytime, Fixed
from rollart.config.shapes import is_known
from rollart.config.sim import SimSettings
from rollart.config.unused import unused
from rollart.hardware import HARDWARE, MODELS, Hardware


class Job(settings.Settings):
    """One training job."""

    name: Annotated[str, Fixed("the run is known by it")] = Field(pattern=r"^[A-Za-z0-9._+-]+$")
    seed: Annotated[int, Fixed("tasks and draws follow from it")] = 0
    mode: Annotated[settings.Mode, Fixed("groups under way were admitted under it")] = "rollart"
    """A bundle of `rollout` settings: sync, sync+, one-off, areal or rollart."""
    model: Annotated[settings.ModelSettings, Fixed("the run's weights are this model's")] = settings.ModelSettings()
    tasks: Annotated[tuple[settings.TaskSettings, ...], Fixed("the journal and the open groups hold its tasks")] = (
        Field(min_length=1)
    )
    rollout: Annotated[settings.RolloutSettings, Fixed("groups under way were admitted under it")] = (
        settings.RolloutSettings()
    )
    pools: Anytime[tuple[settings.PoolSettings, ...]] = Field(min_length=1)
    rewards: Anytime[settings.RewardSettings] = settings.RewardSettings()
    train: settings.TrainSettings = settings.TrainSettings()
    weights: Anytime[settings.WeightSettings] = settings.WeightSettings()
    cluster: Anytime[settings.ClusterSettings] = settings.ClusterSettings()
    checkpoint: Anytime[settings.CheckpointSettings] = settings.CheckpointSettings()
    evaluation: Anytime[settings.EvaluationSettings] = settings.EvaluationSettings()
    track: Anytime[settings.TrackSettings] = settings.TrackSettings()
    trajectories: Anytime[settings.TrajectorySettings] = settings.TrajectorySettings()
    endpoint: Anytime[settings.EndpointSettings] = settings.EndpointSettings()
    limits: Anytime[settings.LimitSettings] = settings.LimitSettings()
    sim: Anytime[SimSettings] = SimSettings()
    hardware: Anytime[dict[str, settings.HardwareSettings]] = Field(default_factory=dict)
    """Kinds of device beside those of `rollart.hardware`, or in place of them, by name."""

    @cached_property
    def kinds(self) -> dict[str, Hardware]:
        """Every kind of device that a pool may name."""
        return {**HARDWARE, **{name: Hardware(name=name, **own.model_dump()) for name, own in self.hardware.items()}}

    @property
    def engine_pools(self) -> tuple[settings.PoolSettings, ...]:
        """Those that serve the policy."""
        return tuple(pool for pool in self.pools if pool.engines and not pool.judge)

    @property
    def judge_pools(self) -> tuple[settings.PoolSettings, ...]:
        """Those that serve a judge."""
        return tuple(pool for pool in self.pools if pool.engines and pool.judge)

    @property
    def engines(self) -> tuple[tuple[settings.PoolSettings, settings.EngineSettings], ...]:
        """Each pool that serves the policy, with its engines."""
        return tuple((pool, engines) for pool, engines in self.all_engines if not pool.judge)

    @property
    def all_engines(self) -> tuple[tuple[settings.PoolSettings, settings.EngineSettings], ...]:
        """Each pool that has engines, a judge's too, with these."""
        return tuple((pool, pool.engines) for pool in self.pools if pool.engines)

    def prefill_pool(self, pool: settings.PoolSettings) -> settings.PoolSettings | None:
        """Where the engines of this pool have their prefill workers; None where prefill is not apart."""
        if pool.engines is None or pool.engines.prefill is None:
            return None
        wanted = pool.engines.prefill.pool or pool.name
        return next(other for other in self.pools if other.name == wanted)

    @property
    def shard_pool(self) -> settings.PoolSettings | None:
        """On whose machines shards are, where there are some."""
        shards = self.cluster.coordinators > 1
        return next((pool for pool in self.pools if pool.slots), None) if shards else None

    @property
    def train_pool(self) -> settings.PoolSettings:
        wanted = self.train.pool or self.engine_pools[0].name
        return next(pool for pool in self.pools if pool.name == wanted)

    def isolation(self, task: settings.TaskSettings, pool: settings.PoolSettings | None = None) -> settings.Isolation:
        """Of the environments of this task, in this pool; by default in the first that has slots."""
        pool = pool or next(pool for pool in self.pools if pool.slots)
        return task.isolation or pool.isolation

    def wait_s(self, task: settings.TaskSettings) -> tuple[float, float, float]:
        """How long an environment of this task may take to open, to reset, and for a step."""
        own, all_tasks = task.limits, self.limits
        return own.open_s or all_tasks.open_s, own.reset_s or all_tasks.reset_s, own.step_s or all_tasks.step_s

    @property
    def asked_rewards(self) -> dict[str, settings.RewardSettings]:
        """The rewards that tasks have, by where they stand in the job; those that nobody asks for left out."""
        own = {
            f"tasks.{position}.rewards.{number}": reward
            for position, task in enumerate(self.tasks)
            for number, reward in enumerate(task.rewards)
        }
        return own if all(task.rewards for task in self.tasks) else {"rewards": self.rewards, **own}

    def task_at(self, place: str) -> str:
        """The task whose reward stands at this place; empty for that of the job."""
        parts = place.split(".")
        return self.tasks[int(parts[1])].name if parts[0] == "tasks" else ""

    @property
    def programs(self) -> tuple[settings.TaskSettings, ...]:
        """The tasks whose agents reach the model over the endpoint."""
        return tuple(task for task in self.tasks if task.agent is not None and task.agent.is_program)

    @property
    def slots(self) -> int:
        """Most groups alive at a time."""
        return (self.rollout.staleness + 1) * self.rollout.groups_per_step + self.rollout.spare_groups

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        for problem in _problems(self):
            raise ValueError(problem)
        return self


def advantage_of(train: settings.TrainSettings) -> settings.Advantage:
    """The baseline that goes with the algorithm, unless the job names one."""
    if train.advantage is not None:
        return train.advantage
    own: dict[str, settings.Advantage] = {"dr_grpo": "dr_grpo", "rloo": "rloo", "reinforce++": "dr_grpo"}
    return own.get(train.algorithm, "grpo")


def _problems(job: Job) -> Iterator[str]:
    """What no single key shows. Each text names the key and the fix."""
    yield from _name_problems(job)
    yield from _pool_problems(job)
    for position, task in enumerate(job.tasks):
        yield from _task_problems(job, task, f"tasks.{position}")
    yield from _quota_problems(job)
    yield from _cluster_problems(job)
    yield from _shard_problems(job)
    yield from unused(job)
    yield from _rollout_problems(job)
    yield from _colocation_problems(job)
    yield from _expert_problems(job)
    if job.sim.chaos.faults[0] > job.sim.chaos.faults[1]:
        yield "sim.chaos.faults: the first number is the fewest, the second the most; swap them"


def _name_problems(job: Job) -> Iterator[str]:
    """Names given twice, and names of what is not there."""
    tasks, pools = [task.name for task in job.tasks], [pool.name for pool in job.pools]
    for kind, names in (("tasks", tasks), ("pools", pools)):
        for position, name in enumerate(names):
            if name in names[:position]:
                yield f"{kind}.{position}.name: {name!r} is used twice; give each its own name"
    if not job.engine_pools:
        yield "pools: no pool has engines; add engines: {count: 1} to one of them"
    with_engines = [pool.name for pool in job.engine_pools]
    named: list[tuple[str, str | None, Collection[str]]] = [("train.pool", job.train.pool, pools)]
    for position, pool in enumerate(job.pools):
        prefill = pool.engines.prefill if pool.engines else None
        named.append((f"pools.{position}.hardware", pool.hardware, job.kinds))
        named.append((f"pools.{position}.engines.prefill.pool", prefill.pool if prefill else None, pools))
    for position, task in enumerate(job.tasks):
        named.append((f"tasks.{position}.affinity", task.affinity, ["auto", "any", *with_engines]))
    named += [(f"sim.tasks.{name}", name, tasks) for name in job.sim.tasks]
    judges = [pool.name for pool in job.judge_pools]
    named += [(f"{place}.pool", reward.pool, judges) for place, reward in job.asked_rewards.items()]
    named += [(f"sim.judges.{name}", name, judges) for name in job.sim.judges]
    models = {f"sim.judges.{name}.model": judge.model for name, judge in job.sim.judges.items()}
    models["sim.model"] = job.sim.model
    shapes = [*MODELS, "a folder with a config.json"]
    named += [(key, model, shapes) for key, model in models.items() if not is_known(model)]
    named += [(f"sim.engine.measured.{name}", name, [*with_engines, *judges]) for name in job.sim.engine.measured]
    for key, given, known in named:
        if given is not None and given not in known:
            one_of = f"one of {', '.join(known)}" if known else "no pool has a judge"
            yield f"{key}: {given!r} is not known{nearest(given, known)}; {one_of}"


def _pool_problems(job: Job) -> Iterator[str]:
    if not any(pool.slots for pool in job.pools):
        yield "pools: no pool has environment slots; add a pool such as {name: environments, slots: 64}"
    prefilling = [engines.prefill.pool for _, engines in job.all_engines if engines.prefill]
    for position, pool in enumerate(job.pools):
        if not pool.engines and not pool.slots and pool.name not in (job.train.pool, *prefilling):
            yield (
                f"pools.{position}: pool {pool.name!r} has no engines and no slots, and neither trains nor prefills; "
                "give it one of them, or remove it"
            )
        engines = pool.engines
        if engines and engines.most is not None and engines.most < engines.count:
            yield f"pools.{position}.engines.most: {engines.most} is less than count {engines.count}; raise it"
        if pool.judge is not None:
            yield from _judge_problems(job, pool, f"pools.{position}")


def _judge_problems(job: Job, pool: settings.PoolSettings, key: str) -> Iterator[str]:
    if pool.engines is None:
        yield f"{key}.judge: the pool has no engines to serve it; add engines: {{count: 1}}"
    elif pool.engines.most is not None:
        yield f"{key}.engines.most: the engines of a judge are as many as count says; remove it"
    if not any(reward.pool == pool.name for reward in job.asked_rewards.values()) and not (
        pool.judge and pool.judge.listen
    ):
        yield (
            f"{key}.judge: nobody asks it; name the pool in a reward (type: judge, pool: {pool.name}), let others "
            "reach it (judge.listen), or remove it"
        )


def _task_problems(job: Job, task: settings.TaskSettings, key: str) -> Iterator[str]:
    if task.group_size < 2:
        yield (
            f"{key}.group_size: {task.group_size} gives no group advantage, which compares members with each other; "
            "set it to 2 or more"
        )
    elif task.smallest_group > task.group_size:
        yield f"{key}.min_group_size: {task.min_group_size} is more than group_size {task.group_size}; lower it"
    on_vllm = [pool.name for pool, engines in job.engines if engines.type == "vllm"]
    cut = "top_p" if task.top_p < 1 else "top_k" if task.top_k else None
    if cut and task.temperature and on_vllm:
        yield (
            f"{key}.{cut}: vllm engines (pool {on_vllm[0]!r}) give log-probabilities of what it leaves, and training "
            "needs those of the whole distribution; remove it, or use embedded or sglang engines"
        )
    labels = [reward.label for reward in task.rewards]
    for number, label in enumerate(labels):
        if label in labels[:number]:
            yield f"{key}.rewards.{number}.name: {label!r} is used twice; give each reward a name of its own"
    if task.agent is not None and task.agent.is_program and job.rollout.stepping == "batched":
        yield (
            f"{key}.agent: a program has a pace of its own, and rollout.stepping batched holds environments in step; "
            "set rollout.stepping to asynchronous, or another mode"
        )
    if task.max_tokens >= job.model.context_tokens:
        yield (
            f"{key}.max_tokens: {task.max_tokens} leaves no room for a prompt in model.context_tokens "
            f"{job.model.context_tokens}; lower max_tokens or raise context_tokens"
        )


def _quota_problems(job: Job) -> Iterator[str]:
    quotas, groups = sum(task.quota or 0 for task in job.tasks), job.rollout.groups_per_step
    free = [task for task in job.tasks if task.quota is None]
    if quotas > groups:
        yield (
            f"tasks: the quotas add up to {quotas} groups, more than rollout.groups_per_step {groups}; "
            "lower them or raise groups_per_step"
        )
    elif free and quotas == groups:
        yield f"tasks: the quotas leave no group for {free[0].name!r}; lower one, or raise rollout.groups_per_step"
    elif not free and quotas < groups:
        yield (
            f"tasks: every task has a quota and they add up to {quotas}, not rollout.groups_per_step {groups}; "
            "make them equal, or give one task a weight instead"
        )


def _cluster_problems(job: Job) -> Iterator[str]:
    cluster = job.cluster
    if cluster.address is not None and cluster.address.startswith("ray://"):
        yield (
            "cluster.address: ray:// is Ray Client, which the coordinator cannot use; start `rollart train` on a "
            "machine of the cluster, with host:port or auto"
        )
    if cluster.type == "ray" and cluster.wait_s >= job.limits.start_s:
        yield (
            f"cluster.wait_s: {cluster.wait_s:g} leaves no time to start in limits.start_s {job.limits.start_s:g}; "
            "lower wait_s or raise start_s"
        )


def _shard_problems(job: Job) -> Iterator[str]:
    """What cannot be divided between coordinators."""
    number, key = job.cluster.coordinators, "cluster.coordinators"
    if number == 1:
        return
    if job.cluster.type == "inline":
        yield f"{key}: {number} need processes of their own; set cluster.type to local or ray, or remove it"
    if job.rollout.stepping == "batched":
        yield (
            f"{key}: with rollout.stepping batched every environment waits for all others, so {number} coordinators "
            "would wait for each other; set rollout.stepping to asynchronous, take another mode, or remove it"
        )
    for position, pool in enumerate(job.pools):
        for what, amount in (("engines.count", pool.engines and pool.engines.count), ("slots", pool.slots)):
            if amount and amount < number:
                yield (
                    f"pools.{position}.{what}: {amount} cannot be divided between {key} {number}; raise it to "
                    f"{number} or more, or lower {key}"
                )
        if pool.engines and pool.engines.most is not None:
            yield f"pools.{position}.engines.most: with several coordinators engines do not come later; remove it"
        if pool.judge and pool.judge.listen:
            yield f"pools.{position}.judge.listen: with several coordinators others cannot reach a judge; remove it"
    if job.train.colocated:
        yield f"train.colocated: not with {key} above 1; remove it, or {key}"
    if job.programs and job.cluster.address:
        yield (
            f"{key}: agents that are programs find the model at one address (endpoint.host), and coordinators would be "
            "on several machines; remove it, or cluster.address"
        )
    if job.programs and job.endpoint.port:
        yield f"endpoint.port: {number} coordinators listen, each at a port of its own; remove it (any free one)"
    for place, reward in job.asked_rewards.items():
        if reward.at_once < number:
            what = "workers" if reward.type == "local" else "concurrency"
            yield (
                f"{place}.{what}: {reward.at_once} cannot be divided between {key} {number}; raise it to {number} or "
                f"more, or lower {key}"
            )


def _rollout_problems(job: Job) -> Iterator[str]:
    rollout = job.rollout
    own = settings.MODES[job.mode]["staleness"]
    if job.mode in settings.BOUND_MODES and rollout.staleness != own:
        yield (
            f"rollout.staleness: {rollout.staleness} is not the bound of mode {job.mode!r}, which is {own}; "
            f"set rollout.staleness={own} or remove the key, or take mode areal or rollart, which have any bound"
        )
    if rollout.late == "wait" and (rollout.swap, rollout.recheck) != ("after_batch", "live"):
        yield (
            f"rollout.late: 'wait' is for swap 'after_batch' with recheck 'live'; with {rollout.swap!r} and "
            f"{rollout.recheck!r} no batch decides what a swap makes too old; remove it"
        )
    if rollout.staleness == 0 and rollout.swap != "between_batches":
        yield (
            f"rollout.staleness: 0 means on-policy, which swap {rollout.swap!r} cannot keep; "
            "set rollout.swap to between_batches, or rollout.staleness to 1 or more"
        )
    if rollout.rolling and rollout.swap == "drain":
        yield "rollout.rolling: drain swaps all engines at once; set rolling to 0, or another swap"
    count = sum(engines.count for _, engines in job.engines)
    if rollout.rolling and rollout.rolling >= count:
        yield (
            f"rollout.rolling: {rollout.rolling} at a time is all of the {count} engines; "
            "set it to 0 (all at once) or below their number"
        )


def _colocation_problems(job: Job) -> Iterator[str]:
    if not job.train.colocated:
        return
    pool = job.train_pool
    if job.rollout.swap != "between_batches" or job.rollout.staleness:
        yield (
            f"train.colocated: mode {job.mode!r} trains while engines roll out, and both would need the GPUs; set mode "
            "to sync or sync+, or remove train.colocated"
        )
    if pool.engines is None:
        yield f"train.colocated: pool {pool.name!r} has no engines to take turns with; set train.pool to one that has"
    elif elsewhere := [other.name for other in job.engine_pools if other is not pool]:
        yield (
            f"train.colocated: pool {elsewhere[0]!r} has engines on other GPUs, which would stand idle while one pool "
            "trains; remove its engines, or train.colocated"
        )
    elif job.train.gpus > (gpus := pool.engines.count * pool.engines.decode_gpus):
        yield f"train.gpus: {job.train.gpus} is more than the {gpus} GPUs of pool {pool.name!r}, its own; lower it"


def _expert_problems(job: Job) -> Iterator[str]:
    keys = [
        f"pools.{position}.engines.parallel"
        for position, pool in enumerate(job.pools)
        if pool.engines and pool.engines.parallel == "expert" and not pool.judge
    ]
    if job.sim.train.expert > 1:
        keys.append("sim.train.expert")
    if keys and not job.sim.shape.experts:
        yield f"{keys[0]}: sim.model {job.sim.model!r} has no experts to split; remove it, or name a model that has"
    if job.sim.train.expert > job.train.gpus:
        yield f"sim.train.expert: {job.sim.train.expert} is more than train.gpus {job.train.gpus}; lower it"


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""

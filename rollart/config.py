"""The job file: what a user may say, its defaults, and what is refused.

Pydantic, frozen, unknown keys refused with the nearest valid key named. `load_job` is the only way in: it reads
the YAML, applies `key=value` overrides, fills in the bundle of the chosen mode, and checks what can be
checked before anything starts. It imports nothing heavy.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollart.errors import JobError
from rollart.hardware import HARDWARE, MODELS

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]

_NORMAL = NormalDist()

Mode = Literal["sync", "sync+", "one-off", "areal", "rollart"]
Swap = Literal["between_batches", "drain", "when_published", "after_batch"]
Recheck = Literal["live", "batch", "start"]
Stepping = Literal["asynchronous", "batched"]
Advantage = Literal["grpo", "dr_grpo", "rloo"]
Algorithm = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++"]

MODES: dict[str, dict[str, Any]] = {
    "sync": {"staleness": 0, "swap": "between_batches", "recheck": "live", "stepping": "batched"},
    "sync+": {"staleness": 0, "swap": "between_batches", "recheck": "live", "stepping": "asynchronous"},
    "one-off": {"staleness": 1, "swap": "drain", "recheck": "batch", "stepping": "asynchronous"},
    "areal": {"staleness": 1, "swap": "when_published", "recheck": "start", "stepping": "asynchronous"},
    "rollart": {"staleness": 1, "swap": "after_batch", "recheck": "live", "stepping": "asynchronous"},
}
"""What each mode sets under `rollout`; a key the job gives itself wins."""


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Spread(Settings):
    """A distribution: values are drawn, then cut to [low, high]."""

    kind: Literal["constant", "normal", "lognormal", "uniform"] = "constant"
    mean: NonNegative = 0.0
    sigma: NonNegative = 0.0
    """normal: standard deviation; lognormal: sigma of the logarithm; uniform: half width."""
    low: NonNegative = 0.0
    high: NonNegative = 1e12

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return {"mean": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    def value(self, uniform: float) -> float:
        """The value that this share of all draws, in (0, 1), lie below: a draw, where the share is random."""
        if self.kind == "constant":
            return self.mean
        if self.kind == "uniform":
            value = self.mean + (2 * uniform - 1) * self.sigma
        else:
            z = _NORMAL.inv_cdf(uniform)
            if self.kind == "normal":
                value = self.mean + z * self.sigma
            else:
                value = self.mean * math.exp(z * self.sigma - self.sigma**2 / 2)
        return min(self.high, max(self.low, value))


class ModelSettings(Settings):
    """The policy model."""

    path: str = "models/tiny"
    """A Hugging Face directory. Not read by `rollart sim`."""
    context_tokens: Count = 32_768
    """A trajectory that grows beyond this is truncated."""


class TaskSettings(Settings):
    """One task set in the mix."""

    name: str = Field(min_length=1)
    """Unique; the affinity key, and the name in all figures."""
    use: str = ""
    """`module` or `module:name` of the task set. Not read by `rollart sim`."""
    weight: Positive = 1.0
    """Share of the groups, relative to the other tasks' weights."""
    quota: Count | None = None
    """Exactly this many groups in each batch, instead of a share by weight."""
    group_size: Count = 8
    """Trajectories compared with each other."""
    min_group_size: Annotated[int, Field(ge=2)] | None = None
    """A group whose members keep failing closes with no fewer than these. Default: half of `group_size`."""
    max_turns: Count = 32
    max_tokens: Count = 1024
    """Most tokens in one answer."""
    temperature: NonNegative = 1.0
    affinity: str = "auto"
    """The pool that should serve this task, or `auto`: measured, and moved when the load moves."""
    latency: Spread | None = None
    """Seconds that each environment step takes longer, drawn anew for each. For comparisons of modes. Not read by
    `rollart sim`, which has `sim.tasks.<name>.step_s`."""


class RolloutSettings(Settings):
    """How trajectories are admitted, aged, and handed to training. The mode fills what is not set."""

    groups_per_step: Count = 16
    staleness: Annotated[int, Field(ge=0)] = 1
    """The bound: how many versions a trajectory's first token may lie behind the serving weights."""
    swap: Swap = "after_batch"
    """When new weights enter the engines."""
    rolling: Annotated[int, Field(ge=0)] = 0
    """Swap this many engines at a time while the others serve; 0 means all at once."""
    recheck: Recheck = "live"
    """Where the bound is enforced: `live` (each turn, each swap, each batch), `batch`, or only at the `start`."""
    stepping: Stepping = "asynchronous"
    """`batched` holds environment results and rewards back until all open ones are in."""
    spare_groups: Annotated[int, Field(ge=0)] = 0
    """Groups admitted beyond what a batch needs."""
    spare_members: Annotated[int, Field(ge=0)] = 0
    """Members started beyond `group_size`; the slowest are cancelled."""
    share_tolerance: Share = 0.25
    """How far a task's share of a batch may be from its target, as a share of the batch."""
    zero_variance: Literal["refill", "skip", "keep"] = "refill"
    """A group whose members all earned the same teaches nothing. `refill`: drop it and play another. `skip`: it counts,
    but the trainer passes over it. `keep`: train on it (entropy and KL terms only)."""
    refill_factor: Positive = 4.0
    """A batch goes short once this many times `groups_per_step` groups were filtered or failed for it."""
    max_short_batches: Count = 3
    """The job stops after this many short batches in a row."""


class SplitSettings(Settings):
    """Prefill and decode of one vLLM engine on two servers; their cache travels by vLLM's own connector."""

    connector: str = "NixlConnector"
    """`kv_connector` of vLLM's `--kv-transfer-config`."""
    prefill_gpus: Count = 1
    """GPUs of the prefill server, beside the engine's `gpus`, which decode."""


class EngineSettings(Settings):
    """The engines of one pool."""

    type: Literal["embedded", "vllm", "sglang"] = "embedded"
    count: Count = 1
    most: Count | None = None
    """Cluster `ray`: engines beyond `count`, up to this many in all, join when a machine of the pool's kind has room
    for them and leave with it. Default: `count`, no more."""
    gpus: Count = 1
    """GPUs of one engine: tensor parallel."""
    max_batch: Count = 256
    """Sequences one engine works on at a time."""
    prefill: str | None = None
    """The pool that prefills for these engines: each is then a pair of one engine there and one here, which decodes.
    Simulated only, unless the type is `vllm`."""
    kv_link_gb_s: Positive = 25.0
    """Of such a pair: the link that its KV travels over, GB/s."""
    kv_tokens: Count = 65_536
    """`embedded`: bound of the cache, in tokens. Not read by `rollart sim`, which has the hardware's memory."""
    keep_kv: bool = False
    """`embedded`: keep the cache of requests in flight over a swap instead of computing it again."""
    device: str = "cpu"
    """`embedded`: `cpu`, or a torch device such as `cuda:0`."""
    threads: Count = 1
    """CPU threads of one engine's process."""
    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """`embedded`: the CPU cores, by number, that each engine's process keeps to; none given means any."""
    python: str | None = None
    """`vllm`, `sglang`: the interpreter that has the server. Default: the environment's ROLLART_VLLM_PYTHON or
    ROLLART_SGLANG_PYTHON, else this one."""
    url: str | None = None
    """`vllm`, `sglang`: attach to this server instead of starting one; its key in ROLLART_ENGINE_TOKEN."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """`vllm`, `sglang`: what the server computes in."""
    args: tuple[str, ...] = ()
    """`vllm`, `sglang`: more of the server's own command line, such as [--gpu-memory-utilization, "0.8"]."""
    split: SplitSettings | None = None
    """`vllm`: a prefill and a decode server for each engine. Not tried on real devices yet."""

    @model_validator(mode="after")
    def _all_is_read(self) -> Self:
        embedded = self.type == "embedded"
        for key in ("python", "url", "dtype", "args") if embedded else ("kv_tokens", "keep_kv", "device", "cores"):
            if getattr(self, key) != type(self).model_fields[key].default:
                kind = "vllm or sglang" if embedded else "embedded"
                raise ValueError(f"engines.{key}: only {kind} engines read it; remove it, or change engines.type")
        if self.split is not None and self.type != "vllm":
            raise ValueError("engines.split: only vllm engines read it; remove it, or change engines.type")
        if self.url is not None:
            if self.count > 1:
                raise ValueError("engines.url: names one server; set count to 1, and give each further one a pool")
            for key in ("python", "args", "split"):
                if getattr(self, key):
                    raise ValueError(f"engines.{key}: has no effect with url, whose server runs already; remove one")
        return self


class PoolSettings(Settings):
    """Machines of one hardware kind."""

    name: str = Field(min_length=1)
    hardware: str = "cpu"
    """A kind from `rollart.hardware`: h800, h100, h200, h20, a100, l40s, cpu."""
    cost: NonNegative | None = None
    """Price of one device-hour. Default: the kind's relative cost."""
    resource: str | None = None
    """Cluster `ray`: the resource by which this pool's machines are known, a custom one or such as
    `accelerator_type:H100`. Default: the hardware's name; for `cpu` none, so that any machine will do."""
    engines: EngineSettings | None = None
    slots: Count | None = None
    """Environments that run here at a time."""
    slots_per_worker: Count = 32
    """Cluster `ray`: environments in one worker; the workers are spread over the pool's machines, one CPU each."""
    isolation: Literal["process", "inline"] = "process"
    """Of environments: each slot a process of its own, or all in one (cheap, trusted ones): the coordinator's, and on
    the cluster `ray` each worker's."""


class RewardSettings(Settings):
    """Where rewards are computed."""

    type: Literal["local", "http"] = "local"
    url: str | None = None
    """For `http`: the function's address."""
    workers: Count = 4
    """For `local`: processes (in `rollart sim`: dedicated devices)."""
    concurrency: Count = 256
    """For `http`: calls under way at a time."""
    timeout_s: Positive = 30.0
    retries: Annotated[int, Field(ge=0)] = 3
    backoff_s: NonNegative = 0.5
    """Wait before the first retry; doubled each time."""

    @model_validator(mode="after")
    def _has_url(self) -> Self:
        if self.type == "http" and not self.url:
            raise ValueError("rewards.url: type http needs the function's address, as url: http://127.0.0.1:8080")
        if self.type == "local" and self.url:
            raise ValueError("rewards.url: has no effect with type local; set rewards.type to http, or remove it")
        return self


class TrainSettings(Settings):
    """The trainer."""

    type: Literal["single", "fsdp2"] = "single"
    pool: str | None = None
    """The pool whose kind of hardware trains. Default: the first pool that has engines."""
    gpus: Count = 1
    steps: Count = 100
    lr: Positive = 1e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises to `lr`."""
    lr_decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls from `lr` to zero over the job's `steps`."""
    weight_decay: NonNegative = 0.0
    grad_clip: NonNegative = 1.0
    """Largest gradient norm; 0 means no clipping."""
    algorithm: Algorithm = "grpo"
    advantage: Advantage | None = None
    """How rewards of a group become advantages. Default: what the algorithm is defined with."""
    eps_low: Positive | None = None
    """Lower clip range. Default: the algorithm's own."""
    eps_high: Positive | None = None
    """Upper clip range; DAPO's clip-higher. Default: the algorithm's own."""
    correction: Literal["decoupled", "bypass", "none"] = "decoupled"
    """How samples of older weights are corrected: proximal log-probabilities recomputed, or the engine's own taken."""
    weight_cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight: truncated importance sampling."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the initial model."""
    entropy_coef: NonNegative = 0.0
    microbatch_tokens: Count = 4096
    bf16: bool = False
    device: str = "cpu"
    """`cpu`, or a torch device such as `cuda:0`."""
    threads: Count = 1
    """CPU threads of the trainer's process."""
    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The CPU cores, by number, that the trainer's process keeps to; none given means any."""


class WeightSettings(Settings):
    """How weights travel from the trainer to the engines."""

    type: Literal["shm", "files", "mooncake"] = "shm"
    """`shm`: shared memory of one machine. `files`: Hugging Face directories on a disk all of them share."""
    path: str | None = None
    """`files`: the directory, in which each run makes its own. Default: `weights` in the run directory."""
    bucket_mb: Count = 1024

    @model_validator(mode="after")
    def _path_is_read(self) -> Self:
        if self.path is not None and self.type != "files":
            raise ValueError(
                f"weights.path: has no effect with type {self.type}; set weights.type to files, or remove it"
            )
        return self


class ClusterSettings(Settings):
    """What runs the workers."""

    type: Literal["inline", "local", "ray"] = "local"
    """`inline`: all in the coordinator's process, for debugging. `local`: each worker a process of this machine.
    `ray`: each worker an actor, on the machines of its pool."""
    address: str | None = None
    """`ray`: an existing cluster, `host:port` or `auto`. Default: one of this machine alone, for this job alone."""
    wait_s: Positive = 300.0
    """`ray`: how long a worker waits for a machine with room before its start counts as failed. At the start of a job
    that ends it; later it waits again."""
    check: bool = True
    """`ray` with an address: refuse a job that does not fit the machines there now. Switch it off where machines come
    when they are asked for."""


class CheckpointSettings(Settings):
    every: Count = 10
    """Steps between checkpoints."""


class EvaluationSettings(Settings):
    """Held-out play beside training; never waited for by a swap."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations, and once more after the last step; 0 means none."""
    first: bool = False
    """Also evaluate the initial weights, before training begins."""
    episodes: Count = 32
    """Per task."""
    greedy: bool = False
    """Play as many episodes again at temperature 0."""
    concurrency: Count = 16


class TrackSettings(Settings):
    """Where metrics go beside `metrics.jsonl`; read by `rollart train` only."""

    tensorboard: bool = False
    """Event files in the run directory's `tensorboard/`."""
    wandb: Literal["off", "offline", "online"] = "off"
    """`offline` writes into the run directory (`wandb sync` sends it later); `online` needs WANDB_API_KEY."""
    project: str = "rollart"
    """W&B's project."""


class LimitSettings(Settings):
    """How long to wait for others, and how often to try again."""

    generate_s: Positive = 1800.0
    """An engine that holds one request longer is taken for hung."""
    open_s: Positive = 3600.0
    """Waiting for an environment slot and its start."""
    reset_s: Positive = 600.0
    step_s: Positive = 300.0
    start_s: Positive = 600.0
    """A worker's start."""
    swap_s: Positive = 600.0
    """An engine that needs longer to take new weights is taken for hung."""
    train_s: Positive = 7200.0
    """A train step, a save, a restore or a push."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Tries at one group member before it is given up."""
    backoff_s: NonNegative = 1.0
    """Wait before a second try; doubled each time, up to a minute."""
    engine_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts in a row before an engine leaves the rotation; a served request resets the count."""
    trainer_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts in a row before the job stops; a finished step resets the count."""
    stall_s: Positive = 900.0
    """Nothing has moved for this long: the watchdog names who waits on whom."""


class SimShiftSettings(Settings):
    """What becomes different about a task in the middle of a simulated run; what is not given stays."""

    after_s: Positive
    """From this time on: for environments that open, and answers that begin."""
    turns: Spread | None = None
    prompt_tokens: Spread | None = None
    observation_tokens: Spread | None = None
    answer_tokens: Spread | None = None
    step_s: Spread | None = None


class SimTaskSettings(Settings):
    """How one task behaves in the simulator."""

    turns: Spread = Spread(mean=8)
    prompt_tokens: Spread = Spread(mean=512)
    """The first observation."""
    observation_tokens: Spread = Spread(mean=128)
    """Each later one."""
    answer_tokens: Spread = Spread(mean=128)
    reset_s: Spread = Spread(mean=1.0)
    reset_tail: Share = 0.0
    """Share of resets that take `reset_tail_s` instead."""
    reset_tail_s: Spread = Spread(mean=300.0)
    step_s: Spread = Spread(mean=1.0)
    failure: Share = 0.0
    """Share of attempts whose environment breaks at some step."""
    hang: Share = 0.0
    """Share of attempts whose environment stops answering."""
    reward_s: Spread = Spread(mean=0.05)
    success: Share = 0.3
    """Chance of reward 1 under the initial weights; it rises with training."""
    success_gain: Share = 0.5
    """What training adds in the end."""
    success_steps: Positive = 50.0
    """Versions until about two thirds of the gain are there."""
    shift: SimShiftSettings | None = None
    """The task changes in the middle of the run."""

    def at(self, now_s: float) -> "SimTaskSettings":
        """The settings that hold at this time of the run."""
        if self.shift is None or now_s < self.shift.after_s:
            return self
        return self._shifted

    @cached_property
    def _shifted(self) -> "SimTaskSettings":
        assert self.shift is not None
        given = {name: value for name, value in self.shift if name != "after_s" and value is not None}
        return self.model_copy(update={**given, "shift": None})


class SimRewardSettings(Settings):
    """Serverless functions (`rewards.type: http`) in the simulator."""

    cold_start_s: NonNegative = 0.5
    idle_s: NonNegative = 60.0
    """An instance idle for this long is gone."""


class SimTrainSettings(Settings):
    """The trainer in the simulator."""

    fixed_s: NonNegative = 1.0
    """Each step, whatever its tokens."""
    token_s: NonNegative | None = None
    """Each token of the batch, prompts included, instead of the roofline."""
    step_s: NonNegative | None = None
    """The whole step, instead of the roofline."""
    call_s: NonNegative = 0.0
    """For each generate call answered during a step, the step takes longer by this: the coordinator's work, where it
    shares the trainer's core."""
    save_s: NonNegative = 1.0
    restore_s: NonNegative = 5.0


class SimLinkSettings(Settings):
    """Weight links in the simulator, GB/s. The defaults are the paper's measured rates."""

    push_gb_s: Positive = 0.47
    """Trainer to store, once for all engines."""
    pull_gb_s: Positive = 2.1
    """Store to one engine."""


class MeasuredEngineSettings(Settings):
    """What the steps of a pool's engines were measured to cost; `rollart sim fit` writes it."""

    step_s: NonNegative = 0.0
    """Each step, whatever is in it."""
    sequence_s: NonNegative = 0.0
    """For each sequence that decodes in it."""
    kv_token_s: NonNegative = 0.0
    """For each token in the caches of these."""
    prefill_token_s: Positive = 1e-9
    """For each prompt token computed; all that decode wait meanwhile."""

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if not self.step_s + self.sequence_s:
            raise ValueError("sim.engine.measured: a decode step must take time; give step_s or sequence_s")
        return self


class SimEngineSettings(Settings):
    start_s: NonNegative = 30.0
    load_gb_s: Positive = 50.0
    """Staged buckets into place, inside the swap."""
    overhead_s: NonNegative = 0.002
    """Each request, before its prefill."""
    call_s: NonNegative = 0.0
    """Each request, on its way to the engine; nobody else waits for that."""
    chunk_tokens: Count = 2048
    """Prefill tokens beside one decode step."""
    measured: dict[str, MeasuredEngineSettings] = Field(default_factory=dict)
    """By pool: measured costs in place of the roofline. `chunk_tokens` has no effect there."""


FaultKind = Literal[
    "engine_death",
    "engine_hang",
    "engine_restart",
    "env_crash",
    "env_hang",
    "env_slow",
    "reward_error",
    "reward_timeout",
    "trainer_before",
    "trainer_during",
    "trainer_after",
    "bucket_lost",
    "bucket_corrupt",
    "link_slow",
    "link_cut",
    "coordinator_restart",
]


FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


class FaultSettings(Settings):
    """One fault: what, and when. Give `at_s`, or `swap` for the n-th swap."""

    kind: FaultKind
    at_s: NonNegative | None = None
    swap: Annotated[int, Field(ge=1)] | None = None
    """Fire while this swap (counted from 1) is under way."""
    delay_s: NonNegative = 0.0
    """After the swap began."""
    target: Annotated[int, Field(ge=0)] = 0
    """Which engine, counted over all pools; taken modulo their number."""
    count: Count = 1
    """How many environment steps or reward calls it hits."""
    duration_s: Positive = 30.0
    """How long a slow or cut link, or a slow environment step, lasts."""

    @model_validator(mode="after")
    def _when(self) -> Self:
        if (self.at_s is None) == (self.swap is None):
            raise ValueError("sim.faults: each fault needs at_s (seconds) or swap (the n-th swap), and only one")
        return self


class ChaosSettings(Settings):
    """What `rollart sim --chaos` draws from."""

    faults: tuple[Count, Count] = (3, 8)
    """Fewest and most faults in one plan."""
    horizon_s: Positive = 600.0
    """Faults by time are drawn from this span."""
    swaps: Count = 8
    """Faults by swap are drawn from the first so many."""
    variants: tuple[tuple[str, ...], ...] = ()
    """Overrides; each plan takes one of these sets in turn."""


class SimSettings(Settings):
    """The simulated world. Read by `rollart sim` only."""

    profile: str | None = None
    """A YAML file with any of the keys below; what the job says itself wins."""
    model: str = "qwen3-8b"
    """A shape from `rollart.hardware`: qwen3-0.6b, qwen3-8b, qwen3-14b, qwen3-32b, qwen3-235b-a22b."""
    tasks: dict[str, SimTaskSettings] = Field(default_factory=dict)
    """By task name; a task not named here behaves by the defaults."""
    engine: SimEngineSettings = SimEngineSettings()
    train: SimTrainSettings = SimTrainSettings()
    links: SimLinkSettings = SimLinkSettings()
    reward: SimRewardSettings = SimRewardSettings()
    faults: tuple[FaultSettings, ...] = ()
    chaos: ChaosSettings = ChaosSettings()


class Job(Settings):
    """One training job."""

    name: str = Field(pattern=r"^[A-Za-z0-9._+-]+$")
    seed: int = 0
    mode: Mode = "rollart"
    """A bundle of `rollout` settings: sync, sync+, one-off, areal or rollart."""
    model: ModelSettings = ModelSettings()
    tasks: tuple[TaskSettings, ...] = Field(min_length=1)
    rollout: RolloutSettings = RolloutSettings()
    pools: tuple[PoolSettings, ...] = Field(min_length=1)
    rewards: RewardSettings = RewardSettings()
    train: TrainSettings = TrainSettings()
    weights: WeightSettings = WeightSettings()
    cluster: ClusterSettings = ClusterSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    track: TrackSettings = TrackSettings()
    limits: LimitSettings = LimitSettings()
    sim: SimSettings = SimSettings()

    @property
    def engine_pools(self) -> tuple[PoolSettings, ...]:
        return tuple(pool for pool in self.pools if pool.engines)

    @property
    def serving_pools(self) -> tuple[PoolSettings, ...]:
        """Pools whose engines take requests; those that only prefill for others are not among them."""
        prefilling = [pool.engines.prefill for pool in self.pools if pool.engines]
        return tuple(pool for pool in self.engine_pools if pool.name not in prefilling)

    @property
    def train_pool(self) -> PoolSettings:
        wanted = self.train.pool or self.engine_pools[0].name
        return next(pool for pool in self.pools if pool.name == wanted)

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


def min_group_size(task: TaskSettings) -> int:
    return task.min_group_size or max(2, task.group_size // 2)


def _problems(job: Job) -> list[str]:
    """What no single key shows. Each text names the key and the fix."""
    found: list[str] = []
    for kind, names in (("tasks", [t.name for t in job.tasks]), ("pools", [p.name for p in job.pools])):
        for position, name in enumerate(names):
            if name in names[:position]:
                found.append(f"{kind}.{position}.name: {name!r} is used twice; give each its own name")
    pools = [pool.name for pool in job.pools]
    engine_pools = [pool.name for pool in job.serving_pools]
    if not job.engine_pools:
        found.append("pools: no pool has engines; add engines: {count: 1} to one of them")
    if not any(pool.slots for pool in job.pools):
        found.append("pools: no pool has environment slots; add a pool such as {name: environments, slots: 64}")
    for position, pool in enumerate(job.pools):
        if pool.hardware not in HARDWARE:
            near = _nearest(pool.hardware, HARDWARE)
            found.append(
                f"pools.{position}.hardware: {pool.hardware!r} is not known{near}; one of {', '.join(HARDWARE)}"
            )
        if not pool.engines and not pool.slots and job.train.pool != pool.name:
            found.append(
                f"pools.{position}: pool {pool.name!r} has no engines and no slots, and does not train; "
                "give it one of them, or remove it"
            )
    found += _pair_problems(job)
    if job.train.pool is not None and job.train.pool not in pools:
        found.append(
            f"train.pool: there is no pool {job.train.pool!r}{_nearest(job.train.pool, pools)}; "
            f"one of {', '.join(pools)}"
        )
    for position, task in enumerate(job.tasks):
        key = f"tasks.{position}"
        if task.affinity != "auto" and task.affinity not in engine_pools:
            found.append(
                f"{key}.affinity: no pool with engines is called {task.affinity!r}"
                f"{_nearest(task.affinity, engine_pools)}; one of auto, {', '.join(engine_pools)}"
            )
        if task.group_size < 2:
            found.append(
                f"{key}.group_size: {task.group_size} gives no group advantage, which compares members with each "
                "other; set it to 2 or more"
            )
        elif min_group_size(task) > task.group_size:
            found.append(
                f"{key}.min_group_size: {task.min_group_size} is more than group_size {task.group_size}; lower it"
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
    rollout = job.rollout
    if rollout.staleness == 0 and rollout.swap != "between_batches":
        found.append(
            f"rollout.staleness: 0 means on-policy, which swap {rollout.swap!r} cannot keep; "
            "set rollout.swap to between_batches, or rollout.staleness to 1 or more"
        )
    if rollout.rolling and rollout.swap == "drain":
        found.append("rollout.rolling: drain swaps all engines at once; set rolling to 0, or another swap")
    total_engines = sum(pool.engines.count for pool in job.serving_pools if pool.engines)
    if rollout.rolling >= total_engines and rollout.rolling:
        found.append(
            f"rollout.rolling: {rollout.rolling} at a time is all of the {total_engines} engines; "
            "set it to 0 (all at once) or below their number"
        )
    for name in job.sim.tasks:
        if name not in [task.name for task in job.tasks]:
            near = _nearest(name, [task.name for task in job.tasks])
            found.append(f"sim.tasks.{name}: the job has no task of that name{near}; rename or remove it")
    for name in job.sim.engine.measured:
        if name not in engine_pools:
            near = _nearest(name, engine_pools)
            found.append(f"sim.engine.measured.{name}: no pool with engines has that name{near}; rename or remove it")
    if job.sim.model not in MODELS:
        found.append(
            f"sim.model: {job.sim.model!r} is not known{_nearest(job.sim.model, MODELS)}; one of {', '.join(MODELS)}"
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


def _pair_problems(job: Job) -> list[str]:
    """Pools that prefill for other pools."""
    found: list[str] = []
    counts = {pool.name: pool.engines.count for pool in job.pools if pool.engines}
    pairs = {pool.name: pool.engines.prefill for pool in job.pools if pool.engines and pool.engines.prefill}
    for decoding, prefilling in pairs.items():
        key = f"pools.{decoding}.engines.prefill"
        if prefilling not in counts or prefilling == decoding:
            others = [name for name in counts if name != decoding]
            found.append(
                f"{key}: no other pool with engines is called {prefilling!r}{_nearest(prefilling, others)}; "
                f"one of {', '.join(others) or 'none: add a pool with engines'}"
            )
        elif prefilling in pairs:
            found.append(f"{key}: pool {prefilling!r} has its own prefill pool; name one that has none")
        elif list(pairs.values()).count(prefilling) > 1:
            found.append(f"{key}: pool {prefilling!r} prefills for two pools; give each a pool of its own")
        elif counts[prefilling] != counts[decoding]:
            found.append(
                f"{key}: pool {prefilling!r} has {counts[prefilling]} engines and {decoding!r} {counts[decoding]}, "
                "but they work in pairs; make the counts equal (engines.gpus may differ)"
            )
    return found


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file, apply overrides, check it. Raises JobError with one message that names key and fix."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise JobError(f"{path}: is not text; give the path of a job file, such as jobs/rollart.yaml") from None
    except OSError as error:
        raise JobError(
            f"{path}: cannot be read ({error.strerror}); give the path of a job file, such as jobs/rollart.yaml"
        ) from None
    raw = _parse(text, str(path))
    for override in overrides:
        _apply(raw, override)
    return build_job(raw, near=path.parent)


def build_job(raw: Mapping[str, Any], near: Path | None = None) -> Job:
    """A checked job from plain data. `near` is where a relative `sim.profile` is looked up."""
    data = dict(raw)
    mode = data.get("mode", "rollart")
    if isinstance(mode, str) and mode in MODES:
        given = data.get("rollout") or {}
        if isinstance(given, Mapping):
            data["rollout"] = {**MODES[mode], **given}
    sim = data.get("sim")
    if isinstance(sim, Mapping) and isinstance(sim.get("profile"), str):
        profile = (near or Path()) / sim["profile"]
        try:
            loaded = _parse(profile.read_text(encoding="utf-8"), str(profile))
        except UnicodeDecodeError:
            raise JobError(f"sim.profile: {profile} is not text; give the path of a YAML file") from None
        except OSError as error:
            raise JobError(
                f"sim.profile: {profile} cannot be read ({error.strerror}); give a path relative to the job file"
            ) from None
        data["sim"] = {**_merge(loaded, sim), "profile": None}  # it is all here now
    try:
        return Job.model_validate(data)
    except ValidationError as error:
        raise JobError(_explain(error)) from None


def warnings(job: Job) -> list[str]:
    """What is allowed and still unlikely to be wanted."""
    found: list[str] = []
    batches_alive = job.slots / job.rollout.groups_per_step
    weights = sum(task.weight for task in job.tasks if task.quota is None)
    free_groups = job.rollout.groups_per_step - sum(task.quota or 0 for task in job.tasks)
    members = batches_alive * sum(
        (task.group_size + job.rollout.spare_members) * (task.quota or free_groups * task.weight / weights)
        for task in job.tasks
    )
    slots = sum(pool.slots or 0 for pool in job.pools)
    if slots < members:
        found.append(
            f"pools: {slots} environment slots for about {members:.0f} trajectories alive at a time; the rest wait "
            "for a slot and age meanwhile. Raise slots, or lower rollout.groups_per_step"
        )
    if job.rollout.recheck != "live":
        found.append(
            f"rollout.recheck: {job.rollout.recheck!r} lets trajectories grow older than the bound in flight; "
            "the summary shows by how much"
        )
    for position, task in enumerate(job.tasks):
        if task.temperature == 0:
            found.append(
                f"tasks.{position}.temperature: 0 makes all members of a group alike; nothing will be learnt from them"
            )
        if task.name not in job.sim.tasks and job.sim.tasks:
            found.append(f"sim.tasks: {task.name!r} is not described, so it behaves by the defaults in `rollart sim`")
    if job.checkpoint.every > job.train.steps:
        found.append(
            f"checkpoint.every: {job.checkpoint.every} is more than train.steps {job.train.steps}; "
            "a crash replays everything since the start"
        )
    return found


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice; YAML would drop the first one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it does not parse"
        raise JobError(
            f"{where}{line}: not valid YAML ({problem}); check the indentation and the quotes there"
        ) from None
    if not isinstance(raw, dict):
        raise JobError(f"{where}: a job file is a mapping of keys, such as `name: my-job`; this one is not")
    return raw


def _apply(raw: dict[str, Any], override: str) -> None:
    """`rollout.staleness=2`, `tasks.0.group_size=4`: the same names as in the file."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise JobError(f"override {override!r}: write it as key=value, such as rollout.staleness=2")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise JobError(f"override {key}: {text!r} is not a YAML value; quote it") from None
    at: Any = raw
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        here = ".".join(parents[: depth + 1])
        if isinstance(at, list):
            at = at[_index(at, part, override)]
        elif isinstance(at, dict):
            if at.get(part) is None:
                at[part] = {}
            at = at[part]
        if not isinstance(at, dict | list):
            raise JobError(f"override {key}: {here} is a single value in the job, and has no keys below it")
    if isinstance(at, list):
        at[_index(at, last, override)] = value
    else:
        at[last] = value


def _index(items: list[Any], part: str, override: str) -> int:
    if part.isdigit() and int(part) < len(items):
        return int(part)
    for position, item in enumerate(items):
        if isinstance(item, dict) and item.get("name") == part:
            return position
    raise JobError(
        f"override {override!r}: {part!r} is neither a position (0 to {len(items) - 1}) nor a name in that list"
    )


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _nearest(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def _explain(error: ValidationError) -> str:
    """The first problem, in words: `key: what is wrong; the fix`."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    given = first.get("input")
    match first["type"]:
        case "extra_forbidden":
            valid = _keys_at(first["loc"][:-1])
            return f"{key}: unknown key{_nearest(str(first['loc'][-1]), valid)}; valid here: {', '.join(valid)}"
        case "missing":
            return f"{key}: missing; add it (see docs/job.md for what it means)"
        case "value_error":
            return re.sub(r"^Value error, ", "", first["msg"])
        case "literal_error":
            options = str(first.get("ctx", {}).get("expected", "")).replace("'", "")
            near = _nearest(str(given), [option.strip() for option in re.split(r",| or ", options)])
            return f"{key}: {given!r} is not one of {options}{near.rstrip('?')}"
        case "model_type" | "dict_type":
            return f"{key}: {given!r} is not a mapping; write it as {{key: value}}"
        case _:
            return (
                f"{key}: {given!r} does not fit: {first['msg'][0].lower()}{first['msg'][1:]}; change it to such a value"
            )


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    """The keys that are valid at this place of a job."""
    at: Any = Job
    for part in location:
        if isinstance(part, int):
            continue
        if isinstance(at, type) and issubclass(at, BaseModel) and part in at.model_fields:
            at = _model_in(at.model_fields[part].annotation)
    return list(at.model_fields) if isinstance(at, type) and issubclass(at, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    """The settings class inside an annotation such as `tuple[TaskSettings, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None

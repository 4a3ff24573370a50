"""What a job file may say of a run on real hardware, and the defaults: one class for each section.

Pydantic, frozen, unknown keys refused. The docstring below a key is its entry in docs/job.md. `config/job.py` puts the
sections together. It imports nothing heavy.
"""

import math
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rollart.config.changes import Anytime, Fixed, FromNextStep
from rollart.config.paths import Arguments, Code, Model, OnDisk, Place, Program, Template
from rollart.types import ParsedJson

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, le=1)]
Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+:[0-9]{1,5}$")]
"""`host:port`."""

_NORMAL = NormalDist()

Mode = Literal["sync", "sync+", "one-off", "areal", "rollart"]
Swap = Literal["between_batches", "drain", "when_published", "after_batch"]
Recheck = Literal["live", "batch", "start"]
Stepping = Literal["asynchronous", "batched"]
Advantage = Literal["grpo", "dr_grpo", "rloo"]
Algorithm = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++"]
Correction = Literal["bypass", "decoupled", "none"]
WeightLevel = Literal["token", "sequence"]
OverCap = Literal["truncate", "mask"]
Isolation = Literal["inline", "process", "sandbox", "container"]

MODES: dict[str, dict[str, int | str]] = {
    "sync": {"staleness": 0, "swap": "between_batches", "recheck": "live", "stepping": "batched"},
    "sync+": {"staleness": 0, "swap": "between_batches", "recheck": "live", "stepping": "asynchronous"},
    "one-off": {"staleness": 1, "swap": "drain", "recheck": "batch", "stepping": "asynchronous"},
    "areal": {"staleness": 1, "swap": "when_published", "recheck": "start", "stepping": "asynchronous"},
    "rollart": {"staleness": 1, "swap": "after_batch", "recheck": "live", "stepping": "asynchronous"},
}
"""What each mode sets under `rollout`; a key the job gives itself wins."""
BOUND_MODES = ("sync", "sync+", "one-off")
"""Modes that are named after their bound: with another one the name would be wrong, so it is refused."""


def _word(value: Any) -> Any:
    return ("on" if value else "off") if isinstance(value, bool) else value


Word = BeforeValidator(_word)
"""YAML reads on and off as truth values where they stand without quotes."""


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

    @model_validator(mode="after")
    def _is_spread(self) -> Self:
        for key in ("sigma", "low", "high") if self.kind == "constant" else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f".{key}: kind constant is its mean, and nothing else; set kind, or remove it")
        return self

    def value(self, uniform: float) -> float:
        """The value that this share of all draws, in (0, 1), lie below: a draw, where the share is random."""
        kind, mean, sigma = self.kind, self.mean, self.sigma
        if kind == "constant":
            return mean
        if kind == "uniform":
            value = mean + (2 * uniform - 1) * sigma
        else:
            z = _NORMAL.inv_cdf(uniform)
            value = mean + z * sigma if kind == "normal" else mean * math.exp(z * sigma - sigma**2 / 2)
        low, high = self.low, self.high
        return low if value < low else high if value > high else value


class HardwareSettings(Settings):
    """A kind of device of the user's own, as affinity, `rollart sim` and `rollart plan` reckon with it."""

    tflops: Positive
    """Dense, in the model's precision: the peak."""
    memory_gb: Positive
    bandwidth_gb_s: Positive
    """Of its memory: the peak."""
    cost: NonNegative = 1.0
    """Price of an hour, that of an H20 being 1; `pools.cost` wins."""
    matmul: Part = 0.7
    """Share of the peak that large matrix products reach."""
    attention: Part = 0.5
    """The same of attention over a prompt."""
    read: Part = 0.84
    """Share of the memory's peak at which a step reads weights."""
    read_kv: Part = 0.84
    """The same of keys and values."""
    row_gb_s: Positive = 1e9
    """Rate at which weights are read for one sequence alone, where that is less."""
    link_gb_s: Positive = 450.0
    """Between devices of one machine, one way."""
    link_s: NonNegative = 8e-6
    """An all-reduce of two devices, whatever its size."""
    network_gb_s: Positive = 50.0
    """From one machine of eight devices to others, one way."""


class ModelSettings(Settings):
    """The policy model."""

    path: Model = ""
    """A Hugging Face directory; or a model's id on the hub, such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`
    (where there is no folder `Qwen`). `rollart sim` does not read it; everything else needs it."""
    context_tokens: Anytime[Count] = 32_768
    """A trajectory that grows beyond this is truncated. For `rollart train` no more than the model's positions, and an
    embedded pool's `kv_tokens`. On CUDA also no more than a model's sliding window."""
    chat_template: Template = ""
    """Instead of the tokenizer's own: a file of Jinja, or the template itself, which has brackets in it. Models that
    are saved keep their tokenizer's own. Not read by `rollart sim`."""
    chat_template_args: ParsedJson = Field(default_factory=dict)
    """Variables that the chat template reads beside those of every template: `enable_thinking: false`, say. One that it
    does not read is refused. Not read by `rollart sim`."""


class JudgeSettings(Settings):
    """A frozen model that the engines of a pool serve, and that grades (`rewards.pool`). They take part in no swap."""

    path: Model = ""
    """A Hugging Face directory, or an id on the hub. `rollart sim` does not read it."""
    context_tokens: Count = 8192
    """Rubric, episode and answer together. Of an episode that is longer the middle is left out, and the judge is told
    so. Not read by `rollart sim`."""
    chat_template: Template = ""
    """As `model.chat_template`."""
    chat_template_args: ParsedJson = Field(default_factory=dict)
    """As `model.chat_template_args`."""
    listen: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = ""
    """`HOST:PORT`: other jobs reach this judge there, by OpenAI's protocol, as `rewards.url: http://HOST:PORT/v1`.
    Beyond loopback they must show the token of ROLLART_JUDGE_TOKEN. Not read by `rollart sim`."""


class RewardSettings(Settings):
    """Where rewards are computed."""

    type: Literal["local", "http", "judge"] = "local"
    """`local`: functions in processes here. `http`: one behind a URL, such as a serverless function. `judge`: a frozen
    model, behind an OpenAI-compatible endpoint or in a pool of this job."""
    url: str | None = None
    """For `http`: the function's address; `lambda://NAME` is an AWS Lambda function (region and credentials as AWS's
    tools find them), `fc://HOST/PATH` the HTTPS trigger of Alibaba's Function Compute. For `judge`: the endpoint's, up
    to `/v1`."""
    pool: str | None = None
    """For `judge`: the pool whose engines serve it (`pools.N.judge`), instead of `url` and `model`."""
    function: Code | None = None
    """For one that runs here, in `tasks.N.rewards`: the function, as `module:function` or `file.py:function`. Default:
    `score` of the task's own file, or else the sum of what its environment gave."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """In `tasks.N.rewards`: what its share is called among the parts of the reward. Default: its type."""
    weight: float = 1.0
    """In `tasks.N.rewards`: what it is multiplied with before several are summed."""
    model: str | None = None
    """For `judge`, with `url`: the model's name there."""
    rubric: str | None = None
    """For `judge`: what a good answer is, in words. The judge grades from 0 to 10; the reward is that by 10."""
    votes: Count = 1
    """For `judge`: how often it is asked about each episode; the mean counts, and how far they lie apart is the part
    `spread`. Above 1 it is asked at temperature 1, else at 0."""
    max_tokens: Count = 512
    """For `judge`: of its answer; one that thinks aloud needs more."""
    environment: Anytime[tuple[Variable, ...]] = ()
    """For those that run here: names of environment variables that reward functions may see, beside those that every
    program needs. Not read by `rollart sim`."""
    workers: Count = 4
    """For `local`: processes (in `rollart sim`: dedicated devices). For `http` with `on_outage: local`: those that
    stand in; they start when they are needed, and are not in the costs."""
    concurrency: Count = 256
    """For `http` and `judge`: calls under way at a time. `http`: halved when the platform says that it is too much
    (429, 503, or no answer), and raised again by what goes well."""
    hedge: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For `http`: a call that takes longer than this share of the last 256 did is asked a second time beside the first,
    and the first answer counts: 0.95 costs 5 % more calls, and cuts the tail. Default: never. Not read by
    `rollart sim`."""
    timeout_s: Positive = 30.0
    retries: Annotated[int, Field(ge=0)] = 3
    backoff_s: NonNegative = 0.5
    """Wait before the first retry; doubled each time."""
    on_outage: Literal["fail", "wait", "local"] = "fail"
    """For `http`, and `judge` with a url: what becomes of trajectories while the platform is down, which is when one
    has used up its tries and nobody else was answered meanwhile. `fail`: each uses up its own tries, and has failed.
    `wait`: they keep their slots, and wait until it answers again. `local`: they are scored by local workers; `http`
    only."""
    outage_s: Positive = 600.0
    """For `on_outage: wait`: how long a trajectory waits; then it has failed."""
    cost: NonNegative = 0.0
    """Price of an hour, in the unit of `pools.cost`: `local`, of one worker, reserved for the whole run; `http`, of one
    running function, its cold starts included."""
    gb_second_cost: NonNegative = 0.0
    """For `http`: price of a second of one GB of a running function's memory, as platforms of functions have it; it
    comes to `cost`."""
    memory_mb: Count = 512
    """For `http`: memory of one function, for `gb_second_cost`."""
    call_cost: NonNegative = 0.0
    """For `http` and `judge`: price of one call, failed ones included. Of a judge in a pool the engines are paid."""

    @property
    def hour_cost(self) -> float:
        """Of a worker, or of a function that runs."""
        return self.cost + 3600.0 * self.gb_second_cost * self.memory_mb / 1024.0

    @property
    def stand_in(self) -> "RewardSettings | None":
        """The local workers that score while the platform is down, where the job wants that."""
        if self.on_outage != "local":
            return None
        return self.model_copy(update={"type": "local", "url": None, "on_outage": "fail"})

    @property
    def at_once(self) -> int:
        """Calls under way at a time."""
        return self.workers if self.type == "local" else self.concurrency

    @property
    def label(self) -> str:
        return self.name or self.type

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type == "http" and not self.url:
            raise ValueError(".url: type http needs an address, such as http://127.0.0.1:8080")
        if self.type == "judge":
            if bool(self.url) == bool(self.pool):
                raise ValueError(
                    ".url: type judge needs an address, such as http://127.0.0.1:8000/v1, or the pool that serves it; "
                    "give one of them, and only one"
                )
            if self.url and not self.model:
                raise ValueError(".model: missing; say what the judge's model is called at its url")
            if not self.rubric:
                raise ValueError(".rubric: missing; say what a good answer is")
            if self.on_outage == "local":
                raise ValueError(".on_outage: no local worker can do what a judge does; give wait or fail")
        if not self.weight:
            raise ValueError(".weight: 0 makes nothing of the reward; give another number, or remove the reward")
        return self


class AgentSettings(Settings):
    """Who plays a task, where that is not the built-in agent: one of these."""

    use: Code = ""
    """A class, `module:name` or `file.py:name`, with `async def play(self, session)`. It runs in the coordinator."""
    function: Code = ""
    """A function, `module:name` or `file.py:name`, of any agent library. It is given what the environment says, as
    text, calls the model with an OpenAI client, and returns its answer. Where it has a second parameter, that is a
    function with which it steps the environment itself. It runs where the environment does."""
    command: tuple[str, ...] = ()
    """A program and its arguments: it reads what the environment says from its standard input, calls the model with an
    OpenAI client, and prints its answer. It runs where the environment does."""

    @model_validator(mode="before")
    @classmethod
    def _class_alone(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(map(bool, (self.use, self.function, self.command))) != 1:
            raise ValueError(".use: an agent is one of use, function and command; give one of them, and only one")
        return self

    @property
    def is_program(self) -> bool:
        """It reaches the model over the endpoint."""
        return not self.use


class EndpointSettings(Settings):
    """Where agents that are programs reach the model: OpenAI's protocol, a URL and a key for each trajectory."""

    host: str = "127.0.0.1"
    """The address it listens on. With environments on other machines: one of this machine that they reach."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free one."""


class SandboxSettings(Settings):
    """What one environment may use and see, with isolation `sandbox` or `container`."""

    memory_mb: Count = 1024
    """Memory of all its processes together, its /tmp included, where we may make control groups; elsewhere of each."""
    processes: Annotated[int, Field(ge=8)] = 64
    """Processes and threads at a time."""
    cpu_s: Positive = 600.0
    """CPU seconds of one process."""
    cpus: Positive = 1.0
    """CPUs at a time of all its processes together, where we may make control groups. A pod asks for so many too."""
    tmp_mb: Count = 256
    """Size of its /tmp, the only place that can be written to."""
    output_mb: Count = 16
    """Longest answer, largest file, and most that goes to its log."""
    wall_s: Positive = 7200.0
    """From its opening to its end, the model's answers included. Then it is killed, and its attempt fails."""
    read: tuple[Place, ...] = ()
    """Files and folders of the machine that can be read inside, under the same names. The task set's own file or
    package can, and what is installed beside this Python."""


class ContainerSettings(Settings):
    """What isolation `container` runs in."""

    image: str = ""
    """An image by its name, which is on each machine; with `runc` the folder of an unpacked one. It has Python 3.11 or
    newer, and what the task set needs, RollArt's dependencies among it."""
    runtime: Literal["podman", "docker", "runc", "kubernetes"] = "podman"
    """`kubernetes`: a pod of the cluster that `kubectl` on each machine knows, by its own configuration."""
    python: str = "python3"
    """The interpreter, inside."""
    namespace: str = ""
    """Of pods. Default: that of `kubectl`'s context."""
    pod: ParsedJson = Field(default_factory=dict)
    """More of the specification of pods, as Kubernetes spells it, such as `nodeSelector`, `imagePullSecrets` or
    `runtimeClassName`. What is written here never replaces what RollArt sets."""


class TaskLimits(Settings):
    """How long to wait for environments of this task. Default: what the job's `limits` say."""

    open_s: Positive | None = None
    """Waiting for a slot and its start."""
    reset_s: Positive | None = None
    step_s: Positive | None = None


class TaskSettings(Settings):
    """One task set in the mix."""

    name: str = Field(min_length=1)
    """Unique; the affinity key, and the name in all figures."""
    use: Code = ""
    """The task set: `module`, `module:name`, `file.py` or `file.py:name`; or `library:name` for an environment of a
    library (`rollart envs` lists them). `rollart sim` does not read it; everything else needs it."""
    args: Arguments = Field(default_factory=dict)
    """What the task set is made with: the named parameters of its `__init__`, or of the function that makes it, checked
    by their annotations. A text is a path, relative to the job file, where it begins with `./`, `../` or `~/`, or is
    one word that ends in `.py`, `.jsonl`, `.csv`, `.tsv` or `.parquet`. Not read by `rollart sim`."""
    weight: Positive = 1.0
    """Share of the groups, relative to the other tasks' weights."""
    quota: Count | None = None
    """Exactly this many groups in each batch, instead of a share by weight."""
    group_size: Count = 8
    """Trajectories compared with each other."""
    min_group_size: Annotated[int, Field(ge=2)] | None = None
    """A group whose members keep failing closes with no fewer than these. Default: half of `group_size`."""
    max_turns: Anytime[Count] = 32
    max_tokens: Anytime[Count] = 1024
    """Most tokens in one answer."""
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that make up this share. Not read by `rollart sim`; refused with `vllm`."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many of the likeliest tokens; 0 means all. Not read by `rollart sim`; refused with `vllm`."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """An answer ends after any of these texts. Not read by `rollart sim`."""
    environment: Anytime[tuple[Variable, ...]] = ()
    """Names of environment variables that this task's environments may see, beside those that every program needs: an
    API key, say. Its value is never in the job file. Environments of isolation `process` share processes, and so see
    all that any such task names. Not read by `rollart sim`; refused with isolation `inline`, which sees everything."""
    isolation: Anytime[Isolation | None] = None
    """Where its environments run. `inline`: in the coordinator (on the cluster `ray`: in each worker), for cheap and
    trusted ones. `process`: in processes that are used again while they are well. `sandbox`: each in a sandbox of its
    own, made by bubblewrap, without network, secrets and the job's files. `container`: each in a container of its own,
    made from an image, and closed in the same way. Default: what the pool says. Not read by `rollart sim`."""
    sandbox: Anytime[SandboxSettings] = SandboxSettings()
    """Not read by `rollart sim`."""
    container: Anytime[ContainerSettings] = ContainerSettings()
    """Not read by `rollart sim`."""
    warm: Anytime[Annotated[int, Field(ge=0)]] = 0
    """With isolation `sandbox` or `container`: this many are started ahead, on each machine, beside those in the pool's
    slots, and end when none was asked for in a minute. Not read by `rollart sim`."""
    limits: Anytime[TaskLimits] = TaskLimits()
    agent: Anytime[Annotated[AgentSettings | None, OnDisk.CODE]] = None
    """Who plays it. Default: the built-in agent, which shows the model what the environment says and steps with what
    it answers. A text is a class (`agent.use`). Not read by `rollart sim`."""
    rewards: Anytime[tuple[RewardSettings, ...]] = ()
    """Where this task's reward is computed. Several are summed, each times its `weight`, and each is asked again by
    itself where it fails. Default: the job's `rewards`."""
    affinity: Anytime[str] = "auto"
    """The pool that should serve this task; or `auto`: measured, and moved when the load moves; or `any`: each group
    goes to the pool with the fewest of them for its engines, whatever hardware suits the task."""
    latency: Anytime[Spread | None] = None
    """Seconds that each environment step takes longer, drawn anew for each. For comparisons of modes. Not read by
    `rollart sim`, which has `sim.tasks.<name>.step_s`."""

    @property
    def smallest_group(self) -> int:
        """Scored members that are enough to train on."""
        return self.min_group_size or max(2, self.group_size // 2)


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
    surplus: Literal["cancel", "carry"] | None = None
    """What becomes of the groups that are still under way when a batch is formed, beyond those that the bound lets
    later batches use: with `spare_groups`, as many, the oldest first; with staleness 0, all. `cancel`: they are stopped
    at once, and their tasks come again. `carry`: they go on, into a later batch if they are not too old by then.
    Default: `cancel` with staleness 0, else `carry`."""
    late: Literal["abort", "wait"] = "abort"
    """Groups under way that the swap after this batch would make too old. `abort`: they are stopped at that swap.
    `wait`: the batch is not formed before they are ready, so that nothing is thrown away and long trajectories are
    trained on as often as short ones; a slow one then delays the step, up to its time limits. Only with
    `after_batch`."""
    share_tolerance: Share = 0.25
    """How far a task's share of a batch may be from its target, as a share of the batch."""
    zero_variance: Literal["refill", "skip", "keep"] = "refill"
    """A group whose members all earned the same teaches nothing. `refill`: drop it and play another. `skip`: it counts,
    but the trainer passes over it. `keep`: train on it (entropy and KL terms only)."""
    refill_factor: Anytime[Positive] = 4.0
    """A batch goes short once this many times `groups_per_step` groups were filtered for it."""
    max_short_batches: Anytime[Count] = 3
    """The job stops after this many short batches in a row."""

    @property
    def cancels_surplus(self) -> bool:
        """The `surplus` in force."""
        return self.surplus == "cancel" or (self.surplus is None and self.staleness == 0)


class PrefillSettings(Settings):
    """Prefill and decode apart: each engine is then several workers, which load weights together and fail together.
    `embedded`: two processes on the engine's device, one for each, and the cache of a prompt is copied within it."""

    pool: str | None = None
    """The pool whose devices prefill. Default: this one. On the cluster `ray` another pool must name the same machines:
    all workers of an engine run on one."""
    workers: Count = 1
    """Prefill workers of each engine."""
    gpus: Count = 1
    """GPUs of one prefill worker."""
    decoders: Count = 1
    """Decode workers of each engine, with `engines.gpus` and `engines.max_batch` each."""
    connector: str = "NixlConnector"
    """`vllm`: `kv_connector` of its `--kv-transfer-config`. Not read by `rollart sim`."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """`embedded` on CUDA: share of the GPU's multiprocessors that the prefill process may use, beside that of the one
    which decodes (`engines.share`). Both or neither."""
    memory: Annotated[float, Field(gt=0, le=1)] | None = None
    """`embedded` on CUDA: the prefill process's share of the card's memory, beside `engines.memory`; it has weights of
    its own. Default: 0.3. Refused beside `engines.kv_tokens`, which both then have. Not read by `rollart sim`."""
    link_gb_s: Positive = 25.0
    """The link over which a prefill worker sends the cache, GB/s. `rollart sim` simulates it, affinity reckons with
    it; a real run has the link that it has."""


CPU_KV_TOKENS, CPU_DRAFT_TOKENS, CUDA_MEMORY, PREFILL_MEMORY = 65_536, 15, 0.6, 0.3
"""Defaults of the embedded engine that depend on its device."""


class EngineSettings(Settings):
    """The engines of one pool."""

    type: Literal["embedded", "vllm", "sglang"] = "embedded"
    count: Count = 1
    most: Count | None = None
    """Cluster `ray`: engines beyond `count`, up to this many in all, join when a machine of the pool's kind has room
    for them and leave with it. Default: `count`, no more."""
    gpus: Count = 1
    """GPUs of one engine: tensor parallel. Servers on this machine have them to themselves. An `embedded` engine has
    one; more are refused by `rollart train`."""
    parallel: Literal["tensor", "expert"] = "tensor"
    """How these share the model. `tensor`: each layer is split over them. `expert`: the experts are, and the rest is
    whole on each, which has sequences of its own. `rollart train` refuses `expert`: servers have flags of their own for
    it (`args`)."""
    max_batch: Count = 256
    """Sequences one engine works on at a time."""
    prefill: PrefillSettings | None = None
    """Prefill on workers of its own. `rollart train` has it for `embedded` and `vllm` engines, `rollart sim` for all.
    That of `vllm` was not tried on real devices yet."""
    kv_tokens: Count | None = None
    """`embedded`: bound of the cache, in tokens. Default: 65,536 on a CPU, on CUDA what `memory` gives. `rollart sim`
    has by default what the hardware's memory holds, where that is not `cpu`."""
    memory: Annotated[float, Field(gt=0, le=1)] | None = None
    """`embedded` on CUDA: the engine's share of the card's memory, weights included; the cache takes what they leave.
    Default: 0.6. Refused beside `kv_tokens`. Not read by `rollart sim`."""
    stage: Literal["host", "device"] = "host"
    """`embedded` on CUDA: where a version waits for its swap. With `device` it is copied to the GPU beside the steps,
    and the swap is a copy within the GPU; the cache gets less room by a second model. Not run on a GPU yet."""
    step_tokens: Count = 2048
    """`embedded`: tokens computed in one step: decode first, then prefill, then guesses."""
    keep_kv: bool = False
    """`embedded`, `vllm`: keep the cache of requests in flight over a swap instead of computing it again."""
    draft_tokens: Annotated[int, Field(ge=0)] | None = None
    """`embedded`: most tokens guessed ahead for one request in one step, where answers repeat; what is sampled is the
    same. 0 turns it off. Default: 15 on a CPU; on CUDA there are none, and other values are refused."""
    device: str = "cpu"
    """`embedded`: `cpu`, or `cuda`, a GPU of its own for each engine. `vllm`, `sglang`: by default GPUs of their own,
    `gpus` for each engine, where the pool's hardware has any. Or such as `cuda:0`: that one (servers: and those after
    it), shared by all who name it."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the GPU's multiprocessors that each engine's process may use, by NVIDIA's MPS: all that name the same
    `device` then run at the same time. Default: the whole GPU, in turns with other processes. With `cluster` `local`
    only. `rollart sim` and affinity reckon with that part of the hardware."""
    threads: Count = 1
    """CPU threads of one engine's process."""
    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """`embedded`: the CPU cores, by number, that each engine's process keeps to; none given means any."""
    python: Program | None = None
    """`vllm`, `sglang`: the interpreter that has the server. Default: the environment's ROLLART_VLLM_PYTHON or
    ROLLART_SGLANG_PYTHON, else this one."""
    url: str | None = None
    """`vllm`, `sglang`: attach to this server instead of starting one; its key in ROLLART_ENGINE_TOKEN."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the engine computes in, whatever the trainer does. Default: bfloat16 where `device` names a GPU."""
    args: tuple[str, ...] = ()
    """`vllm`, `sglang`: more of the server's own command line, such as [--gpu-memory-utilization, "0.8"]."""

    @model_validator(mode="before")
    @classmethod
    def _precision_of_device(cls, value: Any) -> Any:
        """Decided once: a run that goes on elsewhere does not change it."""
        if isinstance(value, dict) and value.get("dtype") is None and str(value.get("device", "")).startswith("cuda"):
            return value | {"dtype": "bfloat16"}
        return value

    @property
    def cpu_kv_tokens(self) -> int:
        return self.kv_tokens or CPU_KV_TOKENS

    @property
    def memory_share(self) -> float:
        return self.memory or CUDA_MEMORY

    @property
    def most_draft_tokens(self) -> int:
        return CPU_DRAFT_TOKENS if self.draft_tokens is None else self.draft_tokens

    @model_validator(mode="after")
    def _fits(self) -> Self:
        on_cuda = self.device.startswith("cuda")
        if self.type == "embedded" and on_cuda and self.draft_tokens:
            raise ValueError(".draft_tokens: guesses run on a CPU only; remove it, or set device to cpu")
        if self.memory is not None and not on_cuda:
            raise ValueError(".memory: is a share of a GPU's memory; on a CPU set kv_tokens instead")
        if self.share is not None and not on_cuda:
            raise ValueError(".share: is a share of a GPU's multiprocessors; name the GPU, as device: cuda:0")
        if self.stage == "device" and not on_cuda:
            raise ValueError(".stage: device is for engines on a GPU; on a CPU a swap copies nothing, so remove it")
        if self.memory is not None and self.kv_tokens is not None:
            raise ValueError(".memory: beside kv_tokens, which bounds the same cache; remove one of them")
        if self.type == "embedded" and self.step_tokens < self.max_batch:
            raise ValueError(
                f".step_tokens: {self.step_tokens} is less than one token for each request of max_batch "
                f"{self.max_batch}; raise it, or lower max_batch"
            )
        if self.prefill is not None and self.type == "embedded":
            self._pair_fits(self.prefill)
        elif self.prefill is not None and self.prefill.memory is not None:
            raise ValueError(f".prefill.memory: is of embedded engines; {self.type} has flags of its own (args)")
        elif self.prefill is not None and self.prefill.share is not None:
            raise ValueError(
                ".prefill.share: is for embedded engines, which prefill on the GPU that decodes; remove it"
            )
        if self.url is not None and self.count > 1:
            raise ValueError(".url: names one server; set count to 1, and give each further one a pool")
        return self

    def _pair_fits(self, prefill: PrefillSettings) -> None:
        if (prefill.share is None) != (self.share is None):
            raise ValueError(
                ".prefill.share: prefill and decode divide one GPU; set it and engines.share, as 0.5 and 0.48, or none"
            )
        on_cuda, share = self.device.startswith("cuda"), prefill.memory or PREFILL_MEMORY
        if prefill.memory is not None and not on_cuda:
            raise ValueError(".prefill.memory: is a share of a GPU's memory; on a CPU set kv_tokens instead")
        if prefill.memory is not None and self.kv_tokens is not None:
            raise ValueError(".prefill.memory: beside kv_tokens, which bounds the cache of both; remove one of them")
        if on_cuda and self.kv_tokens is None and share + self.memory_share > 1:
            raise ValueError(
                f".prefill.memory: {share:g} beside {self.memory_share:g} to decode (engines.memory) is more "
                "than the card has; lower one of them"
            )

    @property
    def is_pair(self) -> bool:
        """Each engine is two of our own processes."""
        return self.prefill is not None and self.type == "embedded"

    @property
    def prefill_side(self) -> "EngineSettings":
        """Of the process that computes prompts, where `embedded` engines have one."""
        assert self.prefill is not None
        memory = None if self.kv_tokens is not None else self.prefill.memory or PREFILL_MEMORY
        return self.model_copy(update={"prefill": None, "share": self.prefill.share, "memory": memory})

    @property
    def decode_gpus(self) -> int:
        """GPUs of one engine that decode; where prefill is not apart, all."""
        return self.gpus * (self.prefill.decoders if self.prefill else 1)

    @property
    def all_gpus(self) -> int:
        """GPUs of one engine, its prefill workers included."""
        return self.decode_gpus + (self.prefill.workers * self.prefill.gpus if self.prefill else 0)


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
    site: str = ""
    """Weights `tcp`: machines of the same site have a fast network between them. Each bucket crosses once from the
    trainer's machine to a site, and from machine to machine there."""
    engines: EngineSettings | None = None
    judge: JudgeSettings | None = None
    """These engines serve a judge instead of the policy."""
    slots: Count | None = None
    """Environments that run here at a time."""
    slots_per_worker: Count = 32
    """Cluster `ray`: environments in one worker; the workers are spread over the pool's machines, one CPU each."""
    isolation: Isolation = "process"
    """Of the environments of tasks that have no `isolation` of their own."""


CLIP_RANGES: dict[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "reinforce++": (0.2, 0.2),
}
"""(eps_low, eps_high) of each algorithm's authors; the ratio is kept within [1 - eps_low, 1 + eps_high]."""
DEFAULT_WEIGHT_CAP = 2.0
CLIPPING = ("dapo", "gspo", "cispo")
"""Algorithms chosen for how they clip."""


class LoraSettings(Settings):
    """Low-rank adapters, which are trained instead of the weights they stand beside."""

    rank: Count = 32
    alpha: Positive = 64.0
    """What an adapter gives is multiplied with alpha / rank."""
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get one, by the last part of their names; never the output layer."""
    adapter: Model | None = None
    """Adapters to begin with: a directory that peft has written. Default: new ones, which change nothing at first."""


class TrainSettings(Settings):
    """The trainer."""

    type: Anytime[Literal["single", "fsdp2"]] = "single"
    pool: Anytime[str | None] = None
    """The pool whose kind of hardware trains. Default: the first pool that has engines."""
    gpus: Anytime[Count] = 1
    """The trainer's own, beside those of the pool's engines, unless it is `colocated`."""
    colocated: Anytime[bool] = False
    """The trainer has GPUs of its pool's engines, in turns with them, and they are paid once. Only in modes in which
    training and rollout take turns: sync and sync+. A real run keeps both in the memory of the device that both name;
    `rollart sim` charges what it takes to move the trainer's state out and in (`sim.train.host_gb_s`)."""
    steps: FromNextStep[Count] = 100
    lr: FromNextStep[Positive] = 1e-5
    warmup_steps: FromNextStep[Annotated[int, Field(ge=0)]] = 0
    """Steps over which the learning rate rises to `lr`."""
    lr_decay: FromNextStep[Literal["none", "linear", "cosine"]] = "none"
    """How the learning rate falls from `lr` to zero over the job's `steps`."""
    weight_decay: FromNextStep[NonNegative] = 0.0
    adam_eps: FromNextStep[Positive] = 1e-8
    """Added to the root of Adam's second moment."""
    grad_clip: FromNextStep[NonNegative] = 1.0
    """Largest gradient norm; 0 means no clipping."""
    algorithm: Annotated[Algorithm, Fixed("the groups in the checkpoint have their advantages by it")] = "grpo"
    advantage: Annotated[Advantage | None, Fixed("the groups in the checkpoint have their advantages by it")] = None
    """How rewards of a group become advantages. Default: what the algorithm is defined with."""
    eps_low: FromNextStep[Positive | None] = None
    """Lower clip range, below 1 (`cispo`: 1 means no lower end). Default: the algorithm's own."""
    eps_high: FromNextStep[Positive | None] = None
    """Upper clip range; DAPO's clip-higher. Default: the algorithm's own."""
    length_constant: FromNextStep[Count | None] = None
    """`dr_grpo`: what a sequence's sum is divided by instead of its length. Default: 1024."""
    updates_per_step: FromNextStep[Count] = 1
    """Optimizer updates in a step, each on its share of the batch. With more than one the clip range acts under
    `decoupled`, against the weights at the step's beginning, for one more forward pass."""
    correction: FromNextStep[Correction] = "bypass"
    """How samples of older weights are corrected. `bypass`: the ratio is taken to the engine's own log-probabilities,
    and the clip range acts on it. `decoupled`: the ratio is taken to the weights at the step's beginning, and each
    token is weighed by truncated importance sampling; nothing is clipped where a step is one update."""
    weight_cap: FromNextStep[Annotated[float, Field(ge=1)] | None] = None
    """Largest importance weight (`decoupled`) or ratio (`bypass`): truncated importance sampling. Default: 2, or
    twice the top of the clip range where that is higher than 2."""
    weight_level: FromNextStep[WeightLevel] = "token"
    """`decoupled`: one importance weight per token, or one for all tokens of a sequence, the product of theirs
    (sequence-level truncated importance sampling)."""
    over_cap: FromNextStep[OverCap] = "truncate"
    """What is done with a weight beyond `weight_cap`: it is cut to the cap, or its token (its sequence, at that level)
    is left out of the loss (masked importance sampling)."""
    weight_floor: FromNextStep[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    """With `over_cap` `mask`: weights below it are left out as well; 0 leaves none out."""
    kl_coef: FromNextStep[NonNegative] = 0.0
    """Weight of the KL to the `reference`."""
    reference: Annotated[Model | None, Fixed("the KL was taken to it so far")] = None
    """The Hugging Face directory that the KL is taken to. Default: `model.path`."""
    entropy_coef: FromNextStep[NonNegative] = 0.0
    microbatch_tokens: Anytime[Count] = 4096
    """Tokens computed in one forward and backward pass. A longer sample is computed alone."""
    bf16: Annotated[bool | None, Fixed("the checkpoint holds its master weights by it")] = None
    """Compute in bfloat16; gradients add up in float32. Default: on a GPU, not on a CPU."""
    master: Anytime[Literal["float32", "stochastic"]] = "float32"
    """With `bf16`: what updates are added to. `float32`: the weights in float32. `stochastic`: the bfloat16 weights
    themselves, rounded at random, which takes 2 to 4 bytes a weight less; rounding to the nearest would lose small
    updates. Refused with `fsdp2`, whose weights are float32."""
    moments: Anytime[Literal["float32", "bfloat16"]] = "float32"
    """What Adam's moments are kept in. `bfloat16` is rounded at random, and takes 4 bytes a weight less."""
    offload: Anytime[Literal["none", "optimizer"]] = "none"
    """`optimizer`: moments, and what weights have in float32 beyond bfloat16, are in the host's memory, pinned, and
    visit the GPU at each update. Refused with `fsdp2`, and on a CPU."""
    recompute: Anytime[Literal["none", "selective", "full"] | None] = None
    """Layers whose activations are computed again in the backward pass, and not kept. `selective`: as many as a GPU has
    no memory for, at `microbatch_tokens`; on a CPU half of them. Default: `selective` on a GPU, `none` on a CPU."""
    compile: Anytime[Annotated[Literal["auto", "on", "off"], Word]] = "auto"
    """Compile the layers, which takes some ten seconds at the start. `auto`: with `single` on a GPU, where the model
    has 50 million weights or more, and no experts. What cannot be compiled runs as it is, with a warning."""
    lora: Annotated[LoraSettings | None, Fixed("the checkpoint holds adapters of this shape")] = None
    """Train low-rank adapters, and leave the weights as they are: no gradients and no optimizer state of those, and
    only adapters travel to the engines. Refused with `fsdp2`, and with engines that are not `embedded`."""
    device: Anytime[str] = "cpu"
    """`cpu`; `cuda`, GPUs that are the trainer's own; or such as `cuda:0` (several ranks: and those after it), shared
    by all who name it."""
    memory: Anytime[Annotated[float, Field(gt=0, le=1)] | None] = None
    """Share of the GPU's memory that the trainer may take: set it where engines are on the same GPU, so that neither
    depends on who starts first. `recompute` `selective` reckons with it, and a micro-batch that needs more is halved.
    Default: what is free. Refused with `fsdp2`, and on a CPU."""
    share: Anytime[Annotated[float, Field(gt=0, le=1)] | None] = None
    """Share of the GPU's multiprocessors that the trainer's process may use; as `engines.share`. Not read by
    `rollart sim`."""
    threads: Anytime[Count] = 1
    """CPU threads of the trainer's process."""
    cores: Anytime[tuple[Annotated[int, Field(ge=0)], ...]] = ()
    """The CPU cores, by number, that the trainer's process keeps to; none given means any."""

    @model_validator(mode="after")
    def _loss_is_read(self) -> Self:
        """Refuses values that would do nothing; keys that would are refused in `unused.py`."""
        if self.eps_low is not None and self.eps_low >= 1 and self.algorithm not in ("cispo", "rloo"):
            raise ValueError(
                f"train.eps_low: {self.eps_low:g} has no effect with algorithm {self.algorithm}: ratios are above 0, "
                f"and never get down to 1 - eps_low; give less than 1, such as {CLIP_RANGES[self.algorithm][0]:g}"
            )
        given = [key for key in ("eps_low", "eps_high") if getattr(self, key) is not None]
        clips = self.correction == "bypass" or self.updates_per_step > 1
        if (given or self.algorithm in CLIPPING) and not clips and self.algorithm != "rloo":
            what = f"train.{given[0]}" if given else f"train.algorithm: {self.algorithm}"
            raise ValueError(
                f"{what}: has no effect with train.correction {self.correction} and one update a step, where nothing "
                "is ever clipped; set train.correction to bypass, or train.updates_per_step to 2 or more"
            )
        top = 1 + self.clip_range[1]
        if self.correction == "bypass" and self.weight_cap is not None and self.weight_cap < top < math.inf:
            raise ValueError(
                f"train.weight_cap: {self.weight_cap:g} cuts ratios before the clip range of {self.algorithm} does, "
                f"which ends at {top:g}; give {top:g} or more, or lower train.eps_high"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _precision_of_device(cls, value: Any) -> Any:
        """Decided once: a run that goes on elsewhere does not change it."""
        if isinstance(value, dict) and value.get("bf16") is None:
            return value | {"bf16": value.get("device", "cpu") != "cpu"}
        return value

    @model_validator(mode="after")
    def _memory_is_read(self) -> Self:
        """Refuses what would save no memory."""
        if self.master == "stochastic" and not self.uses_bf16:
            raise ValueError(
                "train.master: stochastic rounds to bfloat16, and this trainer computes in float32; set train.bf16, or "
                "remove it"
            )
        for key in ("master", "offload", "memory"):
            if self.type == "fsdp2" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"train.{key}: train.type fsdp2 has its own way, and does not read it; remove it")
        if self.type == "fsdp2" and self.lora is not None:
            raise ValueError("train.lora: train.type fsdp2 trains all weights; set train.type=single, or remove it")
        if self.memory is not None and self.device == "cpu":
            raise ValueError("train.memory: is a share of a GPU's memory; remove it, or set train.device")
        if self.share is not None and self.device == "cpu":
            raise ValueError("train.share: is a share of a GPU's multiprocessors; name the GPU, as train.device=cuda:0")
        if self.offload != "none" and self.device == "cpu":
            raise ValueError("train.offload: on a CPU all is in the host's memory; remove it, or set train.device")
        return self

    @property
    def uses_bf16(self) -> bool:
        """The `bf16` in force."""
        return bool(self.bf16)

    @property
    def clip_range(self) -> tuple[float, float]:
        """(eps_low, eps_high) in force; infinite for `rloo`."""
        low, high = CLIP_RANGES.get(self.algorithm, (math.inf, math.inf))
        return (low if self.eps_low is None else self.eps_low, high if self.eps_high is None else self.eps_high)

    @property
    def cap(self) -> float:
        """The `weight_cap` in force. A cap below the top of the clip range would keep the clip from acting."""
        if self.weight_cap is not None:
            return self.weight_cap
        top = 1 + self.clip_range[1]
        beyond = self.correction == "bypass" and DEFAULT_WEIGHT_CAP < top < math.inf
        return 2 * top if beyond else DEFAULT_WEIGHT_CAP


class WeightSettings(Settings):
    """How weights travel from the trainer to the engines."""

    type: Literal["shm", "files", "tcp", "mooncake", "nccl", "cuda_ipc"] = "shm"
    """`shm`: shared memory of one machine. `files`: Hugging Face directories on a disk all of them share. `tcp`: the
    trainer's machine serves them, and each other machine keeps a copy in its memory. `mooncake`: a Mooncake store has
    them, and each machine with engines keeps a copy in its memory. For `embedded` engines alone: `nccl`, broadcast from
    the trainer's GPU to the engines' (between CPUs by gloo); `cuda_ipc`, in the memory of the one GPU that trainer and
    engines share."""
    path: Place | None = None
    """`files`: the directory, in which each run makes its own. Default: `weights` in the run directory."""
    address: Address = "127.0.0.1:0"
    """`tcp`, `nccl`: where the other machines reach the trainer's, `host:port`. Default: this machine alone."""
    bind: Address | None = None
    """`tcp`, `nccl`: where the trainer's machine listens, if not at `address`: `0.0.0.0:PORT`, say."""
    delta: Annotated[Literal["auto", "off"], Word] = "auto"
    """`tcp`: send only what changed of a bucket, where that is less than half of it, measured for each; or never."""
    master: Address | None = None
    """`mooncake`: its master, `host:port`."""
    metadata: str = "P2PHANDSHAKE"
    """`mooncake`: the address of its metadata service, where it has one."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """`mooncake`: how bytes travel."""
    devices: str = ""
    """`mooncake`: the network cards for `rdma`, as Mooncake names them. Default: those that it finds."""
    segment_mb: Annotated[int, Field(ge=0)] = 0
    """`mooncake`: memory that each machine with engines adds to the store, for at least two versions in all. Default:
    none, as the store has machines of its own."""
    bucket_mb: Count = 1024

    @model_validator(mode="after")
    def _has_master(self) -> Self:
        if self.type == "mooncake" and self.master is None:
            raise ValueError("weights.master: mooncake needs the address of its master, as master: 10.0.0.1:50051")
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
    coordinators: Count = 1
    """Above 1: the rollout is divided between so many coordinators, each a process with its part of every pool's
    engines and environments, and of the calls of rewards. The first one admits groups, trains, and swaps."""


class CheckpointSettings(Settings):
    every: Count = 10
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=2)] = 2
    """The newest ones stay; older ones are removed as new ones are written."""


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
    """The event log, and where metrics go beside `metrics.jsonl`; all but `events_mb` is read by `rollart train`
    only."""

    events_mb: Count = 1024
    """`events.jsonl` goes on in a new file at this size; the older parts stay, as `events-000001.jsonl` and so on, and
    every command reads them as one log. They may be compressed with gzip."""

    tensorboard: bool = False
    """Event files in the run directory's `tensorboard/`."""
    wandb: Annotated[Literal["off", "offline", "online"], Word] = "off"
    """`offline` writes into the run directory (`wandb sync` sends it later); `online` needs WANDB_API_KEY."""
    project: str = "rollart"
    """W&B's project."""


class TrajectorySettings(Settings):
    """Finished trajectories, kept in the run directory for `rollart show`; read by `rollart train` and `eval` only."""

    keep: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the groups (and of the held-out episodes) that is kept, drawn by their ids; 0 means none."""
    total_mb: Count | None = 4096
    """Most that they take on disk: then the oldest files go. `null` keeps all."""


class LimitSettings(Settings):
    """How long to wait for others, and how often to try again."""

    generate_s: Positive = 1800.0
    """A request that takes longer, from its sending to its answer, is aborted, and its attempt fails."""
    progress_s: Positive = 600.0
    """An engine that has requests and computes nothing for this long is taken for hung: it is started again, and its
    requests are sent again. Longer than the longest prefill, which servers say nothing during."""
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
    """Restarts in a row before the job stops; a finished step resets the count. Those for data that several ranks
    cannot compute are not counted."""
    task_failures: Annotated[int, Field(ge=1, le=1000)] = 5
    """Groups (or draws) of one task that fail in a row before the task is taken out of the mix."""
    task_probe_s: Positive = 10.0
    """Then one group of it is tried again after this long; doubled each time, up to 10 minutes."""
    task_probes: Count = 3
    """Such tries that fail in a row, of each task, when no task is left, before the job stops."""
    store_full_s: Positive = 1800.0
    """How long to wait for room where the disk or the weight store is full, trying again, before the job stops."""
    stall_s: Positive = 900.0
    """Nothing has moved for this long: the watchdog names who waits on whom."""
    lag_s: Positive = 120.0
    """An engine, a task or a trajectory that has not moved for this long, and for ten times longer than its peers, is
    named in a warning."""

    @model_validator(mode="after")
    def _engine_before_request(self) -> Self:
        if self.progress_s > self.generate_s / 2:
            raise ValueError(
                f"limits.progress_s: {self.progress_s:g} is more than half of limits.generate_s {self.generate_s:g}, "
                f"so requests of a hung engine would fail before it is found; set limits.progress_s to "
                f"{self.generate_s / 2:g} or less, or raise limits.generate_s"
            )
        return self

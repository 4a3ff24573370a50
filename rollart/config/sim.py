"""The `sim:` section of a job file: how simulated tasks, engines, links and trainers behave, and what breaks when."""

import math
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from rollart.config.paths import Place
from rollart.config.settings import Count, NonNegative, Positive, Settings, Share, Spread
from rollart.config.shapes import known_shape
from rollart.hardware import RUNTIMES, EngineCosts, ModelShape, Runtime


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
    step_tail: Share = 0.0
    """Share of steps that take `step_tail_s` instead. One that takes longer than `limits.step_s` is given up."""
    step_tail_s: Spread = Spread(mean=60.0)
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
    """Steps until about two thirds of the gain are there. `sim.train.age_discount` says what a step is worth."""
    call_mb: Spread = Spread()
    """What one environment call sends and gets, observation and state, over `sim.links.calls_gb_s`."""
    reward_mb: Spread = Spread()
    """What one reward call does."""
    image_gb: NonNegative = 0.0
    """Of an environment's image: pulled when one opens, where `sim.images` does not have it."""
    images: Count = 1
    """Different ones; the problems of the task have them in turn, and a group has one."""
    shift: SimShiftSettings | None = None
    """The task changes in the middle of the run."""

    def chance(self, steps: float) -> float:
        """Of reward 1, after so many steps on trajectories of no age."""
        return self.success + self.success_gain * -math.expm1(-steps / self.success_steps)

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


class SimControlSettings(Settings):
    """The coordinators' own time in the simulator: each has one core, on which calls wait for each other."""

    call_s: NonNegative = 0.0
    """Of who plays the trajectory, for each generate call. What it does itself is measured by
    `python -m benchmarks.control`, what a link adds by `python -m benchmarks.cluster`."""
    news_s: NonNegative = 0.0
    """Of the first coordinator, for each generate call in another one (`cluster.coordinators`): it reads what happened
    there. Measured by `python -m benchmarks.shards`."""


class SimRewardSettings(Settings):
    """Serverless functions (`rewards.type: http`) in the simulator."""

    cold_start_s: NonNegative = 0.5
    idle_s: NonNegative = 60.0
    """An instance idle for this long is gone."""
    quota: Count | None = None
    """Instances that the platform runs at a time for these rewards; further calls wait for one. Default: no limit."""
    others_per_s: NonNegative = 0.0
    """Calls of other jobs, which share the quota: so many come in a second, at random. What is busy with them on
    average is this times `others_s`; at the quota, calls wait longer and longer."""
    others_s: Spread = Spread(mean=1.0)
    """What one of these takes."""


class SimImageSettings(Settings):
    """The images of environments in the simulator (`sim.tasks.<name>.image_gb`)."""

    cache_gb: NonNegative = 1000.0
    """Kept on the machines with environments, in all; the image unused longest goes first. One in use stays."""
    pull_gb_s: Positive = 1.0
    """From where images are kept: all pulls under way share it evenly."""


class SimJudgeSettings(Settings):
    """The judge of one pool (`pools.N.judge`) in the simulator."""

    model: str = "qwen3-8b"
    """A shape, or a folder, as `sim.model`."""
    prompt_tokens: Spread = Spread(mean=256)
    """The rubric and what is said around the episode; the episode itself comes to that."""
    answer_tokens: Spread = Spread(mean=64)
    others: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of its engines' time that calls of other jobs take; those of this one take as much longer."""


class SimTrainSettings(Settings):
    """The trainer in the simulator."""

    fixed_s: NonNegative = 1.0
    """Each step, whatever its tokens."""
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.7
    """What `train.gpus` devices reach together, as a share of as many single ones: communication, padding, waiting for
    the slowest. 0.7 makes about 40 % of peak."""
    tensor: Count = 1
    """Tensor parallel: devices that share every layer, and send its results to each other over their links."""
    expert: Count = 1
    """Expert parallel: devices that the experts of a layer are split over, and send tokens to."""
    token_s: NonNegative | None = None
    """Each token of the batch, prompts included, instead of what the hardware takes."""
    step_s: NonNegative | None = None
    """The whole step, instead of what the hardware takes."""
    call_s: NonNegative = 0.0
    """For each generate call answered during a step, the step takes longer by this: the coordinator's work, where it
    shares the trainer's core."""
    host_gb_s: Positive = 25.0
    """With `train.colocated`: from the memory of each GPU to its host's and back. Weights reach the engines that way
    too, not over `sim.links`."""
    state_bytes: NonNegative = 14.0
    """With `train.colocated`: what goes there before engines have the GPU again, and comes back before the next step,
    for each parameter. 14: weights in bfloat16, and in float32 with two moments."""
    age_discount: Share = 0.0
    """By so much less a trajectory teaches for each version between the weights that began it and those that train on
    it, down to nothing. An assumption, which no run has measured: 0 lets old ones count whole."""
    save_s: NonNegative = 1.0
    restore_s: NonNegative = 5.0


class SimLinkSettings(Settings):
    """Weight links in the simulator, GB/s. The defaults are the paper's measured rates."""

    push_gb_s: Positive = 0.49
    """Trainer to store, once for all engines."""
    pull_gb_s: Positive = 2.2
    """Store to one engine."""
    shared_pull_gb_s: Positive | None = None
    """All pulls together: engines that pull at the same time share it evenly. Default: no limit."""
    calls_gb_s: Positive | None = None
    """Environment and reward calls: all that are under way share it evenly. Default: they travel for nothing."""
    blocking: bool = False
    """A baseline: nothing else is done while weights travel. Engines and trainer stand still for the push, and the pull
    begins only with the swap."""


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
    prompt_step_s: NonNegative = 0.0
    """For each step in which prompts are computed."""
    launch_s: NonNegative = 0.0
    """The least that such a step takes: on a GPU the host starts its kernels one by one, and the device waits for it
    where there is little to compute."""

    def costs(self, kv_tokens: int) -> EngineCosts:
        """With memory for this many tokens."""
        return EngineCosts(
            fixed_s=self.step_s,
            sequence_s=self.sequence_s,
            dense_read_s=0.0,
            experts_read_s=0.0,
            expert_share=0.0,
            token_s=0.0,
            head_s=0.0,
            passed_s=self.prefill_token_s,
            reduced_s=0.0,
            kv_token_s=self.kv_token_s,
            attention_s=0.0,
            kv_tokens=kv_tokens,
            prompted_s=self.prompt_step_s,
            launched_s=self.launch_s,
        )

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if not self.step_s + self.sequence_s:
            raise ValueError("sim.engine.measured: a decode step must take time; give step_s or sequence_s")
        return self


class SimEngineSettings(Settings):
    start_s: NonNegative = 30.0
    load_gb_s: Positive = 50.0
    """Staged buckets into place, inside the swap."""
    load_whole: bool = False
    """Each GPU of an engine reads all of the weights and keeps its part, and the eight GPUs of a machine share
    `load_gb_s`: a server's own loader, from the host's memory. Else each reads its part at that rate."""
    call_s: NonNegative = 0.0
    """Each request, on its way to the engine; nobody else waits for that."""
    chunk_tokens: Count = 8192
    """Tokens of one step, those of prompts included (vLLM's `--max-num-batched-tokens`)."""
    step_s: NonNegative | None = None
    """What the engine's software adds to each step. Default: by the type of the pool's engines, as measured."""
    layer_s: NonNegative | None = None
    """For each layer of the model, in each step. Default: by the type of the pool's engines, as measured."""
    sequence_s: NonNegative | None = None
    """For each sequence of a step. Default: by the type of the pool's engines, as measured: 5e-6 `embedded`, 55e-6
    `vllm` of 2025; 8e-6 for newer ones."""
    measured: dict[str, MeasuredEngineSettings] = Field(default_factory=dict)
    """By pool: measured costs in place of those of the hardware."""

    def runtime(self, kind: str) -> Runtime:
        """What engines of this type add to a step."""
        given = {
            name: value for name in ("step_s", "layer_s", "sequence_s") if (value := getattr(self, name)) is not None
        }
        return replace(RUNTIMES[kind], **given)


FaultKind = Literal[
    "engine_death",
    "engine_hang",
    "engine_restart",
    "bad_answer",
    "env_crash",
    "env_hang",
    "env_slow",
    "reward_error",
    "reward_timeout",
    "reward_outage",
    "trainer_before",
    "trainer_during",
    "trainer_after",
    "untrainable_batch",
    "bucket_lost",
    "bucket_corrupt",
    "link_slow",
    "link_cut",
    "coordinator_restart",
    "slow_answer",
    "refused_observation",
    "failing_task",
    "full_store",
    "shard_death",
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
    """Which engine, counted over all pools, or which task; taken modulo their number."""
    count: Count = 1
    """How many answers, environment steps, observations or reward calls it hits."""
    duration_s: Positive = 30.0
    """How long a slow or cut link, a slow environment step or answer, a task that fails, a platform of reward functions
    that is down, or a full store lasts."""

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
    """Faults by swap are drawn from the first this many."""
    variants: tuple[tuple[str, ...], ...] = ()
    """Overrides; each plan takes one of these sets in turn."""


class SimSettings(Settings):
    """The simulated world. Read by `rollart sim` only."""

    profile: Place | None = None
    """A YAML file with any of the keys below; what the job says itself wins. It may describe more tasks than the job
    has."""
    model: str = "qwen3-8b"
    """A shape from `rollart.hardware`: qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-14b, qwen3-32b, qwen3-30b-a3b,
    qwen3-235b-a22b. Or a folder with the config.json of a Hugging Face model; no weights are read but for their
    number."""
    tasks: dict[str, SimTaskSettings] = Field(default_factory=dict)
    """By task name; a task not named here behaves by the defaults."""
    control: SimControlSettings = SimControlSettings()
    engine: SimEngineSettings = SimEngineSettings()
    train: SimTrainSettings = SimTrainSettings()
    links: SimLinkSettings = SimLinkSettings()
    reward: SimRewardSettings = SimRewardSettings()
    images: SimImageSettings = SimImageSettings()
    judges: dict[str, SimJudgeSettings] = Field(default_factory=dict)
    """By pool; a judge that is not named here behaves by the defaults."""
    faults: tuple[FaultSettings, ...] = ()
    chaos: ChaosSettings = ChaosSettings()

    @property
    def shape(self) -> ModelShape:
        return known_shape(self.model)

"""What a run can say: one struct per kind of event. `docs/events.md` is made from this file by `make docs`.

A line of `events.jsonl` is one struct as JSON: `e` is its kind, the other keys are its fields. A field with a default
is left out of the line where it has that value. The docstring of a struct says what happened, who writes it (`By:`,
modules below `rollart/`) and what led to it (`Cause:`); the docstring below a field says what the field holds.

No struct is part of a reference cycle: they hold text, numbers, and lists and mappings of those. So none is tracked by
the garbage collector.
"""

from collections.abc import Mapping

import msgspec


class Value(msgspec.Struct, kw_only=True, gc=False):
    """A value inside an event."""


class Event(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True, tag_field="e"):
    """What every event has. `EventLog.emit` sets `n` and `t`."""

    n: int = -1
    """Sequence number, from 0, without gaps."""
    t: float = -1.0
    """Seconds since the run began, on the run's clock (virtual in `rollart sim`)."""
    cause: int = -1
    """The `n` of the earlier event that led to this one. Not there where none is named."""

    def same_as(self, other: "Event | None") -> bool:
        """Whether both say the same, whenever they do."""
        return other is not None and self == msgspec.structs.replace(other, n=self.n, t=self.t, cause=self.cause)


def task_set(task: str) -> str:
    """The name of the task set that a task is of: `maths` of `maths/17`."""
    return task.split("/", 1)[0]


def attempt_of(call: str) -> str:
    """The attempt that a generate call is of: `g7.3.0` of `g7.3.0/2`."""
    return call.rpartition("/")[0]


def group_of(attempt: str) -> str:
    """The group that an attempt is of: `g7` of `g7.3.0`."""
    return attempt.rsplit(".", 2)[0]


# --- Values inside events -------------------------------------------------------------------------------------------


class TaskFacts(Value):
    """One task of the job, as readers of events know it."""

    share: float
    """Of the groups of a step."""
    group_size: int
    """Members of a group."""
    min_group_size: int
    """Members that are enough to train on."""
    affinity: str
    """The pool it was given, or `auto`."""


class PrefillFacts(Value):
    """The prefill workers of a pool's engines."""

    pool: str
    """Whose devices they have."""
    workers: int
    """Of each engine."""
    gpus: int
    """Of each worker."""


class PoolFacts(Value):
    """One pool of the job."""

    hardware: str
    """Its kind of device."""
    cost: float
    """Of one device for an hour."""
    engines: int
    """Engines at the start."""
    gpus: int
    """Of each engine, prefill workers not counted."""
    prefill: PrefillFacts | None
    """Where prefill is apart from decode."""
    slots: int
    """Environments at a time."""
    judge: bool = False
    """Its engines serve a judge: no swap reaches them, and their calls are in `reward` events only."""


class TrainFacts(Value):
    """What trains."""

    pool: str
    """Where."""
    gpus: int
    """How many devices."""
    cost: float
    """Of one device for an hour."""


class RewardCost(Value):
    """What scoring costs."""

    hour: float
    """Of a worker, or of a function while it runs."""
    call: float
    """Of one call."""


class RewardFacts(Value):
    """One reward."""

    type: str
    """`type` of it."""
    workers: int | None
    """Reserved for it; null where functions are called."""
    cost: RewardCost
    """What it costs."""
    pool: str = ""
    """Of a judge that has engines of this job."""
    votes: int = 1
    """Of a judge: how often it is asked about each episode."""
    weight: float = 1.0
    """Of a task's own: what its score is multiplied with."""


class Change(msgspec.Struct, array_like=True, gc=False):
    """One setting that a resumed run has otherwise, as a pair: `[before, after]`."""

    before: object
    """Its value so far, as in a job file."""
    after: object
    """Its value from now on."""


class Wait(Value):
    """One wait of the control plane."""

    who: str
    """What waits: a call, a group, a worker."""
    what: str
    """What it waits on."""
    for_s: float
    """For how long."""


class Profile(Value):
    """What one trajectory of a task needs, measured."""

    prompt_tokens: float
    """Of all its calls together."""
    new_tokens: float
    """Of these, not part of an earlier call."""
    cached_tokens: float
    """Of these, found in a cache."""
    prefill_tokens: float
    """Prompt tokens that were computed."""
    decode_tokens: float
    """Sampled."""
    decode_spread: float
    """Standard deviation of the sampled tokens, as a share of their mean."""
    turns: float
    """Generate calls."""
    context_tokens: float
    """Held in the cache by one call, on average over its calls."""
    elsewhere_s: float
    """Seconds outside the engines."""
    trajectories: int
    """How many the average is of."""


class Alone(Value):
    """What a pool would do with one task and nothing else, predicted."""

    step_s: float | None
    """Seconds for the task's part of a step; null: never."""
    trajectory_s: float | None
    """Seconds of one trajectory."""


class Rate(Value):
    """How fast a pool's engines are at one kind of work, beside the table of the hardware."""

    table_s: float
    """Seconds of one decode step, or of one prompt token, by the table, at the batch and context that were met."""
    measured_s: float
    """What it took."""
    factor: float
    """Measured by predicted: the median of the newest windows of steps."""
    units: int
    """Decode steps, or prompt tokens, that were seen in all."""
    windows: int
    """Windows of these."""
    believed: bool
    """Enough was seen: predictions use the factor. Before, the table stands."""


class Speed(Value):
    """What was measured of a pool's engines."""

    prefill: Rate | None
    """Of prompt tokens; null: none was seen yet."""
    decode: Rate | None
    """Of steps without prompts; null: none was seen yet."""


# --- The job --------------------------------------------------------------------------------------------------------


class Run(Event, tag="run", kw_only=True):
    """Always the first: what readers need to know of the job.

    By: launch/driver
    """

    name: str
    """Of the job."""
    mode: str
    """Of the job."""
    seed: int
    """Of every draw."""
    clock: str
    """`virtual` or `real`."""
    bound: int
    """`rollout.staleness`."""
    recheck: str
    """`rollout.recheck`."""
    swap: str
    """`rollout.swap`."""
    rolling: int
    """`rollout.rolling`."""
    slots: int
    """Groups that may be alive at a time."""
    groups_per_step: int
    """Groups of a batch."""
    steps: int
    """`train.steps`."""
    task_failures: int
    """`limits.task_failures`."""
    tasks: dict[str, TaskFacts]
    """What is known of each."""
    pools: dict[str, PoolFacts]
    """What is known of each."""
    train: TrainFacts
    """What trains."""
    rewards: str
    """The types of all rewards."""
    reward: RewardFacts
    """Of tasks that have none of their own; without workers where all have."""
    task_rewards: dict[str, dict[str, RewardFacts]] = {}
    """By task and name: the rewards of tasks that have their own."""
    store_full_s: float
    """`limits.store_full_s`."""
    breaks: bool
    """Simulated environments fail or hang by themselves."""


class Starting(Event, tag="starting", kw_only=True):
    """Engines, and the trainer, are being started.

    By: control/coordinator
    """

    engines: int
    """How many."""


class Started(Event, tag="started", kw_only=True):
    """All are up.

    By: control/coordinator
    Cause: `starting`
    """

    engines: list[str]
    """Their ids."""


class Checkpoint(Event, tag="checkpoint", kw_only=True):
    """Committed to the journal.

    By: control/learner
    """

    step: int
    """The next step."""
    ready: list[str]
    """Groups it holds that are ready."""
    open: list[str]
    """Groups it holds that are open."""


class Finished(Event, tag="finished", kw_only=True):
    """The last step is done.

    By: control/coordinator, control/learner
    """

    steps: int
    """How many there were."""


class Interrupted(Event, tag="interrupted", kw_only=True):
    """The user stopped it (Ctrl-C, SIGTERM) after the step under way, with a checkpoint.

    By: control/learner
    """

    step: int
    """The next step."""


class Stopped(Event, tag="stopped", kw_only=True):
    """The job gave up.

    By: launch/driver
    """

    reason: str
    """Why."""
    deadlock: bool = False
    """Nothing could ever move again."""
    full: bool = False
    """There was no room to write for `limits.store_full_s`."""
    user: bool = False
    """The user stopped it at once, so there is no checkpoint of this moment."""


class Killed(Event, tag="killed", kw_only=True):
    """Simulated: a fault killed the coordinator, and all workers with it. Real: a resumed run begins here.

    By: launch/driver, launch/training
    """


class Changed(Event, tag="changed", kw_only=True):
    """A resumed run has other settings.

    By: launch/training
    """

    step: int
    """Settings of train steps act from this step on."""
    changes: dict[str, Change]
    """The keys that changed."""
    job: Run
    """What `run` said, as it is now."""


class WorkerLost(Event, tag="worker.lost", kw_only=True):
    """Real: a process died by itself, at work or idle.

    By: control/shard, launch/training
    """

    worker: str
    """An engine's id, `trainer`, `env-3` or `reward-0`."""
    reason: str
    """What is known of its death."""


class Resumed(Event, tag="resumed", kw_only=True):
    """A new coordinator goes on from a checkpoint and the batches written since.

    By: control/learner
    Cause: `starting`
    """

    step: int
    """It goes on at this step."""
    checkpoint: int
    """The step of the checkpoint."""
    ready: list[str]
    """Groups the checkpoint holds that are ready."""
    open: list[str]
    """Groups the checkpoint holds that are open."""
    out: list[str]
    """Tasks that are out of the mix."""


class StoreFull(Event, tag="store.full", kw_only=True):
    """The disk or the weight store has no room: it is tried again for `limits.store_full_s`.

    By: control/room
    """

    what: str
    """What finds no room."""
    reason: str
    """The error."""


class StoreRoom(Event, tag="store.room", kw_only=True):
    """It is written.

    By: control/room
    Cause: `store.full`
    """

    what: str
    """What is written."""
    waited_s: float
    """Since the first try."""


class Warning(Event, tag="warning", kw_only=True):
    """Not fatal, worth reading.

    By: control/context, control/weights, launch/shard, launch/training
    Cause: from env_manager: the attempt's last event; from room and watchdog: `store.full` and `lagging`
    """

    text: str
    """For people."""


class Stall(Event, tag="stall", kw_only=True):
    """Nothing has moved for `limits.stall_s`.

    By: control/watchdog
    """

    text: str
    """For people."""
    waiting: list[Wait]
    """Who waits, the longest first."""


class Lagging(Event, tag="lagging", kw_only=True):
    """One engine, task or trajectory has not moved for far longer than its peers.

    By: control/watchdog
    """

    kind: str
    """`engine`, `task` or `trajectory`."""
    name: str
    """Which."""
    for_s: float
    """For how long it has not moved."""
    peers_s: float
    """The same of its peers: of the one in the middle."""
    what: str
    """What it waits on, where that is known."""


class Deadlock(Event, tag="deadlock", kw_only=True):
    """Nothing can ever move again.

    By: control/watchdog
    """

    text: str
    """For people."""
    waiting: list[Wait]
    """Who waits, the longest first."""


# --- One trajectory -------------------------------------------------------------------------------------------------


class Start(Event, tag="start", kw_only=True):
    """An attempt begins.

    By: control/env_manager
    Cause: the group's `admit`
    """

    id: str
    """Of the attempt."""
    task: str
    """Name and number."""
    pool: str
    """The one it should stay on."""
    eval: bool
    """Of an evaluation: never trained on."""


class Send(Event, tag="send", kw_only=True):
    """A generate call goes to an engine.

    By: control/proxy
    Cause: the attempt's last event
    """

    id: str
    """Of the call."""
    engine: str
    """Where it goes."""
    pool: str
    """Of that engine."""
    want: str
    """The pool of its attempt."""
    version: int
    """That the engine serves."""
    why: str
    """`session`, `least_loaded` or `fallback`."""
    prompt: int
    """Tokens."""
    fallback: str = ""
    """The reason, only where the pool is not the wanted one."""


class Said(Event, tag="said", kw_only=True):
    """The answer.

    By: control/proxy
    Cause: that of its `send`
    """

    id: str
    """Of the call."""
    engine: str
    """Whose answer it is."""
    tokens: int
    """Sampled."""
    spans: list[tuple[int, int]]
    """Pairs of version and token count."""
    prefill: int
    """Prompt tokens computed."""
    cached: int
    """Prompt tokens found in the cache."""
    busy_s: float
    """Its share of engine time."""
    finish: str
    """`stop`, `length` or `abort`."""
    prefill_busy_s: float | None = None
    """Seconds of a prefill worker, only where prefill is apart from decode."""


class Lost(Event, tag="lost", kw_only=True):
    """The engine was lost with this call; it is sent again.

    By: control/proxy
    Cause: that of its `send`
    """

    id: str
    """Of the call."""
    engine: str
    """That was lost."""
    reason: str
    """Why."""


class Refused(Event, tag="refused", kw_only=True):
    """An answer that cannot be believed: a log-probability that is not finite or above 0, spans that go back, counts
    that differ. Its attempt fails; the engine stays, unless eight in a row were refused.

    By: control/proxy
    Cause: that of its `send`
    """

    id: str
    """Of the call."""
    engine: str
    """Whose answer it was."""
    reason: str
    """What is wrong with it."""


class RewardCall(Value):
    """The call of one of several rewards that was answered."""

    s: float
    """Seconds from the call to the answer."""
    busy_s: float
    """Seconds the function itself ran, or the judge's engines; 0 where the backend does not know."""
    cold_s: float
    """Seconds of starting a function instance."""
    tries: int
    """Until it was answered; each that failed is a `reward.failed`."""
    made: int = 1
    """Calls of the last try: several where a slow one was asked again beside it or a judge votes, none where the judge
    had graded the same before."""
    local: bool = False
    """By the local workers that stand in while the platform is down."""


class Reward(Event, tag="reward", kw_only=True):
    """An attempt is scored.

    By: control/scoring
    Cause: the attempt's last event
    """

    id: str
    """Of the attempt."""
    value: float
    """The reward."""
    s: float
    """Seconds from the call to the answer."""
    busy_s: float
    """Seconds the function itself ran, or the judge's engines; 0 where the backend does not know."""
    cold_s: float
    """Seconds of starting a function instance."""
    tries: int
    """Until it was answered; each that failed is a `reward.failed`."""
    made: int = 1
    """Calls of the last try: several where a slow one was asked again beside it or a judge votes, none where the judge
    had graded the same before."""
    parts: Mapping[str, float] = {}
    """Its named parts, only where the function gave any."""
    local: bool = False
    """By the local workers that stand in while the platform is down; of several, at least one."""
    calls: list[RewardCall] = []
    """Of a task with rewards of its own: each, in the order of `tasks.N.rewards`. `s` and `tries` are then those of the
    slowest, and `made` is the sum."""


class RewardFailed(Event, tag="reward.failed", kw_only=True):
    """One try to score failed; tried again up to `rewards.retries` times.

    By: control/scoring
    Cause: the attempt's last event
    """

    id: str
    """Of the attempt."""
    reason: str
    """Why."""
    reward: str = ""
    """Which, of a task with rewards of its own."""
    s: float = 0.0
    """Seconds from the call to its failure."""
    made: int = 1
    """Calls; none where nobody was reached."""
    busy_s: float = 0.0
    """Seconds of a judge's engines."""


class RewardGivenUp(Event, tag="reward.given_up", kw_only=True):
    """A reward cannot be had: its attempt has failed.

    By: control/scoring
    Cause: the last `reward.failed` of the attempt
    """

    id: str
    """Of the attempt."""
    reason: str
    """Why, of the last try."""
    tries: int
    """In all."""
    kept: bool
    """Its request is in the run directory, for `rollart reward replay`."""
    reward: str = ""
    """Which, of a task with rewards of its own."""


class RewardOutage(Event, tag="reward.outage", kw_only=True):
    """Those who compute a reward are down: one trajectory used up its tries, and nobody else was answered meanwhile.

    By: control/scoring
    Cause: the last `reward.failed` of that trajectory
    """

    reward: str
    """Which: `rewards`, or where it stands in the job."""
    policy: str
    """`rewards.on_outage`: what becomes of trajectories until they are back."""
    reason: str
    """Why the last try failed."""


class RewardBack(Event, tag="reward.back", kw_only=True):
    """Those who compute a reward answer again.

    By: control/scoring
    Cause: the attempt's last event
    """

    reward: str
    """Which: `rewards`, or where it stands in the job."""
    s: float
    """Seconds since the first try that nobody answered."""


class End(Event, tag="end", kw_only=True):
    """An attempt is over.

    By: control/env_manager
    Cause: the attempt's last event
    """

    id: str
    """Of the attempt."""
    task: str
    """Name and number."""
    status: str
    """`done`, `truncated`, `failed`, `stale` or `aborted`."""
    reason: str
    """Why, where it did not end well."""
    born: int | None
    """The oldest version that sampled for it; null where none did."""
    turns: int
    """Generate calls that were answered."""
    tokens: int
    """Sampled."""
    reward: float | None
    """Null where not scored."""
    env_s: float
    """Seconds in the environment."""
    generate_s: float
    """Seconds of generate calls."""
    stage: str = ""
    """Of a failed one, what it was at: `env.open`, `env.reset`, `env.step`, `generate`, `reward`, or `agent`, between
    these."""
    kind: str = ""
    """Of a failed one: `timeout`, `crash` (the environment's process ended), `limit` (it used more than it may) or
    `error`."""


class Late(Event, tag="late", kw_only=True):
    """A scored result came after its group was over; dropped.

    By: control/groups
    Cause: its `end`
    """

    id: str
    """Of the attempt."""


class Eval(Event, tag="eval", kw_only=True):
    """One task of one evaluation.

    By: control/evaluation
    """

    name: str
    """Of the evaluation."""
    task: str
    """Its name."""
    play: str
    """`sampled` or `greedy`."""
    episodes: int
    """Played."""
    scored: int
    """Of these, scored."""
    reward: float | None
    """Mean over the scored; null where none is."""
    std: float | None
    """Standard deviation over the scored; null where none is."""
    rate: bool
    """There are rewards, and every one was 0 or 1, so that the mean is a rate of success."""
    failed: int = 0
    """Episodes that failed or could not be drawn."""
    reason: str = ""
    """The most frequent reason of these, with its count."""
    versions: list[int]
    """Oldest and newest that played; empty where nothing was scored."""


# --- Groups and batches ---------------------------------------------------------------------------------------------


class Admit(Event, tag="admit", kw_only=True):
    """A group takes a slot and its members start. After a restart an open group is admitted again under its old id.

    By: control/rollout, control/shards
    """

    group: str
    """Its id."""
    task: str
    """Name and number."""
    serving: int
    """The version that is served."""


class Ready(Event, tag="ready", kw_only=True):
    """Enough members are scored; the rest are cancelled.

    By: control/rollout
    Cause: the last member's `end`
    """

    group: str
    """Its id."""
    born: int
    """The oldest version that sampled for it."""
    members: list[str]
    """The attempts that are scored."""
    gradient: bool
    """They did not all earn the same."""


class DrawFailed(Event, tag="draw.failed", kw_only=True):
    """The task set raised, or returned nonsense, where it was asked for a task, which is passed over.

    By: control/health, control/evaluation
    """

    task: str
    """Its name."""
    index: int
    """The number that was asked for."""
    reason: str
    """What is wrong."""
    eval: bool
    """For an evaluation: the episode counts as played and not scored."""


class BreakerOpen(Event, tag="breaker.open", kw_only=True):
    """A task is out of the mix after failures in a row, or stays out after a failed probe.

    By: control/health
    Cause: `group` or `draw.failed`
    """

    task: str
    """Its name."""
    failures: int
    """In a row."""
    probes: int
    """That failed."""
    wait_s: float
    """It is probed after so long."""
    reason: str
    """The most frequent one since the last batch, with its count."""


class BreakerProbe(Event, tag="breaker.probe", kw_only=True):
    """One group of a task that is out of the mix is tried.

    By: control/health
    """

    task: str
    """Its name."""
    group: str
    """Its id."""


class BreakerClose(Event, tag="breaker.close", kw_only=True):
    """The probe's members were scored: the task is in the mix again, with its share.

    By: control/health
    Cause: the last member's `end`
    """

    task: str
    """Its name."""
    group: str
    """The probe."""


class Group(Event, tag="group", kw_only=True):
    """A group ended untrained.

    By: control/rollout
    Cause: `end`, `swap.end` or `batch`
    """

    group: str
    """Its id."""
    task: str
    """Name and number."""
    how: str
    """`stale`, `failed`, `filtered` or `surplus`."""


class Batch(Event, tag="batch", kw_only=True):
    """The groups of a step, one entry each in `groups`, `tasks` and `born`.

    By: control/rollout
    """

    step: int
    """Whose batch it is."""
    serving: int
    """The version that is served."""
    groups: list[str]
    """Their ids."""
    tasks: list[str]
    """Names and numbers."""
    born: list[int]
    """The oldest version that sampled for each."""
    tokens: int
    """Sampled tokens in it."""


class Affinity(Event, tag="affinity", kw_only=True):
    """One look at the assignment of tasks to pools.

    By: control/affinity
    Cause: where engines came or went: `engine.down` or `engine.up`
    """

    reason: str
    """Why the assignment is as it is."""
    plan: Mapping[str, Mapping[str, float]]
    """Task, pool, share of the task's groups."""
    moves: Mapping[str, Mapping[str, float]]
    """The tasks whose shares changed, with their new ones."""
    step_s: dict[str, float | None]
    """Seconds each pool is predicted to need for its part of a step; null: never."""
    engines: Mapping[str, int]
    """Up, by pool."""
    profiles: dict[str, Profile]
    """By task."""
    predicted: dict[str, dict[str, Alone]]
    """By task and pool, if the task were alone there."""
    speeds: dict[str, Speed] = {}
    """By pool, where its engines said anything yet and a task is free to choose."""


# --- Training -------------------------------------------------------------------------------------------------------


class Written(Event, tag="written", kw_only=True):
    """The batch is in the journal; its step may start.

    By: control/learner, launch/training
    """

    step: int
    """Whose batch it is."""


class StepStart(Event, tag="step.start", kw_only=True):
    """A train step begins.

    By: control/learner
    """

    step: int
    """Its number, from 0."""
    serving: int
    """The version that is served."""


class StepEnd(Event, tag="step.end", kw_only=True):
    """A train step is done.

    By: control/learner
    Cause: `step.start`
    """

    step: int
    """Its number."""
    version: int
    """That it made."""
    train_s: float
    """How long it took."""
    metrics: Mapping[str, float | None]
    """What the trainer reports; null where that is not a finite number."""


class StepAside(Event, tag="step.aside", kw_only=True):
    """Data of the batch that could not be trained on was left out. A step that is done again leaves out the same, and
    says so again.

    By: control/trainer
    Cause: `step.start`, or its `replay`
    """

    step: int
    """Its number."""
    trajectories: list[tuple[str, str]]
    """Pairs of attempt and reason."""
    groups: list[str]
    """Those of which nothing is left, which have failed."""


class TrainerDown(Event, tag="trainer.down", kw_only=True):
    """The trainer was lost.

    By: control/trainer
    """

    reason: str
    """Why."""


class TrainerUp(Event, tag="trainer.up", kw_only=True):
    """A new trainer has the state of the old one.

    By: control/trainer
    Cause: `trainer.down`
    """

    version: int
    """The version it is at."""


class Replay(Event, tag="replay", kw_only=True):
    """A step is done again from the journal; no `step.start` or `step.end`.

    By: control/trainer
    Cause: `trainer.down`; none after a restart
    """

    step: int
    """Its number."""
    groups: list[str]
    """Of its batch."""


class Replayed(Event, tag="replayed", kw_only=True):
    """After a restart of the coordinator: the step is done again.

    By: control/trainer
    Cause: its `replay`
    """

    step: int
    """Its number."""
    version: int
    """That it made."""
    train_s: float
    """How long it took."""
    metrics: Mapping[str, float | None]
    """What the trainer reports; null where that is not a finite number."""


# --- Weights and engines --------------------------------------------------------------------------------------------


class Push(Event, tag="push", kw_only=True):
    """The trainer begins to push a version; engines stage its buckets as they appear.

    By: control/weights
    """

    version: int
    """Which."""


class Pushed(Event, tag="pushed", kw_only=True):
    """The trainer says that all of it lies in the store, and the manifest with it.

    By: control/weights
    Cause: `push`
    """

    version: int
    """Which."""
    bytes: int
    """Of all its buckets."""


class Staged(Event, tag="staged", kw_only=True):
    """Every engine in rotation has it on its host: from now on a swap only loads it.

    By: control/weights
    Cause: `push`
    """

    version: int
    """Which."""


class PushSkipped(Event, tag="push.skipped", kw_only=True):
    """A version is not pushed: when its push could begin, or begin again, there was a newer one, which is pushed then.

    By: control/weights
    Cause: `push`
    """

    version: int
    """Which."""
    reason: str
    """What there is instead."""


class Bucket(Event, tag="bucket", kw_only=True):
    """Simulated: a bucket lies in the store.

    By: sim/links
    """

    version: int
    """Of the weights."""
    bucket: int
    """Its number."""


class Manifest(Event, tag="manifest", kw_only=True):
    """Simulated: a version is complete. Real stores do not write events: see `pushed`.

    By: sim/links
    """

    version: int
    """Which."""
    buckets: int
    """How many it has."""


class SwapStart(Event, tag="swap.start", kw_only=True):
    """The engines are to get a version.

    By: control/weights
    """

    version: int
    """Which."""
    serving: int
    """The version that is served so far."""


class Suspend(Event, tag="suspend", kw_only=True):
    """Engines take no new requests: they are to load a version.

    By: control/fleet
    """

    engines: list[str]
    """Which."""


class Loaded(Event, tag="loaded", kw_only=True):
    """Simulated: what an engine read.

    By: sim/engine
    """

    engine: str
    """Which."""
    version: int
    """That it was to read."""
    of: list[int]
    """The versions its buckets were of."""


class EngineWorked(Event, tag="engine.worked", kw_only=True):
    """What an engine's steps had in them, summed since its process began: it says so with an answer, about every 32
    steps. Each list has steps, sequences that decoded, tokens in their caches, prompts that were done, tokens of
    prompts, tokens that these looked at, and seconds.

    By: control/proxy
    """

    engine: str
    """Which."""
    decode: list[float]
    """Of steps without prompts."""
    mixed: list[float]
    """Of those with prompts beside sequences that decode."""
    prefill: list[float]
    """Of those with prompts alone."""


class EngineSwap(Event, tag="engine.swap", kw_only=True):
    """One engine serves the version.

    By: control/fleet
    """

    engine: str
    """Which."""
    version: int
    """That it serves."""
    pull_s: float
    """Seconds that went into bringing it to the engine, hidden or not: the transfer to its host, the check of its bytes
    and what the engine makes of them. What is exposed of it lies between `suspend` and `resume`."""
    bytes: int = 0
    """That crossed to the engine's host; 0 where the version is read where it was written."""
    density: float | None = None
    """The part of the weights (of their 16-bit words) that differ from the version before; none where nobody looked."""
    rebuilt: int
    """KV tokens to compute again."""
    in_flight: int
    """Calls that go on over the swap."""


class WeightsDamaged(Event, tag="weights.damaged", kw_only=True):
    """A bucket is missing or damaged; the trainer pushes the version again.

    By: control/fleet
    """

    engine: str
    """That found it."""
    version: int
    """Of the weights."""
    reason: str
    """What is wrong."""


class Resume(Event, tag="resume", kw_only=True):
    """Engines take requests again. What lies between `suspend` and this is a swap's exposed time.

    By: control/fleet
    """

    engines: list[str]
    """Which."""


class SwapEnd(Event, tag="swap.end", kw_only=True):
    """The version is served from now on.

    By: control/weights
    Cause: `swap.start`
    """

    version: int
    """Which."""


class EngineDown(Event, tag="engine.down", kw_only=True):
    """An engine is out of rotation.

    By: control/fleet
    """

    engine: str
    """Which."""
    reason: str
    """Why."""
    calls: int
    """Handed back to be sent again."""


class EngineExpected(Event, tag="engine.expected", kw_only=True):
    """An engine joins when a machine has room for it (`pools[].engines.most`).

    By: control/fleet
    """

    engine: str
    """Which."""
    pool: str
    """Where."""


class EngineRetry(Event, tag="engine.retry", kw_only=True):
    """One restart failed, or no machine had room.

    By: control/fleet
    Cause: `engine.down`
    """

    engine: str
    """Which."""
    reason: str
    """Why."""


class EngineUp(Event, tag="engine.up", kw_only=True):
    """An engine is back in rotation, or in it for the first time.

    By: control/fleet
    Cause: `engine.down`, `engine.expected`
    """

    engine: str
    """Which."""
    version: int
    """That it serves."""


class EngineGone(Event, tag="engine.gone", kw_only=True):
    """An engine is given up.

    By: control/fleet
    Cause: `engine.down`
    """

    engine: str
    """Which."""
    restarts: int
    """That were tried."""


# --- Shards ---------------------------------------------------------------------------------------------------------


class ShardDown(Event, tag="shard.down", kw_only=True):
    """A coordinator that plays a part of the rollout is lost, with its engines. Its groups are admitted again.

    By: control/shards
    """

    shard: str
    """Which."""
    reason: str
    """Why."""
    engines: list[str]
    """Its own."""
    groups: list[str]
    """That it played; their attempts under way are forgotten, and what was scored of them."""
    episodes: list[str]
    """Attempts of evaluations that it played."""


class ShardRetry(Event, tag="shard.retry", kw_only=True):
    """One restart failed.

    By: control/shards
    Cause: `shard.down`
    """

    shard: str
    """Which."""
    reason: str
    """Why."""


class ShardUp(Event, tag="shard.up", kw_only=True):
    """A shard is back, with its engines.

    By: control/shards
    Cause: `shard.down`
    """

    shard: str
    """Which."""
    engines: list[str]
    """That are up."""
    version: int
    """That they serve."""


class ShardGone(Event, tag="shard.gone", kw_only=True):
    """A shard is given up.

    By: control/shards
    Cause: `shard.down`
    """

    shard: str
    """Which."""
    restarts: int
    """That were tried."""


# --- Faults ---------------------------------------------------------------------------------------------------------


class Fault(Event, tag="fault", kw_only=True):
    """Simulated: a planned fault happens now.

    By: sim/faults
    """

    fault: str
    """Its kind."""
    target: str
    """Whom it hits; of `failing_task`, the task."""
    part: str = ""
    """Of `failing_task`: what of it fails, `draw` or `environment`."""
    for_s: float = 0.0
    """Of `failing_task` and `reward_outage`: for how long."""


KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in Event.__subclasses__()}
"""Every kind of event by the name that a line has in `e`."""

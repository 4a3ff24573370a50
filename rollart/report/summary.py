"""What a run came to: the fields of `summary.json`, each defined once. `make docs` makes `docs/summary.md` from here.

`rollart.report.fold` works it out from the events. The unit of a field is in its type, its meaning is the docstring
below it.
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

Seconds = Annotated[float, Meta(title="s")]
Share = Annotated[float, Meta(title="share")]
Cost = Annotated[float, Meta(title="cost")]
Rate = Annotated[float, Meta(title="tokens/s")]
Tokens = Annotated[int, Meta(title="tokens")]
Steps = Annotated[int, Meta(title="steps")]
Versions = Annotated[int, Meta(title="versions")]
Attempts = Annotated[int, Meta(title="attempts")]
GroupCount = Annotated[int, Meta(title="groups")]
Episodes = Annotated[int, Meta(title="episodes")]
Calls = Annotated[int, Meta(title="calls")]
Times = Annotated[int, Meta(title="times")]
Text = Annotated[str, Meta(title="text")]
Texts = Annotated[list[str], Meta(title="list of text")]
TaskName = Annotated[str, Meta(title="<task>")]
PoolName = Annotated[str, Meta(title="<pool>")]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the summary."""


class StepTimes(Figures, frozen=True):
    """From the end of one step to the end of the next. The first counts from the start of the run."""

    mean: Seconds = 0.0
    p50: Seconds = 0.0
    """Median."""
    p95: Seconds = 0.0
    """95th percentile."""


class Staleness(Figures, frozen=True):
    bound: Versions | None
    """Of the job."""
    max: Versions
    """Greatest age of a trained group: serving minus born when its batch was formed."""
    max_steps: Steps
    """Greatest step minus born; at most bound + 1 where the bound is rechecked."""
    histogram: dict[Annotated[str, Meta(title="<age>")], GroupCount]
    """Trained groups by age."""
    in_flight_over_swaps: Calls
    """Generate calls that were under way during a swap and went on, summed over engines."""


class Waste(Figures, frozen=True):
    """By reason: `stale`, `failed`, `surplus` (enough others were scored), `filtered` (the group's members all earned
    the same) or `restart` (lost with a killed coordinator). A scored member of a group that died counts under how the
    group died, so there can be more stale trajectories here than attempts with status `stale`."""

    trajectories: Attempts
    """Not trained on."""
    tokens: Tokens
    """Sampled by these, finished answers only."""


class Groups(Figures, frozen=True):
    """In the surviving history: a restart goes back to a checkpoint."""

    admitted: GroupCount
    trained: GroupCount
    """In a batch, and not set aside whole."""
    stale: GroupCount
    """Ended untrained for this reason. The next four are alike."""
    failed: GroupCount
    """Includes groups that the trainer set aside whole."""
    surplus: GroupCount
    filtered: GroupCount
    restart: GroupCount
    """Admitted after the checkpoint that a restart went back to. Their tasks are given out again."""
    open: GroupCount
    """Alive at the end."""
    lost: GroupCount
    """Alive at the end and not in the last checkpoint. Must be 0."""
    trained_twice: Annotated[int, Meta(title="tasks")]
    """Trained on more than once. Must be 0."""
    late_results: Attempts
    """Scored after their group was over, and dropped."""


class Pool(Figures, frozen=True):
    """Only pools with engines are listed."""

    engines: Annotated[int, Meta(title="engines")]
    gpus: Annotated[int, Meta(title="GPUs")]
    """Of all its engines."""
    utilisation: Share
    """Device-seconds of calls, by devices and `time_s`. Start-up counts as idle. Prefill workers count for the pool
    whose devices they have."""
    requests: Calls
    """Sent, repeats included."""
    tokens: Tokens
    """Sampled here."""
    fallbacks: Calls
    """Served here though another pool was wanted."""


class Weights(Figures, frozen=True):
    push_s: Seconds
    """Mean, from the begin of a push until the whole version is in the store."""
    arrival_s: Seconds
    """Mean, from the begin of a push until every engine in rotation has the version on its host. What is longer than
    training and rollout is what a step takes."""
    pull_s: Seconds
    """Mean per engine and swap: what went into bringing the version to it, hidden or not."""
    exposed_s: Seconds
    """Mean per engine and swap, from `suspend` to `resume`: so long it took no requests."""
    version_bytes: Annotated[float, Meta(title="bytes")]
    """Mean, of all buckets of a version."""
    crossed_bytes: Annotated[float, Meta(title="bytes")]
    """Mean per engine and swap: came to its host for it. 0 where engines read what the trainer wrote."""
    density: Share | None
    """Mean per engine and swap: the part of the weights that differ from the version before. null where nobody looked:
    only weights `tcp` with deltas does."""
    swaps: Annotated[int, Meta(title="swaps")]
    """Of single engines."""


class Judge(Figures, frozen=True):
    """`<reward>` is `rewards`, or a task and the name of one of its own."""

    graded: Annotated[int, Meta(title="episodes")]
    known: Annotated[int, Meta(title="episodes")]
    """Of these, graded before, word for word: the judge was not asked again."""
    votes: Annotated[int, Meta(title="votes")]
    """On each episode."""
    spread: float | None
    """Standard deviation of the votes on one episode, of grades from 0 to 1, mean over the episodes; null with one
    vote."""
    agreement: float | None
    """Krippendorff's alpha of the votes: 1 where those on an episode agree, 0 where they lie as far apart as votes on
    different episodes do. Null with one vote, or where all grades are the same."""


class Rewards(Figures, frozen=True):
    type: str | None
    """`local`, `http` or `judge`; all that the job has."""
    calls: Calls
    """Tries that gave a score."""
    failed: Calls
    """Tries that failed or timed out."""
    retries: Calls
    """Tries after the first, of what got its score in the end."""
    given_up: Annotated[int, Meta(title="scores")]
    """That could not be had: retries were used up, or another try would have been the same."""
    dead_letters: Annotated[int, Meta(title="scores")]
    """Of `given_up`, those that the run directory keeps for `rollart reward replay`."""
    outages: Annotated[int, Meta(title="times")]
    """That nobody answered any more (`rewards.on_outage`)."""
    outage_s: Seconds
    """Sum of those that ended."""
    local: Annotated[int, Meta(title="scores")]
    """Of local workers that stood in meanwhile (`rewards.on_outage: local`)."""
    made: Calls
    """In all: of tries that failed, of each vote of a judge, and beside slow ones (`rewards.hedge`); none where a judge
    had graded the same before."""
    mean_s: Seconds
    """Mean time that the function ran, without cold start. Where the backend does not know it: from the call to the
    score."""
    cold_starts: Calls
    """That had to start an instance."""
    cold_start_s: Seconds
    """Sum of these starts."""
    utilisation: Share | None
    """These seconds by workers and `time_s`. Null for `http`, which has no reserved workers."""
    judges: dict[Annotated[str, Meta(title="<reward>")], Judge]


class Lengths(Figures, frozen=True):
    """What spares and cancellations do to lengths: where those trained on are shorter than those admitted, long answers
    were left out."""

    trained_tokens: Annotated[float, Meta(title="tokens")]
    """Mean of the trajectories that were trained on."""
    admitted_tokens: Annotated[float, Meta(title="tokens")]
    """Mean of all attempts that were begun, failed ones and those of an evaluation apart. One that we stopped (surplus,
    stale) counts as far as it came, so this is the least that the true mean can be."""
    trained_turns: Annotated[float, Meta(title="turns")]
    admitted_turns: Annotated[float, Meta(title="turns")]
    admitted: Attempts
    """Of these means."""
    stopped: Attempts
    """Of `admitted`, stopped by us."""


class TaskSummary(Figures, frozen=True):
    pool: str
    """That served it last."""
    share: Share
    """Target share of the trained groups."""
    trained_share: Share
    """What it had."""
    admitted: GroupCount
    stale_share: Share
    """Stale groups by admitted groups."""
    trained: GroupCount
    stale: GroupCount
    """Ended so, as in `groups`. The next four are alike."""
    failed: GroupCount
    surplus: GroupCount
    filtered: GroupCount
    restart: GroupCount
    trajectories: Attempts
    """Ended, good or bad."""
    reward: float
    """Mean over the scored attempts, as are the next three."""
    turns: Annotated[float, Meta(title="turns")]
    sampled_tokens: Annotated[float, Meta(title="tokens")]
    prefill_tokens: Annotated[float, Meta(title="tokens")]
    """Prompt tokens that were computed, rebuilt caches included."""
    with_gradient: GroupCount
    """Trained groups whose members did not all earn the same: the step learned something from them."""
    state: str
    """`in` the mix, `out` of it after failures in a row, or `probing`: out, and one group is being tried."""
    taken_out: Times
    """It was taken out of the mix."""
    probes: GroupCount
    """Tried while it was out."""
    out_reason: Text
    """While it is out: the most frequent reason, with its count."""
    lengths: Lengths
    failures: Times
    """Attempts that ended `failed`, and draws that failed, without evaluation."""
    failed_at: dict[Annotated[str, Meta(title="<stage> <kind>")], Times]
    """The same by stage and kind, as the `end` event has them: `env.step timeout`. `draw error`: of a draw."""
    reasons: Texts
    """The five most frequent reasons of these, as in `failures`."""


class TaskCost(Figures, frozen=True):
    used: Cost
    """Engine time of its calls. That of an answered call is measured. A call that came to nothing (aborted, lost with
    its engine) counts an equal part of its engine's time with the calls beside it."""
    wasted: Cost
    """The part of `used` that went to trajectories that were not trained on, and to calls lost with an engine."""


class Reserved(Figures, frozen=True):
    """What was paid for, used or not."""

    total: Cost
    """Pools, trainer and rewards."""
    pools: dict[PoolName, Cost]
    """Its engines' GPUs; for a pool without engines, its environment slots. Reserved for the whole `time_s`."""
    train: Cost
    """The trainer's GPUs."""
    rewards: Cost
    """`local`: workers, for the whole `time_s`, by `rewards.cost`. `http`: seconds that functions ran, cold starts
    included, by `rewards.cost` and `rewards.gb_second_cost`, and calls by `rewards.call_cost`. 0 where no price is set.
    The engines of a judge are among the pools."""


class Costs(Reserved, frozen=True):
    """In the unit of `pools.cost` (default: the relative price of one device-hour, h20 = 1)."""

    tasks: dict[TaskName, TaskCost]
    wasted: Cost
    """Sum over tasks."""
    evaluation: Cost
    """Engine time of held-out play."""
    under_way: Cost
    """Engine time of trajectories that have not ended."""
    idle: Cost
    """The rest of the engine pools' cost."""


class Play(Figures, frozen=True, kw_only=True):
    """`<name>` is `eval` and the version after which it began, `<play>` is `sampled` or `greedy`."""

    episodes: Episodes
    """Played."""
    scored: Episodes
    """Of these, scored."""
    reward: float | None
    """Mean of the scored; null where none is."""
    std: float | None
    """Standard deviation of the same."""
    rate: bool
    """True where there are rewards and every one was 0 or 1: the mean is then a rate of success, and shown as a
    percentage."""
    failed: Episodes = 0
    """Ended `failed`, or had no task because its draw failed."""
    reason: Text = ""
    """The most frequent reason of these, with its count; empty where none failed."""
    versions: Annotated[list[int], Meta(title="versions")]
    """Oldest and newest that played."""


Plays = dict[TaskName, dict[Annotated[str, Meta(title="<play>")], Play]]
"""One evaluation."""


class Progress(Figures, frozen=True):
    """The first and the last evaluation. `greedy` is the same for play at temperature 0, where `evaluation.greedy` asks
    for it."""

    before: float | None
    """Mean reward of the first evaluation (`evaluation.first`: of the initial weights); null where none was scored."""
    after: float | None
    """The same of the last evaluation."""
    rate: bool
    """`rate` of both evaluations."""
    episodes: Episodes
    """Played in the last one."""
    scored: Episodes
    """Of these, scored, in the evaluation where they are fewer. `before` and `after` are means over the scored ones."""
    greedy: "Progress | UnsetType" = UNSET
    control: float | UnsetType | None = UNSET
    """Mean reward of another model, where `rollart eval --control-of RUN` wrote it here."""


class Restarts(Figures, frozen=True):
    engines: Times
    """An engine went down."""
    trainer: Times
    """The trainer was lost."""
    coordinator: Times
    """The coordinator was killed. A run that the user stopped and resumed does not count."""


class Failure(Figures, frozen=True):
    """`<what>`: `engine` (went down), `answer` (of an engine, could not be believed), `trainer` (was lost),
    `coordinator` (was killed), `worker` (a process died, at work or idle), `attempt` (ended `failed`, in training or
    evaluation), `draw` (a task set gave no task), `reward` (one try failed), `sample` (a trajectory of a batch that
    could not be trained on and was set aside)."""

    count: Times
    """It happened."""
    reasons: Texts
    """The five most frequent reasons, as `744 x` and the first text of that cause, cut at 400 characters. Texts whose
    first lines differ only in numbers, ids and addresses are one cause. Beyond 32 causes the rest counts as
    `other reasons`. All texts are in `events.jsonl`."""


class Summary(Figures, frozen=True):
    """What a run came to. It is worked out from the events alone, live or afterwards."""

    name: str | None
    """Of the job."""
    mode: str | None
    """Of the job."""
    seed: int | None
    """Of the job."""
    clock: str | None
    """`virtual` for a simulated run."""
    state: str
    """`finished`, `stopped`, `interrupted` (by the user), or `running` when asked for in between."""
    reason: str
    """Why it stopped or was interrupted; empty otherwise."""
    steps: Steps
    """Optimizer steps that ended, each once, including those that a resumed job made again."""
    time_s: Seconds
    """Time of the last event."""
    step_time_s: StepTimes
    throughput_tokens_per_s: Rate
    """Sampled tokens that were trained on, by `time_s`."""
    sampled_tokens_per_s: Rate
    """All sampled tokens in finished answers, by `time_s`."""
    trajectories: dict[Annotated[str, Meta(title="<status>")], Attempts]
    """Ended with that status: `done`, `truncated`, `aborted`, `stale`, `failed`. Without evaluation."""
    staleness: Staleness
    waste: dict[Annotated[str, Meta(title="<how>")], Waste]
    groups: Groups
    pools: dict[PoolName, Pool]
    weights: Weights
    reward: Rewards
    tasks: dict[TaskName, TaskSummary]
    cost: Costs
    evaluations: dict[Annotated[str, Meta(title="<name>")], Plays]
    eval: dict[TaskName, Progress]
    restarts: Restarts
    failures: dict[Annotated[str, Meta(title="<what>")], Failure]
    faults: dict[Annotated[str, Meta(title="<kind>")], Times]
    """A planned fault of that kind happened."""
    warnings: Texts
    """Warnings and stall reports, in order: the first 200, then how many more there were."""

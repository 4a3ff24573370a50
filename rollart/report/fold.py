"""Folds a run's events into its summary, live or afterwards."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs

from rollart.events import schema
from rollart.events.log import Fold
from rollart.events.metrics import Last, Max, Mean, Metrics, Sum
from rollart.events.schema import attempt_of, group_of, task_set
from rollart.report import summary
from rollart.report.costs import CostFold
from rollart.report.fold_parts import EvaluationFold, Failures, SwapFold, TaskSums, step_times
from rollart.report.rewards import RewardFold
from rollart.report.summary import Summary
from rollart.report.weights import VersionFold

ENDS = ("trained", "stale", "failed", "surplus", "filtered", "restart")
"""How a group ends; all but the first are waste."""
WARNINGS_KEPT = 200
"""The first ones are kept, the others counted. All are in the events."""
MAX_PARTS = 32
"""Named parts of one reward that become metrics: the names are the user's, and trackers never forget one."""


@dataclass(slots=True)
class _Work:
    """What one attempt has used."""

    id: str
    task: str
    evaluation: bool
    tokens: int = 0
    turns: int = 0
    cost: float = 0.0
    prefill: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of its reward."""


class SummaryFold(Fold):
    """Feed it every event of a run, in order; `result` may be asked for at any time."""

    def __init__(self) -> None:
        self._job: schema.Run | None = None
        self._steps: list[float] = []
        self._step_s = 0.0
        self._ended_steps: dict[int, None] = {}
        self._statuses: Counter[str] = Counter()
        self._live: dict[str, _Work] = {}
        self._groups: dict[str, list[_Work]] = {}
        """Of each group that is alive: the attempts that ended well, trained on or wasted with it."""
        self._task_of: dict[str, str] = {}
        """Task of every group that was admitted."""
        self._fate: dict[str, str] = {}
        """How each group that is over ended."""
        self._new: dict[str, None] = {}
        """Admitted since the last checkpoint."""
        self._trained_tasks: Counter[str] = Counter()
        self._costs = CostFold()
        self._evaluation_cost = 0.0
        self._tasks: dict[str, TaskSums] = {}
        self._ages: Counter[int] = Counter()
        self._max_steps = 0
        self._waste = {how: [0, 0] for how in ENDS[1:]}
        """Trajectories and their tokens."""
        self._trained_tokens = 0
        self._sampled_tokens = 0
        self._faults: Counter[str] = Counter()
        self._warnings: list[str] = []
        self._more_warnings = 0
        self._failures = Failures()
        self._in_step: dict[str, list[_Work]] = {}
        """Groups of the batch whose step has not ended."""
        self._aside_steps: dict[int, None] = {}
        self._aside_groups: dict[str, None] = {}
        """Set aside whole: they count as failed, also after a restart that goes back to before their batch."""
        self._unwritten: dict[int, schema.Batch] = {}
        """Batches whose place in the journal is not confirmed, by step."""
        self._restarts: Counter[str] = Counter()
        self._at_checkpoint: dict[str, None] = {}
        self._late = 0
        self._state = "running"
        self._reason = ""
        self.teaches: dict[str, bool] = {}
        """Group -> whether its members earned different rewards. Only groups that a restart may meet again."""
        self._step_of: dict[str, int] = {}
        """Group -> the step that trained on it. Only groups that a restart may meet again."""
        self._metrics = Metrics()
        self._evals = EvaluationFold()
        self._weights = VersionFold()
        self._rewards = RewardFold()
        self.row: Mapping[str, float] | None = None
        """Metrics of the step that just ended. The writer of `metrics.jsonl` takes it away."""
        super().__init__(self._evals, self._weights, SwapFold(self._metrics))

    # --- one method per kind of event -----------------------------------------------------------------------

    def _on_run(self, event: schema.Run) -> None:
        self._take_job(event)
        for name, task in event.tasks.items():
            self._tasks[name] = TaskSums(task.share)

    def _on_changed(self, event: schema.Changed) -> None:
        """A resumed job has other settings."""
        self._take_job(event.job)

    def _take_job(self, job: schema.Run) -> None:
        self._job = job
        self._costs.job(job, self.now.t)
        self._rewards.job(job)

    def _on_admit(self, event: schema.Admit) -> None:
        group_id = event.group
        self._task_of[group_id] = task_set(event.task)
        self._new[group_id] = None
        self._fate.pop(group_id, None)
        self._groups[group_id] = []

    def _on_start(self, event: schema.Start) -> None:
        task = task_set(event.task)
        self._live[event.id] = _Work(event.id, task, event.eval)
        self._tasks[task].pool = event.pool

    def _on_send(self, event: schema.Send) -> None:
        self._costs.sent(event)

    def _on_said(self, event: schema.Said) -> None:
        self._sampled_tokens += event.tokens
        attempt = attempt_of(event.id)
        cost, work = self._costs.said(event, attempt), self._live.get(attempt)
        if work is not None:
            work.tokens += event.tokens
            work.prefill += event.prefill
            work.cost += cost

    def _on_lost(self, event: schema.Lost) -> None:
        """The call is sent again: what it used so far is wasted, however its attempt ends."""
        attempt = attempt_of(event.id)
        cost, work = self._costs.given_up(attempt, event.t), self._live.get(attempt)
        if work is None:
            return
        if work.evaluation:
            self._evaluation_cost += cost
        else:
            self._tasks[work.task].cost += cost
            self._tasks[work.task].wasted_cost += cost

    def _on_refused(self, event: schema.Refused) -> None:
        self._metrics.add("error/answer", Sum(1))
        self._failures.add("answer", event.engine, event.reason)

    def _on_end(self, event: schema.End) -> None:
        work = self._live.pop(event.id)
        work.cost += self._costs.given_up(event.id, event.t)
        status = event.status
        if status == "failed":
            self._failures.add("attempt", event.id, event.reason)
        if work.evaluation:
            self._evaluation_cost += work.cost
            return
        task = self._tasks[work.task]
        if status == "failed":
            task.causes.add(event.reason)
            task.failed_at[f"{event.stage} {event.kind}".strip() or "unknown"] += 1
        else:
            task.admitted_lengths.add(event.tokens, event.turns)
            task.stopped += status in ("aborted", "stale")
        work.turns = event.turns
        self._statuses[status] += 1
        task.cost += work.cost
        task.trajectories += 1
        if event.reward is not None:
            task.rewards += event.reward
            task.rewarded += 1
            task.turns += event.turns
            task.tokens += work.tokens
            task.prefill += work.prefill
            for prefix in ("", f"{work.task}/"):
                self._metrics.add(f"{prefix}reward/mean", Mean(event.reward))
                self._metrics.add(f"{prefix}reward/scored", Sum(1))
                self._metrics.add(f"{prefix}response_length/mean", Mean(work.tokens))
                self._metrics.add(f"{prefix}num_turns/mean", Mean(event.turns))
            for part in list(work.parts)[:MAX_PARTS]:
                self._metrics.add(f"{work.task}/reward/{part}/mean", Mean(work.parts[part]))
        else:
            self._metrics.add(f"stop/{status}", Sum(1))
        group = self._groups.get(group_of(event.id))
        if status in ("done", "truncated") and group is not None and event.reward is not None:
            group.append(work)
        else:
            self._wasted({"stale": "stale", "aborted": "surplus"}.get(status, "failed"), [work])

    def _on_draw_failed(self, event: schema.DrawFailed) -> None:
        self._failures.add("draw", event.task, event.reason)
        if not event.eval:
            self._tasks[event.task].causes.add(event.reason)
            self._tasks[event.task].failed_at["draw error"] += 1

    def _on_late(self, event: schema.Late) -> None:
        self._late += 1

    def _on_group(self, event: schema.Group) -> None:
        self._close(event.group, event.how)

    def _on_batch(self, event: schema.Batch) -> None:
        for group_id, task_id, born in zip(event.groups, event.tasks, event.born, strict=True):
            age = max(0, event.serving - born)
            self._ages[age] += 1
            self._max_steps = max(self._max_steps, event.step - born)
            self._metrics.add("staleness/max", Max(age))
            self._metrics.add("staleness/mean", Mean(age))
            self._trained_tasks[task_id] += 1
            self._count_gradient(group_id, task_set(task_id), event.step)
            if group_id in self._groups:
                self._in_step[group_id] = self._groups[group_id]
            self._close(group_id, "trained")
        self._trained_tokens += event.tokens
        self._unwritten[event.step] = event

    def _count_gradient(self, group_id: str, name: str, step: int) -> None:
        self._step_of[group_id] = step
        teaches = self.teaches.get(group_id, True)
        self._tasks[name].with_gradient += teaches
        for prefix in ("", f"{name}/"):
            self._metrics.add(f"{prefix}groups/trained", Sum(1))
            self._metrics.add(f"{prefix}groups/with_gradient", Sum(int(teaches)))

    def _on_ready(self, event: schema.Ready) -> None:
        self.teaches[event.group] = event.gradient

    def _on_breaker_open(self, event: schema.BreakerOpen) -> None:
        task = self._tasks[event.task]
        task.taken_out += event.probes == 0
        task.state, task.out_reason = "out", event.reason

    def _on_breaker_probe(self, event: schema.BreakerProbe) -> None:
        task = self._tasks[event.task]
        task.probes += 1
        task.state = "probing"

    def _on_breaker_close(self, event: schema.BreakerClose) -> None:
        task = self._tasks[event.task]
        task.state, task.out_reason = "in", ""

    def _on_step_aside(self, event: schema.StepAside) -> None:
        """In the batch, but not trained on. A step that is replayed says so again."""
        if event.step in self._aside_steps:
            return
        self._aside_steps[event.step] = None
        reasons = dict(event.trajectories)
        for name, reason in reasons.items():
            self._failures.add("sample", name, reason)
        self._metrics.add("error/sample", Sum(len(reasons)))
        works = [work for scored in self._in_step.values() for work in scored if work.id in reasons]
        self._wasted("failed", works)
        self._in_step = {
            group: [work for work in scored if work.id not in reasons] for group, scored in self._in_step.items()
        }
        self._trained_tokens -= sum(work.tokens for work in works)
        for group_id in event.groups:
            self._aside_groups[group_id] = None
            self._close(group_id, "failed")
            self._tasks[self._task_of[group_id]].with_gradient -= self.teaches.get(group_id, True)

    def _on_written(self, event: schema.Written) -> None:
        self._unwritten.pop(event.step, None)

    def _on_step_end(self, event: schema.StepEnd | schema.Replayed) -> None:
        """A replayed step counts only if it had not ended before."""
        if isinstance(event, schema.Replayed) and event.step in self._ended_steps:
            return
        self._ended_steps[event.step] = None
        for works in self._in_step.values():
            for work in works:
                self._tasks[work.task].trained_lengths.add(work.tokens, work.turns)
        self._in_step.clear()
        self._steps.append(event.t - self._step_s)
        self._step_s = event.t
        self._metrics.add("timing_s/step", Last(self._steps[-1]))
        self._metrics.add("timing_s/train", Last(event.train_s))
        for name, value in event.metrics.items():
            self._metrics.add(name, Last(math.nan if value is None else value))
        self.row = {"step": event.step, "time_s": event.t, **self._metrics.row()}

    def _on_reward(self, event: schema.Reward) -> None:
        work = self._live.get(event.id)
        task = work.task if work is not None else ""
        self._rewards.scored(event, task)
        cost = self._costs.reward(event, task)
        if work is not None:
            work.parts = event.parts
            work.cost += cost

    def _on_reward_failed(self, event: schema.RewardFailed) -> None:
        self._rewards.failed(event)
        work = self._live.get(event.id)
        cost = self._costs.reward_failed(event, work.task if work is not None else "")
        if work is not None:
            work.cost += cost
        self._failures.add("reward", event.id, event.reason)

    def _on_reward_given_up(self, event: schema.RewardGivenUp) -> None:
        self._rewards.given_up(event)

    def _on_reward_outage(self, event: schema.RewardOutage) -> None:
        self._rewards.outage()

    def _on_reward_back(self, event: schema.RewardBack) -> None:
        self._rewards.back(event)

    def _on_worker_lost(self, event: schema.WorkerLost) -> None:
        self._failures.add("worker", event.worker, event.reason)

    def _on_fault(self, event: schema.Fault) -> None:
        self._faults[event.fault] += 1

    def _on_warning(self, event: schema.Warning | schema.Stall) -> None:
        if len(self._warnings) < WARNINGS_KEPT:
            self._warnings.append(event.text)
        else:
            self._more_warnings += 1

    def _on_engine_down(self, event: schema.EngineDown) -> None:
        self._restarts["engines"] += 1
        self._metrics.add("error/engine", Sum(1))
        self._failures.add("engine", event.engine, event.reason)

    def _on_trainer_down(self, event: schema.TrainerDown) -> None:
        self._restarts["trainer"] += 1
        self._metrics.add("error/trainer", Sum(1))
        self._failures.add("trainer", "trainer", event.reason)

    def _on_killed(self, event: schema.Killed) -> None:
        """The coordinator is gone, and every attempt under way with it. One that had said it ends was not killed."""
        if self._state == "running":
            self._restarts["coordinator"] += 1
            self._failures.add("coordinator", "coordinator", f"was killed after {len(self._steps)} steps")
        self._cut_off(list(self._live))

    def _on_shard_down(self, event: schema.ShardDown) -> None:
        """One of several coordinators is gone, with its attempts. What its groups had scored is not trained on."""
        self._restarts["coordinator"] += 1
        self._failures.add("coordinator", event.shard, event.reason)
        groups = dict.fromkeys(event.groups)
        self._cut_off([name for name in self._live if name in event.episodes or group_of(name) in groups])
        for group in groups:
            self._wasted("restart", self._groups[group])
            self._groups[group] = []

    def _cut_off(self, attempts: list[str]) -> None:
        """These were under way where a coordinator was killed."""
        for attempt in attempts:
            work = self._live.pop(attempt)
            work.cost += self._costs.given_up(attempt, self.now.t)
            if work.evaluation:
                self._evaluation_cost += work.cost
            else:
                self._tasks[work.task].cost += work.cost
                self._wasted("restart", [work])

    def _on_resumed(self, event: schema.Resumed) -> None:
        """History goes back to the checkpoint: groups that were admitted since, and not trained on, are forgotten."""
        for batch in self._unwritten.values():  # killed before it was written: it will be formed again
            for group_id, task_id in zip(batch.groups, batch.tasks, strict=True):
                self._fate[group_id] = "restart"
                self._trained_tasks[task_id] -= 1
                self._tasks[task_set(task_id)].with_gradient -= self.teaches.get(group_id, True)
            self._trained_tokens -= batch.tokens
        self._unwritten.clear()
        for name, task in self._tasks.items():  # breakers are as in the checkpoint
            task.state = "out" if name in event.out else "in"
        kept = dict.fromkeys([*event.ready, *event.open])
        for group_id in list(self._new):
            if self._fate.get(group_id) != "trained" and group_id not in self._aside_groups:
                self._close(group_id, "restart")
                del self._fate[group_id]
                if group_id not in kept:  # one that the checkpoint holds may have been reopened after it
                    del self._task_of[group_id]
        self._new.clear()
        for group_id in kept:
            if self._fate.get(group_id) != "trained" and group_id not in self._aside_groups:
                self._fate.pop(group_id, None)

    def _on_checkpoint(self, event: schema.Checkpoint) -> None:
        self._new.clear()
        self._at_checkpoint = dict.fromkeys([*event.ready, *event.open])
        # A resumed run meets the groups that the checkpoint holds, and those of replayed steps; no others.
        self._step_of = {group: at for group, at in self._step_of.items() if at >= event.step}
        kept = [*self._at_checkpoint, *self._step_of]
        self.teaches = {group: self.teaches[group] for group in kept if group in self.teaches}

    def _on_finished(self, event: schema.Finished) -> None:
        self._state = "finished"

    def _on_interrupted(self, event: schema.Interrupted) -> None:
        self._state, self._reason = "interrupted", "stopped by the user"

    def _on_starting(self, event: schema.Starting) -> None:
        self._state, self._reason = "running", ""

    def _on_stopped(self, event: schema.Stopped) -> None:
        self._state = "interrupted" if event.user else "stopped"
        self._reason = event.reason

    # --- the result -----------------------------------------------------------------------------------------

    def _close(self, group_id: str, how: str) -> None:
        self._fate[group_id] = how
        group = self._groups.pop(group_id, None)
        if group is not None and how != "trained":
            self._wasted(how, group)

    def _wasted(self, how: str, works: list[_Work]) -> None:
        for work in works:
            self._waste[how][0] += 1
            self._waste[how][1] += work.tokens
            self._tasks[work.task].wasted_cost += work.cost

    def result(self) -> Summary:
        job = self._job
        seconds = max(self.now.t, 1e-9)
        ends = {name: dict.fromkeys(ENDS, 0) for name in ["", *self._tasks]}
        """Of all groups, and of those of each task."""
        for group_id, how in self._fate.items():
            ends[""][how] += 1
            ends[self._task_of[group_id]][how] += 1
        admitted = Counter(self._task_of.values())
        alive = [group_id for group_id in self._task_of if group_id not in self._fate]
        lost = [group_id for group_id in alive if group_id not in self._at_checkpoint and self._state == "finished"]
        return Summary(
            name=job.name if job else None,
            mode=job.mode if job else None,
            seed=job.seed if job else None,
            clock=job.clock if job else None,
            state=self._state,
            reason=self._reason,
            steps=len(self._steps),
            time_s=round(self.now.t, 3),
            step_time_s=step_times(self._steps),
            throughput_tokens_per_s=round(self._trained_tokens / seconds, 3),
            sampled_tokens_per_s=round(self._sampled_tokens / seconds, 3),
            trajectories=dict(sorted(self._statuses.items())),
            staleness=summary.Staleness(
                bound=job.bound if job else None,
                max=max(self._ages, default=0),
                max_steps=self._max_steps,
                histogram={str(age): self._ages[age] for age in sorted(self._ages)},
                in_flight_over_swaps=self._weights.in_flight,
            ),
            waste={how: summary.Waste(trajectories=n, tokens=tokens) for how, (n, tokens) in self._waste.items()},
            groups=summary.Groups(
                admitted=len(self._task_of),
                **ends[""],
                open=len(alive),
                lost=len(lost),
                trained_twice=sum(count > 1 for count in self._trained_tasks.values()),
                late_results=self._late,
            ),
            pools=self._costs.pools(self.now.t),
            weights=_weights(self._weights),
            reward=self._rewards.row(job, seconds),
            tasks={
                name: task.row(ends[name], admitted=admitted[name], trained=ends[""]["trained"])
                for name, task in self._tasks.items()
            },
            cost=self._cost(),
            evaluations=self._evals.plays,
            eval=self._evals.progress(),
            restarts=summary.Restarts(**{what: self._restarts[what] for what in ("engines", "trainer", "coordinator")}),
            failures=self._failures.rows(),
            faults=dict(sorted(self._faults.items())),
            warnings=self._warnings + [f"and {self._more_warnings} more"] * (self._more_warnings > 0),
        )

    def _cost(self) -> summary.Costs:
        """Device-hours times price: what was reserved, and how much of that each task used."""
        used = sum(task.cost for task in self._tasks.values())
        under_way = sum(work.cost for work in self._live.values())
        idle = self._costs.engines(self.now.t) - used - under_way - self._evaluation_cost
        return summary.Costs(
            **structs.asdict(self._costs.reserved(self.now.t)),
            tasks={
                name: summary.TaskCost(used=round(task.cost, 4), wasted=round(task.wasted_cost, 4))
                for name, task in self._tasks.items()
            },
            wasted=round(sum(task.wasted_cost for task in self._tasks.values()), 4),
            evaluation=round(self._evaluation_cost, 4),
            under_way=round(under_way, 4),
            idle=round(max(0.0, idle), 4),
        )


def _weights(fold: VersionFold) -> summary.Weights:
    return summary.Weights(
        push_s=fold.push_s.value(),
        arrival_s=fold.arrival_s.value(),
        pull_s=fold.pull_s.value(),
        exposed_s=fold.exposed_s.value(),
        version_bytes=fold.bytes.value(),
        crossed_bytes=fold.crossed.value(),
        density=fold.density.value() if fold.density.count else None,
        swaps=fold.pull_s.count,
    )

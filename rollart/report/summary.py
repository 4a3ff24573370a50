"""What a run came to: a fold over its events, live or afterwards. `docs/summary.md` says what each field means."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollart.events import schema
from rollart.events.log import Handlers, on
from rollart.events.metrics import Last, Max, Mean, Metrics, Sum
from rollart.events.schema import Event
from rollart.report.costs import Costs
from rollart.report.summary_evals import Evaluations
from rollart.report.summary_tasks import Failures, TaskBooks
from rollart.report.summary_timings import RewardTimes, WeightTimes, spread

WASTE = ("stale", "failed", "surplus", "filtered", "restart")
WARNINGS_KEPT = 200
"""The first ones; of the others the number. All of them are in the events."""
MAX_PARTS = 32
"""Named parts of one reward that become metrics: names are the user's, and a tracker keeps each for ever."""


@dataclass(slots=True)
class _Work:
    """What one attempt has used."""

    id: str
    task: str
    evaluation: bool
    tokens: int = 0
    cost: float = 0.0
    prefill: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of its reward."""


@dataclass(slots=True)
class _Group:
    task: str
    scored: list[_Work] = field(default_factory=list)
    """Ended well; trained on or wasted with the group."""


@dataclass(slots=True)
class _Task:
    share: float
    trajectories: int = 0
    turns: int = 0
    tokens: int = 0
    prefill: int = 0
    rewards: float = 0.0
    rewarded: int = 0
    pool: str = ""
    cost: float = 0.0
    wasted_cost: float = 0.0


class Summary:
    """Feed it every event of a run, in order; `result` may be asked for at any time."""

    def __init__(self) -> None:
        self._job: schema.Run | None = None
        self._last_s = 0.0
        self._steps: list[float] = []
        self._step_s = 0.0
        self._ended_steps: dict[int, None] = {}
        self._statuses: dict[str, int] = {}
        self._live: dict[str, _Work] = {}
        self._groups: dict[str, _Group] = {}
        self._task_of: dict[str, str] = {}
        """Task of every group that was admitted."""
        self._fate: dict[str, str] = {}
        """How every group that is over ended."""
        self._new: dict[str, None] = {}
        """Admitted since the last checkpoint."""
        self._trained_tasks: dict[str, int] = {}
        self._costs = Costs()
        self._evaluation_cost = 0.0
        self._tasks: dict[str, _Task] = {}
        self._ages: dict[int, int] = {}
        self._max_age = self._max_steps = 0
        self._waste = {name: [0, 0] for name in WASTE}
        self._trained_tokens = 0
        self._sampled_tokens = 0
        self._reward = RewardTimes()
        self._faults: dict[str, int] = {}
        self._warnings: list[str] = []
        self._more_warnings = 0
        self._failures = Failures()
        self._in_step: dict[str, _Group] = {}
        """Groups of the batch whose step has not ended."""
        self._aside_steps: dict[int, None] = {}
        self._aside_groups: dict[str, None] = {}
        """In a batch, and set aside whole: failed in every history that has that batch."""
        self._unwritten: dict[int, schema.Batch] = {}
        """Batches whose place in the journal is not confirmed, by step."""
        self._restarts = {"engines": 0, "trainer": 0, "coordinator": 0}
        self._at_checkpoint: dict[str, None] = {}
        self._late = 0
        self._evals = Evaluations()
        self._state = "running"
        self._reason = ""
        self._metrics = Metrics()
        self._books = TaskBooks(self._metrics)
        self._weights = WeightTimes(self._metrics)
        self.row: Mapping[str, float] | None = None
        """Metrics of the step that just ended; whoever writes `metrics.jsonl` takes it."""
        self._handlers: Handlers = dict(
            [
                on(schema.Run, self._on_run),
                on(schema.Changed, self._on_changed),
                on(schema.Admit, self._on_admit),
                on(schema.Start, self._on_start),
                on(schema.Send, self._on_send),
                on(schema.Said, self._on_said),
                on(schema.Lost, self._on_lost),
                on(schema.Refused, self._on_refused),
                on(schema.End, self._on_end),
                on(schema.DrawFailed, self._on_draw_failed),
                on(schema.Late, self._on_late),
                on(schema.Group, self._on_group),
                on(schema.Batch, self._on_batch),
                on(schema.StepAside, self._on_step_aside),
                on(schema.Written, self._on_written),
                on(schema.Replayed, self._on_replayed),
                on(schema.StepEnd, self._on_step_end),
                on(schema.Reward, self._on_reward),
                on(schema.RewardFailed, self._on_reward_failed),
                on(schema.WorkerLost, self._on_worker_lost),
                on(schema.Fault, self._on_fault),
                on(schema.Warning, self._on_warning),
                on(schema.Stall, self._on_warning),
                on(schema.EngineDown, self._on_engine_down),
                on(schema.TrainerDown, self._on_trainer_down),
                on(schema.Killed, self._on_killed),
                on(schema.Resumed, self._on_resumed),
                on(schema.Checkpoint, self._on_checkpoint),
                on(schema.Finished, self._on_finished),
                on(schema.Interrupted, self._on_interrupted),
                on(schema.Starting, self._on_starting),
                on(schema.Stopped, self._on_stopped),
                on(schema.Ready, self._books.ready),
                on(schema.BreakerOpen, self._books.opened),
                on(schema.BreakerProbe, self._books.probed),
                on(schema.BreakerClose, self._books.closed),
                on(schema.Eval, self._evals.read),
                on(schema.Push, self._weights.push),
                on(schema.Pushed, self._weights.pushed),
                on(schema.SwapStart, self._weights.swap_started),
                on(schema.SwapEnd, self._weights.swap_ended),
                on(schema.EngineSwap, self._weights.engine_swapped),
            ]
        )

    def read(self, event: Event) -> None:
        self._last_s = event.t
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    # --- one method per kind of event -----------------------------------------------------------------------

    def _on_run(self, event: schema.Run) -> None:
        self._take_job(event)
        for name, task in event.tasks.items():
            self._tasks[name] = _Task(task.share)
        self._books.names(self._tasks)

    def _on_changed(self, event: schema.Changed) -> None:
        """A resumed job has other settings."""
        self._take_job(event.job)

    def _take_job(self, job: schema.Run) -> None:
        self._job = job
        self._costs.job(job, self._last_s)

    def _on_admit(self, event: schema.Admit) -> None:
        group_id, task = event.group, _domain(event.task)
        self._task_of[group_id] = task
        self._new[group_id] = None
        self._fate.pop(group_id, None)
        self._groups[group_id] = _Group(task)

    def _on_start(self, event: schema.Start) -> None:
        task = _domain(event.task)
        self._live[event.id] = _Work(event.id, task, event.eval)
        self._tasks[task].pool = event.pool

    def _on_send(self, event: schema.Send) -> None:
        self._costs.sent(event)

    def _on_said(self, event: schema.Said) -> None:
        self._sampled_tokens += event.tokens
        cost = self._costs.said(event)
        work = self._live.get(event.id.rpartition("/")[0])
        if work is not None:
            work.tokens += event.tokens
            work.prefill += event.prefill
            work.cost += cost

    def _on_lost(self, event: schema.Lost) -> None:
        """The call is sent again: whatever becomes of its attempt, this part of it was for nothing."""
        attempt = event.id.rpartition("/")[0]
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
        if status == "failed":
            self._books.failed(work.task, event.reason)
        self._statuses[status] = self._statuses.get(status, 0) + 1
        task = self._tasks[work.task]
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
                self._metrics.add(f"{prefix}response_length/mean", Mean(work.tokens))
                self._metrics.add(f"{prefix}num_turns/mean", Mean(event.turns))
            for part in list(work.parts)[:MAX_PARTS]:
                self._metrics.add(f"{work.task}/reward/{part}/mean", Mean(work.parts[part]))
        else:
            self._metrics.add(f"stop/{status}", Sum(1))
        group = self._groups.get(event.id.rsplit(".", 2)[0])
        if status in ("done", "truncated") and group is not None and event.reward is not None:
            group.scored.append(work)
        else:
            self._wasted({"stale": "stale", "aborted": "surplus"}.get(status, "failed"), [work])

    def _on_draw_failed(self, event: schema.DrawFailed) -> None:
        self._failures.add("draw", event.task, event.reason)
        if not event.eval:
            self._books.failed(event.task, event.reason)

    def _on_late(self, event: schema.Late) -> None:
        self._late += 1

    def _on_group(self, event: schema.Group) -> None:
        self._close(event.group, event.how)

    def _on_batch(self, event: schema.Batch) -> None:
        for group_id, task_id, born in zip(event.groups, event.tasks, event.born, strict=True):
            age = max(0, event.serving - born)
            self._ages[age] = self._ages.get(age, 0) + 1
            self._max_age = max(self._max_age, age)
            self._max_steps = max(self._max_steps, event.step - born)
            self._metrics.add("staleness/max", Max(age))
            self._metrics.add("staleness/mean", Mean(age))
            self._trained_tasks[task_id] = self._trained_tasks.get(task_id, 0) + 1
            self._books.trained(group_id, _domain(task_id), event.step)
            if group_id in self._groups:
                self._in_step[group_id] = self._groups[group_id]
            self._close(group_id, "trained")
        self._trained_tokens += event.tokens
        self._unwritten[event.step] = event

    def _on_step_aside(self, event: schema.StepAside) -> None:
        """Of the batch, but not trained on. A step that is done again says so again."""
        if event.step in self._aside_steps:
            return
        self._aside_steps[event.step] = None
        reasons = dict(event.trajectories)
        for name, reason in reasons.items():
            self._failures.add("sample", name, reason)
        self._metrics.add("error/sample", Sum(len(reasons)))
        works = [work for group in self._in_step.values() for work in group.scored if work.id in reasons]
        self._wasted("failed", works)
        self._trained_tokens -= sum(work.tokens for work in works)
        for group_id in event.groups:
            self._aside_groups[group_id] = None
            self._close(group_id, "failed")
            self._books.not_trained(group_id, self._task_of[group_id])

    def _on_written(self, event: schema.Written) -> None:
        self._unwritten.pop(event.step, None)

    def _on_replayed(self, event: schema.Replayed) -> None:
        """A resumed job made again what was lost; a step that had not ended before counts now."""
        if event.step not in self._ended_steps:
            self._on_step_end(event)

    def _on_step_end(self, event: schema.StepEnd | schema.Replayed) -> None:
        self._ended_steps[event.step] = None
        self._in_step.clear()
        self._steps.append(event.t - self._step_s)
        self._step_s = event.t
        self._metrics.add("timing_s/step", Last(self._steps[-1]))
        self._metrics.add("timing_s/train", Last(event.train_s))
        for name, value in event.metrics.items():
            self._metrics.add(name, Last(math.nan if value is None else value))
        self.row = {"step": event.step, "time_s": event.t, **self._metrics.row()}

    def _on_reward(self, event: schema.Reward) -> None:
        self._reward.scored(event)
        self._costs.reward(event)
        work = self._live.get(event.id)
        if work is not None:
            work.parts = event.parts

    def _on_reward_failed(self, event: schema.RewardFailed) -> None:
        self._reward.failed()
        self._costs.reward_failed()
        self._failures.add("reward", event.id, event.reason)

    def _on_worker_lost(self, event: schema.WorkerLost) -> None:
        self._failures.add("worker", event.worker, event.reason)

    def _on_fault(self, event: schema.Fault) -> None:
        self._faults[event.fault] = self._faults.get(event.fault, 0) + 1

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
        """The coordinator is gone, and with it every attempt under way. If it said that it ends, it was not killed."""
        if self._state == "running":
            self._restarts["coordinator"] += 1
            self._failures.add("coordinator", "coordinator", f"was killed after {len(self._steps)} steps")
        for attempt, work in self._live.items():
            work.cost += self._costs.given_up(attempt, event.t)
            if work.evaluation:
                self._evaluation_cost += work.cost
            else:
                self._tasks[work.task].cost += work.cost
                self._wasted("restart", [work])
        self._live.clear()

    def _on_resumed(self, event: schema.Resumed) -> None:
        """History goes back to the checkpoint: what was admitted since, and not trained on, never was."""
        for batch in self._unwritten.values():  # killed between forming it and writing it: it will be formed again
            for group_id, task_id in zip(batch.groups, batch.tasks, strict=True):
                self._fate[group_id] = "restart"
                self._trained_tasks[task_id] -= 1
                self._books.not_trained(group_id, _domain(task_id))
            self._trained_tokens -= batch.tokens
        self._unwritten.clear()
        self._books.resumed(event.out)
        for group_id in list(self._new):
            if self._fate.get(group_id) != "trained" and group_id not in self._aside_groups:
                self._close(group_id, "restart")
                del self._fate[group_id], self._task_of[group_id]
        self._new.clear()
        for group_id in [*event.ready, *event.open]:
            if self._fate.get(group_id) != "trained" and group_id not in self._aside_groups:
                self._fate.pop(group_id, None)

    def _on_checkpoint(self, event: schema.Checkpoint) -> None:
        self._new.clear()
        self._at_checkpoint = dict.fromkeys([*event.ready, *event.open])
        self._books.checkpoint(event.step, self._at_checkpoint)

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
            self._wasted(how, group.scored)

    def _fates(self, task: str | None = None) -> dict[str, int]:
        """How many groups, of one task or of all, ended how."""
        counts = dict.fromkeys(("trained", *WASTE), 0)
        for group_id, how in self._fate.items():
            if task is None or self._task_of.get(group_id) == task:
                counts[how] += 1
        return counts

    def _wasted(self, how: str, works: list[_Work]) -> None:
        for work in works:
            self._waste[how][0] += 1
            self._waste[how][1] += work.tokens
            self._tasks[work.task].wasted_cost += work.cost

    def result(self) -> dict[str, Any]:
        job = self._job
        seconds = max(self._last_s, 1e-9)
        ends = self._fates()
        alive = [group_id for group_id in self._task_of if group_id not in self._fate]
        lost = (
            [group_id for group_id in alive if group_id not in self._at_checkpoint] if self._state == "finished" else []
        )
        return {
            "name": job and job.name,
            "mode": job and job.mode,
            "seed": job and job.seed,
            "clock": job and job.clock,
            "state": self._state,
            "reason": self._reason,
            "steps": len(self._steps),
            "time_s": round(self._last_s, 3),
            "step_time_s": spread(self._steps),
            "throughput_tokens_per_s": round(self._trained_tokens / seconds, 3),
            "sampled_tokens_per_s": round(self._sampled_tokens / seconds, 3),
            "trajectories": dict(sorted(self._statuses.items())),
            "staleness": {
                "bound": job and job.bound,
                "max": self._max_age,
                "max_steps": self._max_steps,
                "histogram": {str(age): self._ages[age] for age in sorted(self._ages)},
                "in_flight_over_swaps": self._weights.in_flight,
            },
            "waste": {how: {"trajectories": count, "tokens": tokens} for how, (count, tokens) in self._waste.items()},
            "groups": {
                "admitted": len(self._task_of),
                **ends,
                "open": len(alive),
                "lost": len(lost),
                "trained_twice": sum(1 for count in self._trained_tasks.values() if count > 1),
                "late_results": self._late,
            },
            "pools": self._costs.pool_rows(self._last_s),
            "weights": self._weights.row(),
            "reward": self._reward.row(job, seconds),
            "tasks": {name: self._task_row(name, ends["trained"]) for name in self._tasks},
            "cost": self._cost(),
            "evaluations": self._evals.rows,
            "eval": self._evals.before_and_after(),
            "restarts": dict(self._restarts),
            "failures": self._failures.rows(),
            "faults": dict(sorted(self._faults.items())),
            "warnings": self._warnings + [f"and {self._more_warnings} more"] * (self._more_warnings > 0),
        }

    def _task_row(self, name: str, trained: int) -> dict[str, Any]:
        task = self._tasks[name]
        count = max(1, task.rewarded)
        ends = self._fates(name)
        admitted = sum(1 for other in self._task_of.values() if other == name)
        return {
            "pool": task.pool,
            "share": round(task.share, 4),
            "trained_share": round(ends["trained"] / trained, 4) if trained else 0.0,
            "admitted": admitted,
            "stale_share": round(ends["stale"] / admitted, 4) if admitted else 0.0,
            **ends,
            "trajectories": task.trajectories,
            "reward": round(task.rewards / count, 4),
            "turns": round(task.turns / count, 2),
            "sampled_tokens": round(task.tokens / count, 1),
            "prefill_tokens": round(task.prefill / count, 1),
            **self._books.row(name),
        }

    def _cost(self) -> dict[str, Any]:
        """Device-hours times price: what was reserved, and which part of it which task used."""
        used = sum(task.cost for task in self._tasks.values())
        under_way = sum(work.cost for work in self._live.values())
        idle = self._costs.engines(self._last_s) - used - under_way - self._evaluation_cost
        return {
            **self._costs.reserved(self._last_s),
            "tasks": {
                name: {"used": round(task.cost, 4), "wasted": round(task.wasted_cost, 4)}
                for name, task in self._tasks.items()
            },
            "wasted": round(sum(task.wasted_cost for task in self._tasks.values()), 4),
            "evaluation": round(self._evaluation_cost, 4),
            "under_way": round(under_way, 4),
            "idle": round(max(0.0, idle), 4),
        }


def _domain(task_id: str) -> str:
    return task_id.split("/", 1)[0]

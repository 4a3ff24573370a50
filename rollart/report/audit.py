"""Checks a run's promises by its events alone: works on simulated, real, live and finished runs.

Numbers are those of the promises (docs/promises.md). The audit keeps its own books: it never trusts a figure that the
control plane computed (an age, a count of slots, a serving version) where it can work it out from what happened.
"""

from dataclasses import dataclass

from rollart.events import schema
from rollart.events.log import Fold
from rollart.events.schema import attempt_of, group_of, task_set
from rollart.report.audit_tasks import TaskBooks

SENDS = 6
"""A call may be given up after this many sends were lost with their engines; not before."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One attempt under way."""

    task: str
    pool: str
    eval: bool
    started_s: float
    version: int = 0
    """The newest that sampled for it."""
    born: int | None = None
    """The first that did."""
    sent: int = 0
    """The event of its last call."""
    lost: int = 0
    """Calls that were lost with their engines."""
    refused: bool = False
    """One of its answers was."""


class Audit(Fold):
    """Feed it every event of a run, in order, then ask for `violations`."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.faults: dict[str, list[int]] = {}
        """Kind -> [how often it fired, how often of these during a swap]"""
        self._job: schema.Run
        """From the first event, and the last change."""
        self._serving = 0
        self._target = 0
        self._versions: dict[str, int] = {}
        self._pool: dict[str, str] = {}
        self._swapping = False
        self._suspended: dict[str, None] = {}
        self._alive: dict[str, str] = {}
        """Group -> `open`, `ready`, `taken`, or `reopening` after a restart."""
        self._task_of: dict[str, str] = {}
        self._ended: dict[str, str] = {}
        self._runs: dict[str, _Attempt] = {}
        self._scored: dict[str, tuple[str, int]] = {}
        self._calls: dict[str, tuple[str, str]] = {}
        """Attempt -> (call, engine) under way."""
        self._hit: dict[str, int] = {}
        """Attempt or engine -> the last fault that happened to it; an engine's is forgotten as it goes down."""
        self._spoilt: dict[str, None] = {}
        """Calls whose answer a fault has spoilt: it must not be believed."""
        self._outages: dict[str, float] = {}
        """Task -> a fault makes it fail until this time."""
        self._judges_down: dict[str, None] = {}
        """Engines of judges that a fault has hit, until they come up again."""
        self._judges_up_s = -1.0
        self._unscored_s = -1.0
        """When the last outage of the platform of reward functions ends."""
        """When one came up last."""
        self._task_books = TaskBooks(self._broken)
        self._buckets: dict[int, dict[int, None]] = {}
        self._manifests: dict[int, int] = {}
        self._written: dict[int, list[str]] = {}
        self._trained: dict[str, int] = {}
        self._formed: dict[int, list[str]] = {}
        """Step -> the groups of its batch, as formed last."""
        self._trained_tasks: dict[str, str] = {}
        """Task -> the group in which it was trained on."""
        self.members: dict[str, list[str]] = {}
        """Of groups that became ready and are not covered by a checkpoint."""
        self._aside: dict[int, list[str]] = {}
        """Step -> the trajectories that it set aside."""
        self._told_again: dict[int, None] = {}
        """Steps that set something aside since their replay began."""
        self._untrainable: dict[int, bool] = {}
        """Steps that a fault gave untrainable data -> whether the trainer may still be lost with it."""
        self._steps_done = 0
        self._stepping = -1
        self._checkpoint: tuple[int, dict[str, None]] = (0, {})
        self._over = ""
        self.full = False
        """The run stopped because there was no room to write for longer than it may wait."""
        self._full_s: dict[str, float] = {}
        """What waits for room -> since when."""
        self._trainer_faults = 0
        super().__init__(before=self._task_books)

    @property
    def over(self) -> bool:
        """The run has said how it ended."""
        return bool(self._over)

    def finish(self) -> list[str]:
        """At the end of the run. Returns all violations."""
        if not self._over:
            self._broken(10, "the run ended without saying how")
        if self._over == "finished":
            kept = self._checkpoint[1]
            for group, state in self._alive.items():
                if state != "taken" and group not in kept:
                    self._broken(8, f"group {group} is lost: {state} at the end and not in the last checkpoint")
            for attempt, (call, _) in self._calls.items():
                if attempt not in self._runs:
                    self._broken(6, f"call {call} was never answered, sent again or given up")
        return self.violations

    def _broken(self, promise: int, text: str) -> None:
        self.violations.append(f"promise {promise}: {text} (event {self.now.n}, t = {self.now.t})")

    # --- the job --------------------------------------------------------------------------------------------

    def _on_run(self, event: schema.Run) -> None:
        self._job = event

    def _on_changed(self, event: schema.Changed) -> None:
        self._job = event.job

    def _on_started(self, event: schema.Started) -> None:
        for engine in event.engines:
            self._versions[engine] = 0

    def _on_finished(self, event: schema.Finished) -> None:
        self._over = "finished"

    def _on_interrupted(self, event: schema.Interrupted) -> None:
        self._over = "finished"

    def _on_stopped(self, event: schema.Stopped) -> None:
        self._over = "stopped"
        self.full = event.full
        if self.full and event.t - min(self._full_s.values(), default=event.t) < self._job.store_full_s - 1.0:
            self._broken(8, "the job stopped for lack of room too early")
        if event.deadlock:
            self._broken(10, f"deadlock: {event.reason}")

    def _on_fault(self, event: schema.Fault) -> None:
        count = self.faults.setdefault(event.fault, [0, 0])
        count[0] += 1
        count[1] += self._swapping
        self._trainer_faults += event.fault.startswith("trainer")
        if event.fault == "reward_outage":
            self._unscored_s = max(self._unscored_s, event.t + event.for_s)
        elif event.fault.startswith(("env", "reward", "refused", "engine", "slow_answer", "shard")):
            self._hit[event.target] = event.n
            if self._is_judge(event.target):
                self._judges_down[event.target] = None
        elif event.fault == "bad_answer":
            self._hit[attempt_of(event.target)] = event.n
            self._spoilt[event.target] = None
        elif event.fault == "failing_task":
            until_s = event.t + event.for_s
            self._outages[event.target] = max(until_s, self._outages.get(event.target, 0.0))
        elif event.fault == "untrainable_batch":
            self._untrainable[int(event.target.removeprefix("step "))] = True

    def _on_store_full(self, event: schema.StoreFull) -> None:
        self._full_s[event.what] = event.t

    def _on_store_room(self, event: schema.StoreRoom) -> None:
        self._full_s.pop(event.what, None)

    def _on_trainer_down(self, event: schema.TrainerDown) -> None:
        """A full store must not count as the trainer's failure."""
        if self._untrainable.get(self._steps_done):
            self._untrainable[self._steps_done] = False
            return
        self._trainer_faults -= 1
        if self._simulated and self._trainer_faults < 0:
            self._broken(8, f"the trainer was given up ({event.reason}) though nothing happened to it")

    # --- trajectories ---------------------------------------------------------------------------------------

    def _on_admit(self, event: schema.Admit) -> None:
        group = event.group
        if self._alive.get(group, "reopening") != "reopening" or group in self._ended:
            self._broken(8, f"group {group} was admitted twice")
        self._alive[group] = "open"
        self._task_of[group] = event.task
        if len(self._alive) > self._job.slots:
            self._broken(2, f"{len(self._alive)} groups alive in {self._job.slots} slots")

    def _on_start(self, event: schema.Start) -> None:
        if event.id in self._runs or event.id in self._scored:
            self._broken(8, f"attempt {event.id} was started twice")
        self._runs[event.id] = _Attempt(task=task_set(event.task), pool=event.pool, eval=event.eval, started_s=event.t)

    def _on_send(self, event: schema.Send) -> None:
        call = event.id
        attempt = attempt_of(call)
        run = self._runs.get(attempt)
        engine = event.engine
        self._pool.setdefault(engine, event.pool)
        if run is None:
            self._broken(6, f"call {call} belongs to no attempt")
            return
        if attempt in self._calls:
            self._broken(6, f"call {call} was sent while {self._calls[attempt][0]} was under way")
        self._calls[attempt] = (call, engine)
        self._spoilt.pop(call, None)
        run.sent = event.n
        if event.pool != run.pool and not event.fallback:
            self._broken(4, f"call {call} went to pool {event.pool} instead of {run.pool}, and no reason is recorded")
        if engine in self._suspended:
            self._broken(6, f"call {call} went to {engine}, which is suspended")
        if engine not in self._versions:
            self._broken(6, f"call {call} went to {engine}, which is not up")
        elif self._versions[engine] < run.version:
            self._broken(4, f"call {call} went to version {self._versions[engine]} after {run.version}")
        elif not self._swapping and self._versions[engine] < self._serving:
            self._broken(4, f"{engine} serves version {self._versions[engine]} while {self._serving} is served")
        self._must_be_fresh(run, f"call {call}")

    def _on_said(self, event: schema.Said) -> None:
        call = event.id
        attempt = attempt_of(call)
        run = self._runs.get(attempt)
        if self._calls.pop(attempt, None) != (call, event.engine) or run is None:
            self._broken(6, f"an answer to {call} came from {event.engine}, where it was not sent")
            return
        if call in self._spoilt:
            self._broken(6, f"a bad answer to {call} was believed")
        counted, newest = 0, max(self._serving, self._target)
        for version, count in event.spans:
            counted += count
            if version < run.version:
                self._broken(4, f"call {call}: version {version} after {run.version}")
            if version > newest:
                self._broken(5, f"call {call}: version {version} was never served")
            run.version = version
            if run.born is None:
                run.born = version
        if counted != event.tokens:
            self._broken(6, f"call {call}: {event.tokens} tokens, but spans for {counted}")
        self._must_be_fresh(run, call)

    def _must_be_fresh(self, run: _Attempt, what: str) -> None:
        """Under the live re-check, a swap stops attempts that are too old, wherever they wait."""
        if self._job.recheck == "live" and not run.eval and self._too_old(run.born):
            self._broken(1, f"{what}, born {run.born}, went on under {self._serving}")

    def _on_reward(self, event: schema.Reward) -> None:
        run = self._runs.get(event.id)
        if run is None:
            self._broken(6, f"a reward came for {event.id}, which is not under way")
        else:
            self._must_be_fresh(run, f"the scoring of {event.id}")

    def _on_lost(self, event: schema.Lost) -> None:
        key = attempt_of(event.id)
        if key in self._runs:
            self._runs[key].lost += 1
        if self._calls.pop(key, None) != (event.id, event.engine):
            self._broken(6, f"call {event.id} was lost with {event.engine}, where it was not")

    def _on_refused(self, event: schema.Refused) -> None:
        key = attempt_of(event.id)
        if self._calls.pop(key, None) != (event.id, event.engine):
            self._broken(6, f"an answer to {event.id} of {event.engine} was refused, where it was not sent")
        if key in self._runs:
            self._runs[key].refused = True

    def _on_end(self, event: schema.End) -> None:
        run = self._runs.pop(event.id, None)
        if run is None:
            self._broken(6, f"attempt {event.id} ended without having started")
            return
        call = self._calls.pop(event.id, None)
        if call is not None and event.status in ("done", "truncated"):
            self._broken(6, f"attempt {event.id} ended well while {call[0]} was under way")
        if run.refused and event.status in ("done", "truncated"):
            self._broken(6, f"attempt {event.id} ended well though one of its answers was refused")
        if run.eval:
            return
        if event.status in ("done", "truncated"):
            self._scored[event.id] = (event.status, run.born if run.born is not None else -1)
        if event.status == "failed":
            judged = event.stage == "reward" and (self._judges_down or run.started_s <= self._judges_up_s)
            down = event.stage == "reward" and run.started_s <= self._unscored_s
            if not judged and not down:
                self._must_have_cause(event.id, event.reason, run, call[1] if call else "")

    @property
    def _simulated(self) -> bool:
        """Every failure is announced by a `fault` event."""
        return self._job.clock == "virtual" and not self._job.breaks

    def _must_have_cause(self, attempt: str, reason: str, run: _Attempt, engine: str) -> None:
        """An attempt fails because of a fault of its own, not with an engine. One whose call was in an engine when that
        began to hang may exceed its own limit before the engine is given up; no later call may."""
        if reason.startswith("EngineError") and run.lost < SENDS:
            self._broken(6, f"attempt {attempt} was given up with its engine instead of being sent again")
        hung = self._hit.get(engine, -1) > run.sent
        if run.started_s <= self._outages.get(run.task, -1.0):
            return  # in lockstep it may end some time after
        if self._simulated and not hung and attempt not in self._hit and not reason.startswith("EngineError"):
            self._broken(3, f"attempt {attempt} failed ({reason}) though nothing happened to it")

    # --- groups and batches -----------------------------------------------------------------------------------

    def _on_ready(self, event: schema.Ready) -> None:
        group = event.group
        if self._alive.get(group) != "open":
            self._broken(8, f"group {group} became ready while {self._alive.get(group) or 'not alive'}")
        self._alive[group] = "ready"
        self.members[group] = event.members
        for member in event.members:
            if member not in self._scored:
                self._broken(3, f"group {group} holds {member}, which did not end well")
        sizes = self._job.tasks[task_set(self._task_of[group])]
        if not sizes.min_group_size <= len(event.members) <= sizes.group_size:
            self._broken(3, f"group {group} has {len(event.members)} members")
        born = [self._scored[member][1] for member in event.members if member in self._scored]
        if born and min(born) != event.born:
            self._broken(1, f"group {group} says it was born {event.born}; its members say {min(born)}")
        self._ended[f"born {group}"] = str(min(born, default=-1))

    def _on_group(self, event: schema.Group) -> None:
        group = event.group
        if self._alive.pop(group, "taken") == "taken":
            self._broken(8, f"group {group} ended {event.how}, but was not alive")
        self._ended[group] = event.how

    def _on_batch(self, event: schema.Batch) -> None:
        for group in event.groups:
            if self._alive.get(group) != "ready":
                self._broken(8, f"group {group} is trained on, but is {self._alive.get(group) or 'not alive'}")
            if group in self._trained:
                self._broken(8, f"group {group} is trained on twice")
            self._alive[group] = "taken"
            self._trained[group] = event.step
            if self._trained_tasks.setdefault(self._task_of.get(group, ""), group) != group:
                self._broken(8, f"a task of step {event.step} was trained on before")
            born = int(self._ended.get(f"born {group}", -1))
            if self._job.recheck != "start" and self._too_old(born):
                self._broken(1, f"step {event.step} trains on {group}, born {born} under {self._serving}")
            if self._job.recheck != "start" and event.step - born > self._job.bound + 1:
                self._broken(1, f"step {event.step} trains on {group}, born {born}: too many steps ago")
        self._formed[event.step] = list(event.groups)
        self._stepping = -1

    def _too_old(self, born: int | None) -> bool:
        return born is not None and born < self._serving - self._job.bound

    def _on_written(self, event: schema.Written) -> None:
        self._written[event.step] = self._formed.pop(event.step, [])

    def _on_step_start(self, event: schema.StepStart) -> None:
        step = event.step
        if step not in self._written:
            self._broken(8, f"step {step} began before its batch was written")
        if step != self._steps_done:
            self._broken(8, f"step {step} began after {self._steps_done} steps")
        if self._serving < step - 1:
            self._broken(1, f"step {step} began under version {self._serving}")

    def _on_step_aside(self, event: schema.StepAside) -> None:
        """What a step left out must be of its own groups, and the same in a replay."""
        step = event.step
        names = [name for name, _ in event.trajectories]
        groups = self._written.get(step, [])
        members = {group: self.members.get(group, []) for group in groups}
        strange = set(names) - {name for own in members.values() for name in own}
        if strange:
            self._broken(8, f"step {step} set aside {min(strange)}, which is not in its batch")
        whole = [group for group, own in members.items() if own and set(own) <= set(names)]
        if whole != event.groups:
            self._broken(8, f"step {step} set aside {whole} whole, but says {event.groups}")
        if self._aside.setdefault(step, names) != names:
            self._broken(8, f"step {step} was done again, and set other trajectories aside")
        self._told_again[step] = None
        self._ended.update(dict.fromkeys(whole, "failed"))

    def _must_be_set_aside(self, step: int) -> None:
        if step in self._untrainable and not self._aside.get(step):
            self._broken(8, f"step {step} trained on data that cannot be trained on")

    def _on_replayed(self, event: schema.Replayed) -> None:
        step = event.step
        self._must_be_set_aside(step)
        if self._aside.get(step) and step not in self._told_again:
            self._broken(8, f"step {step} was done again, and set nothing aside")

    def _on_step_end(self, event: schema.StepEnd) -> None:
        self._steps_done = event.version
        self._must_be_set_aside(event.step)
        if event.version != event.step + 1:
            self._broken(8, f"step {event.step} made version {event.version}")

    def _on_replay(self, event: schema.Replay) -> None:
        step = event.step
        self._told_again.pop(step, None)
        if self._written.get(step) != event.groups:
            self._broken(8, f"step {step} is replayed with other groups than were written")

    # --- weights and engines ----------------------------------------------------------------------------------

    def _on_bucket(self, event: schema.Bucket) -> None:
        self._buckets.setdefault(event.version, {})[event.bucket] = None

    def _on_manifest(self, event: schema.Manifest) -> None:
        if len(self._buckets.get(event.version, {})) < event.buckets:
            self._broken(5, f"the manifest of version {event.version} appeared before its buckets")
        self._manifests[event.version] = event.buckets

    def _on_loaded(self, event: schema.Loaded) -> None:
        if event.of != [event.version]:
            self._broken(5, f"{event.engine} loaded version {event.version} from buckets of {event.of}")
        if event.version not in self._manifests:
            self._broken(5, f"{event.engine} loaded version {event.version}, which has no manifest")

    def _on_engine_swap(self, event: schema.EngineSwap) -> None:
        if event.engine in self._versions:
            self._versions[event.engine] = event.version

    def _on_suspend(self, event: schema.Suspend) -> None:
        self._suspended.update(dict.fromkeys(event.engines))

    def _on_resume(self, event: schema.Resume) -> None:
        for engine in event.engines:
            self._suspended.pop(engine, None)

    def _is_judge(self, engine: str) -> bool:
        """It has no versions, and its calls are not events."""
        pool = self._job.pools.get(engine.rpartition("-")[0])
        return pool is not None and pool.judge

    def _on_engine_down(self, event: schema.EngineDown) -> None:
        """An engine that computes is not given up because one request takes long."""
        other = event.reason.startswith("swap to") or "could not be believed" in event.reason
        if self._hit.pop(event.engine, None) is None and self._simulated and not other:
            self._broken(3, f"{event.engine} was given up ({event.reason}) though nothing happened to it")
        self._versions.pop(event.engine, None)
        self._suspended.pop(event.engine, None)

    def _on_engine_up(self, event: schema.EngineUp) -> None:
        if self._is_judge(event.engine):
            self._judges_down.pop(event.engine, None)
            self._judges_up_s = event.t
            return
        self._versions[event.engine] = event.version
        if event.version < self._serving:
            self._broken(5, f"{event.engine} came up with version {event.version} under {self._serving}")

    def _on_shard_down(self, event: schema.ShardDown) -> None:
        """Its attempts under way are forgotten; its groups are admitted once more, and its engines come with it."""
        if self._hit.pop(event.shard, None) is None and self._simulated:
            self._broken(3, f"{event.shard} was given up ({event.reason}) though nothing happened to it")
        groups = dict.fromkeys(event.groups)
        for attempt in list(self._runs):
            if attempt in event.episodes or group_of(attempt) in groups:
                del self._runs[attempt]
                self._calls.pop(attempt, None)
        for group in groups:
            if self._alive.get(group) != "open":
                self._broken(8, f"group {group} was lost with {event.shard} while {self._alive.get(group)}")
            self._alive[group] = "reopening"
        for engine in event.engines:
            self._versions.pop(engine, None)
            self._suspended.pop(engine, None)

    def _on_shard_up(self, event: schema.ShardUp) -> None:
        self._versions.update(dict.fromkeys(event.engines, event.version))
        if event.version < self._serving:
            self._broken(5, f"{event.shard} came up with version {event.version} under {self._serving}")

    def _on_swap_start(self, event: schema.SwapStart) -> None:
        self._swapping = True
        self._target = event.version

    def _on_swap_end(self, event: schema.SwapEnd) -> None:
        self._swapping = False
        for engine, version in self._versions.items():
            if version < event.version:
                self._broken(5, f"{engine} still serves version {version} after the swap to {event.version}")
        self._serving = event.version
        for group in [group for group, state in self._alive.items() if state == "taken"]:
            del self._alive[group]
            self._ended.setdefault(group, "trained")

    # --- crashes ----------------------------------------------------------------------------------------------

    def _on_checkpoint(self, event: schema.Checkpoint) -> None:
        step = event.step
        groups = dict.fromkeys([*event.ready, *event.open])
        for group, state in self._alive.items():
            if state != "taken" and group not in groups:
                self._broken(8, f"group {group} is {state}, but not in the checkpoint of step {step}")
        self._checkpoint = (step, groups)
        self.members = {
            group: members
            for group, members in self.members.items()
            if group in groups or self._trained.get(group, -1) >= step
        }

    def _on_killed(self, event: schema.Killed) -> None:
        """All workers died with the coordinator. Attempts under way are forgotten."""
        self._runs.clear()
        self._calls.clear()
        self._versions.clear()
        self._suspended.clear()
        self._judges_down.clear()
        self._swapping = False
        self._full_s.clear()
        self._serving = self._target = 0
        self._buckets.clear()
        self._manifests.clear()

    def _on_resumed(self, event: schema.Resumed) -> None:
        """History goes back to the checkpoint; what was trained on since stays trained."""
        step, kept = self._checkpoint
        if event.checkpoint != step:
            self._broken(8, f"resumed from step {event.checkpoint}, but the last checkpoint is of {step}")
        if [*event.ready, *event.open] != list(kept):
            self._broken(8, "resumed with other groups than the checkpoint holds")
        written = {group for at, groups in self._written.items() if at >= step for group in groups}
        for group, trained_at in list(self._trained.items()):
            if group not in written and trained_at >= step:
                del self._trained[group]
                self._trained_tasks.pop(self._task_of.get(group, ""), None)
        for group in list(self._alive):
            if group not in event.ready:
                del self._alive[group]
        for group in kept:
            if group in written:
                self._alive.pop(group, None)
            else:
                self._ended.pop(group, None)
                self._alive[group] = "ready" if group in event.ready else "reopening"
        self._steps_done = event.step
        if event.step != step + len([at for at in self._written if at >= step]):
            self._broken(8, f"resumed at step {event.step}: not every written batch was replayed")

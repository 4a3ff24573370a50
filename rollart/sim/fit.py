"""`rollart sim fit`: from a real run's events to the simulator's settings (`sim:` of a job file).

Reads the run's job and its `events.jsonl`, and nothing else. Every figure is what the run itself showed from the
coordinator's side, so the control plane's own time is in it: between an answer and the next call, between a call and
its answer. Best fitted on a run in which generation and training take turns (`sync+`): where they overlap, what they
cost each other is in the figures. The first steps of a run can be left out: on a GPU kernels are compiled in them.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import Spread
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event
from rollart.hardware import engine_costs
from rollart.sim.curve import Curve, fit_curve
from rollart.sim.steps import GenerateCall, Residual, StepCosts, fit_steps
from rollart.types import EngineWork, Json, JsonObject, ParsedJson, StepSums

SAME = 0.01
"""Values that spread by less than this share of their mean are taken for constant."""
SKEWED = 1.0
"""Skewness from which on a lognormal is taken instead of a normal distribution."""
BEFORE_SAVE = (schema.Started, schema.SwapEnd, schema.StepEnd, schema.Push)
"""What a checkpoint may come right after."""
LAST = "last_step_s"
"""Where the seconds of the step after an attempt's last answer are kept: they count where no other step was seen, as in
a task of one turn."""
SPREADS = ("turns", "prompt_tokens", "observation_tokens", "answer_tokens", "reset_s", "step_s", "reward_s")
"""Keys of `sim.tasks` that are fitted with a distribution."""
SHORTEST_S = 1e-6
"""For a rate: no transfer is taken to be shorter than this."""


@dataclass(slots=True)
class _Attempt:
    """What is known of one attempt so far."""

    task: str
    started_s: float
    free_s: float | None = None
    """When the last answer came."""
    said: int = 0
    """Tokens of that answer."""
    prompt: int = 0
    """Of the last call."""
    born: int | None = None
    """The version of its first token."""
    trained: bool = True
    """Not of an evaluation."""


Seen = dict[str, list[float]]
"""What was seen of one task: values by the key of `sim.tasks` that they are for."""


class Fit:
    """Feed it every event of a run, in order; then ask for the `profile`."""

    def __init__(self, job: Job, skip: int = 0) -> None:
        """`skip`: train steps at the beginning of each run, of which no time is taken."""
        self._job = job
        self.skip = skip
        self._counted_s = -math.inf if not skip else math.inf
        """When the first step that counts began."""
        self._tasks: dict[str, Seen] = {task.name: defaultdict(list) for task in job.tasks}
        self._rewards: dict[str, dict[str, list[tuple[int, float]]]] = {task.name: {} for task in job.tasks}
        """Task -> group, its run in front -> version that began each member, and its reward."""
        self._live: dict[str, _Attempt] = {}
        self._calls: dict[str, GenerateCall] = {}
        """Sent and not answered."""
        self._done: list[GenerateCall] = []
        self._run = 0
        self._worked: dict[str, EngineWork] = {}
        """By engine: what it said last of its steps."""
        self.reports: dict[str, list[StepSums]] = {}
        """By pool: what the steps between two reports had in them, by kind of step."""
        self._pools: dict[str, str] = {}
        """Of each engine."""
        self._swap_s: list[float] = []
        self._swap_began: float | None = None
        self._swapped_s = -1.0
        """When the last swap ended."""
        self._began: dict[type[Event], float] = {}
        """By kind: when it was last seen."""
        self._pushed: dict[int, float] = {}
        self._push_s: list[float] = []
        self._pull_s: list[float] = []
        self._save_s: list[float] = []
        self._cold_s: list[float] = []
        self._steps: list[tuple[float, float]] = []
        """(tokens, seconds) of each train step but the first, writing the batch down included."""
        self._written_s = 0.0
        self._start_s: list[float] = []

    def next_run(self) -> None:
        """Times and ids begin anew."""
        self._run += 1
        self._counted_s = -math.inf if not self.skip else math.inf
        self._live.clear()
        self._calls.clear()
        self._began.clear()
        self._pushed.clear()
        self._swap_began = None
        self._swapped_s = -1.0

    def read(self, event: Event) -> None:
        match event:
            case schema.Start():
                self._live[event.id] = _Attempt(event.task.split("/", 1)[0], event.t, trained=not event.eval)
            case schema.Send():
                self._sent(event)
            case schema.Said():
                self._said(event)
            case schema.Reward():
                self._rewarded(event)
            case schema.End():
                self._ended(event)
            case schema.Lost():
                self._give_up(event.id, event.t)
            case schema.EngineDown():
                self._worked.pop(event.engine, None)
            case schema.Started():
                self._worked.clear()  # of these or an earlier process
                self._start_s.append(event.t - self._began[schema.Starting])
            case schema.Written():
                self._written_s = event.t - self._began[schema.Batch]
            case schema.StepEnd():
                if event.step and self._counts:  # the first step of a run also warms up what it runs on
                    self._steps.append((event.metrics.get("perf/tokens") or 0.0, self._written_s + event.train_s))
                if event.step + 1 == self.skip:
                    self._counted_s = event.t
            case schema.Push() if self._counts:
                self._pushed[event.version] = event.t
            case schema.Pushed():
                if event.version in self._pushed:
                    self._push_s.append(event.t - self._pushed[event.version])
            case schema.SwapStart():
                self._swap_began = event.t
            case schema.SwapEnd():
                assert self._swap_began is not None
                if self._swap_began >= self._counted_s:
                    self._swap_s.append(event.t - self._swap_began)
                self._swap_began, self._swapped_s = None, event.t
            case schema.EngineWorked():
                self._engine_worked(event)
            case schema.EngineSwap() if self._counts:
                self._pull_s.append(event.pull_s)
            case schema.Checkpoint() if self._counts:
                # What lies between the last thing that was done and this is the save.
                before = [self._began[kind] for kind in BEFORE_SAVE if kind in self._began]
                self._save_s.append(event.t - max(before, default=event.t))
        self._began[type(event)] = event.t

    def _engine_worked(self, event: schema.EngineWorked) -> None:
        now = EngineWork(*(StepSums(*sums) for sums in (event.decode, event.mixed, event.prefill)))
        before = self._worked.get(event.engine)
        self._worked[event.engine] = now
        if before is None or not self._counts:
            return  # its first steps also warm up what it runs on
        for old, new in zip(before, now, strict=True):
            done = StepSums(*(b - a for a, b in zip(old, new, strict=True)))
            if done.steps > 0:
                self.reports.setdefault(self._pools[event.engine], []).append(done)

    @property
    def _counts(self) -> bool:
        """Whether this step's times are taken."""
        return self._counted_s < math.inf

    def _sent(self, event: schema.Send) -> None:
        self._pools[event.engine] = event.pool
        attempt = self._live[event.id.rpartition("/")[0]]
        since_s = attempt.free_s or attempt.started_s
        task, undisturbed = self._tasks[attempt.task], since_s >= self._counted_s and not self._swapped_since(since_s)
        if attempt.free_s is None:
            task["prompt_tokens"].append(event.prompt)
            if undisturbed:
                task["reset_s"].append(event.t - attempt.started_s)
        else:
            task["observation_tokens"].append(event.prompt - attempt.prompt - attempt.said)
            if undisturbed:
                task["step_s"].append(event.t - attempt.free_s)
        attempt.prompt = event.prompt
        self._calls[event.id] = GenerateCall(engine=f"{self._run}/{event.engine}", pool=event.pool, sent_s=event.t)

    def _said(self, event: schema.Said) -> None:
        call = self._calls.pop(event.id)
        attempt = self._live.get(event.id.rpartition("/")[0])
        call.said_s, call.tokens, call.prefill = event.t, event.tokens, event.prefill
        whole = len(event.spans) == 1 and event.finish != "abort"
        call.whole = whole and call.sent_s >= self._counted_s
        if attempt is not None:
            call.prompt = attempt.prompt
            attempt.free_s, attempt.said = event.t, event.tokens
            if attempt.born is None and event.spans:
                attempt.born = event.spans[0][0]
            if whole:
                self._tasks[attempt.task]["answer_tokens"].append(event.tokens)
        self._done.append(call)

    def _rewarded(self, event: schema.Reward) -> None:
        attempt = self._live.get(event.id)
        if attempt is not None:
            if self._counts:
                self._tasks[attempt.task]["reward_s"].append(event.s - event.cold_s)
                if attempt.free_s is not None and attempt.free_s >= self._counted_s:
                    self._tasks[attempt.task][LAST].append(max(0.0, event.t - event.s - attempt.free_s))
            if attempt.trained and attempt.born is not None:
                group = f"{self._run}/{event.id.partition('.')[0]}"
                self._rewards[attempt.task].setdefault(group, []).append((attempt.born, event.value))
        if event.cold_s > 0:
            self._cold_s.append(event.cold_s)

    def _ended(self, event: schema.End) -> None:
        attempt = self._live.pop(event.id, None)
        if attempt is not None and event.status in ("done", "truncated"):
            self._tasks[attempt.task]["turns"].append(event.turns)
        for key in [key for key in self._calls if key.rpartition("/")[0] == event.id]:
            self._give_up(key, event.t)

    def _give_up(self, key: str, at_s: float) -> None:
        """Aborted, or lost with its engine: it was in the batch, but how many tokens it got is not known."""
        call = self._calls.pop(key, None)
        if call is not None:
            call.said_s, call.whole = at_s, False
            self._done.append(call)

    def _swapped_since(self, since_s: float) -> bool:
        """Whether a swap was under way between then and now: a call may have waited for it."""
        return self._swap_began is not None or self._swapped_s > since_s

    # --- the profile ----------------------------------------------------------------------------------------------

    def profile(self) -> ParsedJson:
        """The `sim` settings. Raises JobError where the run is too short to say anything."""
        if not self._steps or not any(call.whole for call in self._done):
            raise JobError(
                "sim fit: the run has no two finished steps"
                + (f" after the first {self.skip} (--skip); leave out fewer, or" if self.skip else ";")
                + " fit a run that got further"
            )
        weight_bytes = self._job.sim.shape.weight_bytes
        costs = self.engines()
        fixed_s, token_s = _linear(self._steps)
        serverless = self._job.rewards.type == "http"  # other simulated workers are always warm
        return {
            "model": self._job.sim.model,
            "tasks": {
                name: _task_settings(task, self._curve(name))
                for name, task in self._tasks.items()
                if task["answer_tokens"]
            },
            "engine": {
                "start_s": _rounded(max(0.0, statistics.fmean(self._start_s) - fixed_s)),
                "load_gb_s": _rate_gb_s(weight_bytes, self._swap_s),
                "call_s": _rounded(statistics.fmean(cost.call_s for cost in costs.values())),
                "measured": {
                    pool: {
                        "step_s": _rounded(cost.step_s),
                        "sequence_s": _rounded(cost.sequence_s),
                        "kv_token_s": _rounded(cost.kv_token_s),
                        "prefill_token_s": _rounded(self._prompt_token_s(pool, cost)),
                        **({"prompt_step_s": _rounded(cost.prompt_step_s)} if cost.prompt_step_s else {}),
                        **({"launch_s": _rounded(cost.launch_s)} if cost.launch_s else {}),
                    }
                    for pool, cost in costs.items()
                },
            },
            "train": {
                "fixed_s": _rounded(fixed_s),
                "token_s": _rounded(token_s),
                "save_s": _rounded(statistics.median(self._save_s) if self._save_s else 0.0),
            },
            "links": {
                "push_gb_s": _rate_gb_s(weight_bytes, self._push_s),
                "pull_gb_s": _rate_gb_s(weight_bytes, self._pull_s),
            },
            "reward": {"cold_start_s": _rounded(statistics.fmean(self._cold_s))} if serverless and self._cold_s else {},
        }

    def _prompt_token_s(self, pool: str, cost: StepCosts) -> float:
        """Where no step had so many tokens that it took longer for them, what the pool's hardware should take."""
        if cost.prefill_token_s > 0 or not (cost.launch_s or cost.prompt_step_s):
            return max(cost.prefill_token_s, 1e-9)
        settings = next(one for one in self._job.engine_pools if one.name == pool)
        assert settings.engines is not None
        hardware = self._job.kinds[settings.hardware]
        hardware = hardware.part(settings.engines.share) if settings.engines.share else hardware
        runtime = self._job.sim.engine.runtime(settings.engines.type)
        return engine_costs(self._job.sim.shape, hardware, settings.engines.gpus, runtime).prefill_token_s(0.0)

    def quality(self) -> JsonObject:
        """How much was seen, and how well what was fitted explains it."""
        return {
            "steps": len(self._steps),
            "engines": {
                pool: {
                    "calls": cost.calls,
                    "median_error": round(cost.error, 4),
                    "residuals": [{"what": one.what, **_as_json(one)} for one in cost.residuals],
                    "steps": [{"what": one.what, **_as_json(one)} for one in cost.steps],
                }
                for pool, cost in self.engines().items()
            },
            "success": {
                task: {"version": curve.last, "fitted": _rounded(curve.at(curve.last))}
                for task, curve in self.curves().items()
            },
            **{one.what: _as_json(one) for one in self.others()},
        }

    def _curve(self, task: str) -> Curve | None:
        """How the task's rewards rose; None where there were none."""
        groups = [
            (min(version for version, _ in members), statistics.fmean(value for _, value in members))
            for members in self._rewards[task].values()
        ]
        return fit_curve(groups) if groups else None

    def curves(self) -> dict[str, Curve]:
        """By task."""
        return {task: curve for task in self._tasks if (curve := self._curve(task)) is not None}

    def others(self) -> list[Residual]:
        """Of train steps; and of pushes, pulls and swaps, of which the median is fitted."""
        fixed_s, token_s = _linear(self._steps)
        trained = [(fixed_s + tokens * token_s, taken_s) for tokens, taken_s in self._steps]
        found = [_off("train", trained)]
        for what, seen in (("push", self._push_s), ("pull", self._pull_s), ("swap", self._swap_s)):
            if seen:
                found.append(_off(what, [(statistics.median(seen), taken_s) for taken_s in seen]))
        return found

    def engines(self) -> dict[str, StepCosts]:
        """By pool: what an engine step costs, and how well that explains the calls."""
        pools = dict.fromkeys(call.pool for call in self._done if call.whole)
        return {
            pool: fit_steps([call for call in self._done if call.pool == pool], self.reports.get(pool, ()))
            for pool in pools
        }


def fit_runs(runs: Sequence[Path], skip: int = 0) -> Fit:
    """Read run directories, of one job with different seeds; their figures are taken together. `skip`: train steps at
    the beginning of each that are left out."""
    fit: Fit | None = None
    for run in runs:
        try:
            job = build_job(yaml.safe_load((run / "job.yaml").read_text()))
            if job.rollout.stepping == "batched":
                raise JobError(
                    f"sim fit: in {run} environments waited for each other (rollout.stepping: batched), which hides "
                    "how long each took; fit a run of another mode, such as sync+"
                )
            fit = fit or Fit(job, skip)
            fit.next_run()
            for event in read_events(run / "events.jsonl"):
                fit.read(event)
        except OSError as error:
            raise JobError(
                f"{run}: is not a run directory ({error.strerror}); give one, such as runs/NAME-TIME"
            ) from None
    assert fit is not None
    return fit


def as_yaml(fit: Fit, runs: Sequence[str]) -> str:
    """The profile as a file for `sim.profile`, with how far it is from what it was fitted to."""
    skipped = f" --skip {fit.skip}" if fit.skip else ""
    head = f"# Made by `rollart sim fit {' '.join(runs)}{skipped}`. Point sim.profile of a job file here.\n"
    profile = yaml.safe_dump(fit.profile(), sort_keys=False)
    return head + "".join(f"# {line}\n" for line in residual_lines(fit)) + profile


def residual_lines(fit: Fit) -> list[str]:
    """`Fit.quality` for people."""
    lines = ["Residuals: median error, error of the furthest tenth, bias (above 0: predicted too long)."]
    for pool, cost in fit.engines().items():
        lines.append(f"engines of {pool}: {cost.calls} calls, milliseconds for a token, measured -> fitted")
        lines += [f"  {_in_words(one, 1e3)} ({one.count} calls)" for one in cost.residuals]
        if cost.steps:
            lines.append(f"steps of {pool}: milliseconds for a step, measured -> fitted")
        lines += [f"  {_in_words(one, 1e3)} ({one.count} steps)" for one in cost.steps]
    lines += [f"{_in_words(one)} ({one.count} times, seconds)" for one in fit.others()]
    for task, curve in fit.curves().items():
        lines.append(
            f"success of {task}: {curve.success:.2f} at version 0, {curve.at(curve.last):.2f} at {curve.last}, the "
            f"last seen; from there to {curve.success + curve.success_gain:.2f} the curve is a guess"
            if curve.success_gain
            else f"success of {task}: {curve.success:.2f}, no rise beyond chance"
        )
    return lines


def _in_words(one: Residual, units: float = 1.0) -> str:
    """`units`: of what is shown, in a second."""
    return (
        f"{one.what}: {one.measured_s * units:.3g} -> {one.predicted_s * units:.3g}, "
        f"{one.error:.1%}, {one.worst:.1%}, {one.bias:+.1%}"
    )


def _off(what: str, pairs: Sequence[tuple[float, float]]) -> Residual:
    """`pairs`: predicted and measured seconds."""
    predicted, measured = np.array(pairs, dtype=np.float64).T
    return Residual.of(what, predicted, np.maximum(measured, SHORTEST_S))


def _as_json(one: Residual) -> JsonObject:
    return {
        "count": one.count,
        "measured_s": _rounded(one.measured_s),
        "predicted_s": _rounded(one.predicted_s),
        "median_error": round(one.error, 4),
        "p90_error": round(one.worst, 4),
        "bias": round(one.bias, 4),
    }


def spread_of(values: Sequence[float]) -> Spread:
    """The distribution these look like: constant, normal or lognormal, cut to what was seen."""
    mean = statistics.fmean(values)
    deviation = statistics.pstdev(values)
    if deviation <= SAME * mean:
        return Spread(mean=_rounded(mean))
    low, high = _rounded(max(0.0, min(values))), _rounded(max(values))
    skewness = statistics.fmean(((value - mean) / deviation) ** 3 for value in values)
    if skewness > SKEWED and low > 0:
        sigma = statistics.pstdev([math.log(value) for value in values])
        return Spread(kind="lognormal", mean=_rounded(mean), sigma=_rounded(sigma), low=low, high=high)
    below, middle, above = (float(value) for value in np.quantile(values, [0.1587, 0.5, 0.8413]))
    cut = Spread(kind="normal", mean=_rounded(middle), sigma=_rounded((above - below) / 2), low=low, high=high)
    if abs(statistics.fmean(cut.value((share + 0.5) / 500) for share in range(500)) - mean) < 2 * SAME * mean:
        return cut  # quantiles also tell a normal distribution of which one end is cut off
    return Spread(kind="normal", mean=_rounded(mean), sigma=_rounded(deviation), low=low, high=high)


def _task_settings(seen: Seen, curve: Curve | None) -> JsonObject:
    values = {key: seen[key] for key in SPREADS} | {"step_s": seen["step_s"] or seen[LAST]}
    settings: dict[str, Json] = {
        key: spread_of(found).model_dump(exclude_defaults=True) for key, found in values.items() if found
    }
    if curve is not None:
        settings["success"] = _rounded(curve.success)
        settings["success_gain"] = _rounded(curve.success_gain)
        if curve.success_steps is not None:
            settings["success_steps"] = _rounded(curve.success_steps)
    return settings


def _linear(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(fixed seconds, seconds per token). Batches of one size cannot tell these apart: then all is per token."""
    tokens: npt.NDArray[np.float64] = np.array([count for count, _ in steps])
    seconds: npt.NDArray[np.float64] = np.array([taken_s for _, taken_s in steps])
    if tokens.max() <= 0:
        return float(np.median(seconds)), 0.0
    if tokens.std() > 0.05 * tokens.mean():
        slope, fixed = np.polyfit(tokens, seconds, 1)
        if slope > 0 and fixed >= 0:
            return float(fixed), float(slope)
    return 0.0, float(np.mean(seconds) / tokens.mean())


def _rate_gb_s(num_bytes: float, seconds: Sequence[float]) -> float:
    """The rate at which the simulated model takes the median of these times."""
    return _rounded(num_bytes / 1e9 / max(SHORTEST_S, statistics.median(seconds) if seconds else SHORTEST_S))


def _rounded(value: float) -> float:
    """Five digits say more than a run can."""
    return float(f"{value:.5g}")

"""Short simulations of one job in many forms, side by side on this machine's cores: what `rollart plan` compares."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.sim import SimTaskSettings
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.events.schema import Event
from rollart.launch.pools import task_shares
from rollart.policy.prediction import NEVER_S
from rollart.report.reports import Played
from rollart.types import ParsedJson

COUNTED = 6
"""Steps of a run that count. Before them come as many as a run begins with all its groups at once for, and one more."""
MOST_STEPS = 1e5
"""A score that takes more is taken to be out of reach."""

Ask = tuple[ParsedJson, int, float | None]
"""A job, a seed, and how many steps on fresh trajectories the score takes."""

Players = Callable[[Callable[[Ask], Played], Iterable[Ask]], Iterator[Played]]
"""One process after another, or several at a time: their results in order."""


class Trials:
    """Plays jobs, and says how far it is."""

    def __init__(self, played: Players, score_steps: float | None, say: Callable[[str], None]) -> None:
        self._played = played
        self._score_steps = score_steps
        self._say = say
        self.runs = 0

    def play(self, jobs: Sequence[tuple[str, ParsedJson]], seeds: Sequence[int]) -> list[list[Played]]:
        """Each job with each seed. A job is given with the words that progress names it by."""
        asks = [(raw, seed, self._score_steps) for _, raw in jobs for seed in seeds]
        words = [word for word, _ in jobs for _ in seeds]
        done: list[Played] = []
        for played in self._played(play, asks):
            done.append(played)
            self.runs += 1
            self._say(f"simulated {len(done)}/{len(asks)}: {words[len(done) - 1]}: {played.step_s:.1f} s a step")
        return [done[len(seeds) * number :][: len(seeds)] for number in range(len(jobs))]


@contextmanager
def trials(workers: int, score_steps: float | None, say: Callable[[str], None]) -> Iterator[Trials]:
    if workers == 1:
        yield Trials(map, score_steps, say)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        yield Trials(processes.map, score_steps, say)


def score_steps(job: Job, score: float) -> float:
    """Steps on trajectories of no age until the mean success of the tasks, by their shares of a batch, is this much.
    Raises JobError where it never is, or is from the beginning."""
    shares = task_shares(job)

    def mean(steps: float) -> float:
        return sum(
            shares[task.name] * job.sim.tasks.get(task.name, SimTaskSettings()).chance(steps) for task in job.tasks
        )

    if not mean(0.0) < score < mean(MOST_STEPS):
        raise JobError(
            f"--score {score:g}: the job's tasks begin at {mean(0.0):.2f} and come to {mean(MOST_STEPS):.2f} by "
            "sim.tasks.<task>.success and success_gain; give a score between these"
        )
    low, high = 0.0, MOST_STEPS
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < score else (low, middle)
    return high


def at_half(job: Job, steps: float) -> ParsedJson:
    """The job in the middle of this many steps: how many groups are dropped for equal rewards depends on it."""
    raw = job.model_dump(mode="json", exclude_defaults=True)
    tasks = raw.setdefault("sim", {}).setdefault("tasks", {})
    for task in job.tasks:
        settings = job.sim.tasks.get(task.name, SimTaskSettings())
        success = settings.chance(steps / 2)
        left = settings.success + settings.success_gain - success
        tasks[task.name] = {**tasks.get(task.name, {}), "success": success, "success_gain": left}
    return raw


def play(ask: Ask) -> Played:
    """One run; a job that does not finish takes for ever."""
    from rollart.launch.simulation import simulate  # not with the module: a longer chain of imports than allowed

    raw, seed, score = ask
    skipped = build_job(raw).rollout.staleness + 2
    job = build_job({**raw, "seed": seed, "train": {**raw["train"], "steps": skipped + COUNTED}})
    seen = _Seen(skipped, job.sim.train.age_discount)
    summary = simulate(job, watch=seen.listen).summary
    if summary.state != "finished":
        return Played(seed=seed, step_s=NEVER_S, waits=1.0, age=0.0, wasted=0.0, tokens=0.0, score_s=score and NEVER_S)
    span_s = seen.ends[-1] - seen.ends[skipped - 1]
    step_s = span_s / COUNTED
    sampled = summary.sampled_tokens_per_s * summary.time_s
    worth, shares = statistics.fmean(seen.worth), task_shares(job)
    return Played(
        seed=seed,
        step_s=round(step_s, 2),
        waits=round(seen.waited_s / span_s, 3),
        age=round(statistics.fmean(seen.ages), 2),
        tokens=round(sum(share * summary.tasks[name].lengths.trained_tokens for name, share in shares.items()), 1),
        wasted=round(sum(waste.tokens for waste in summary.waste.values()) / max(1.0, sampled), 3),
        score_s=None if score is None else round(score / worth * step_s, 1) if worth else NEVER_S,
    )


class _Seen:
    """Of the steps that count: when they ended, how long the trainer waited, and how old its trajectories were."""

    def __init__(self, skipped: int, discount: float) -> None:
        self._skipped = skipped
        self._discount = discount
        self.ends: list[float] = []
        self.waited_s = 0.0
        self.ages: list[float] = []
        self.worth: list[float] = []

    def listen(self, log: EventLog) -> None:
        log.read_by(self._read, schema.Batch, schema.StepEnd)

    def _read(self, event: Event) -> None:
        match event:
            case schema.Batch() if event.step >= self._skipped:
                self.waited_s += event.t - self.ends[-1]
                ages = [float(event.step - born) for born in event.born]
                self.ages += ages
                self.worth += [max(0.0, 1.0 - self._discount * age) for age in ages]
            case schema.StepEnd():
                self.ends.append(event.t)

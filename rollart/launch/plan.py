"""`rollart plan JOB`: how to split GPUs between training and rollout, and which of the job's other settings to change.

Every split is predicted (`splits`); the best few are simulated (`trials`). On the best of them each other setting is
tried alone: with a prediction where there is one, which may move GPUs too, and a simulation. Those that gain are put
together one by one, and kept where they still gain with every seed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.launch.splits import Splits, Variant, engine_counts, read_limits
from rollart.launch.trials import Trials, at_half, score_steps, trials
from rollart.report.reports import Apart, PlanReport, Split, Tried
from rollart.types import Json, ParsedJson

OVERLAPPING = ("rollart", "areal")
SETTINGS = ("bound", "affinity", "prefill", "spares", "bucket", "split")
"""What `--try` may name."""
MAX_MARGIN = 2.2
"""Predictions of rollout are too good where little is left over: tails, waves, caches that nearly fit. Of the splits
that are simulated, one is best if they are right, one if rollout takes this many times as long, others in between."""
GAIN = 0.01
"""A change that gains less than this share is not worth a changed job."""
SHORTER = 0.02
"""A change that leaves out long trajectories, so that those trained on are shorter by more than this share, is shown
and not kept: a step with it is not the same step sooner."""
MODEL_ERROR = 0.115
"""How far costs are off at worst where they were measured: tests/test_costs_measured.py."""
BOUNDS = (-1, 1, 2)
"""By so much the bound is changed."""
SPARE_GROUPS = (16, 8)
"""One spare group for so many of a step."""
SPARE_MEMBERS = (1, 2)
BUCKETS = (0.25, 4)
"""Times the job's `weights.bucket_mb`."""
PAIRS_SIMULATED = 2
NEIGHBOURS_SIMULATED = 3


def make_plan(
    job: Job,
    pools: str,
    *,
    budget: float | None,
    goal: str,
    best: int,
    seeds: int,
    workers: int,
    progress: Callable[[str], None],
    score: float | None = None,
    settings: Sequence[str] = SETTINGS,
) -> PlanReport:
    """The best ways to use the GPUs that `pools` allows. Raises JobError where there is none."""
    began_s = time.monotonic()
    if job.mode not in OVERLAPPING:
        raise JobError(
            f"plan: in mode {job.mode!r} training and rollout take turns, which is not planned for; set mode to rollart"
        )
    if any(engines.prefill for _, engines in job.engines):
        raise JobError("plan: prefill workers are among what it tries; remove pools.engines.prefill")
    if (score is None) == (goal == "time-to-score"):
        raise JobError("--score: is for --goal time-to-score, which needs it; give both, or neither")
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise JobError(f"--try {unknown[0]!r}: is not known; give some of {','.join(SETTINGS)}, or none")
    steps = None if score is None else score_steps(job, score)
    splits = Splits(job, read_limits(job, pools), budget, goal)

    def say(text: str) -> None:
        progress(f"{text} ({time.monotonic() - began_s:.0f} s)")

    with trials(workers, steps, say) as run:
        planner = _Planner(job, splits, run, goal, range(job.seed, job.seed + seeds), say, steps)
        ranked, margin, as_it_is = planner.best_splits(best, f"--pools {pools!r} fits --budget {budget}")
        found, tried = planner.with_settings(ranked[0], margin, settings)
    return PlanReport(
        goal=goal,
        score=score,
        score_steps=None if steps is None else round(steps, 1),
        considered=splits.considered,
        runs=run.runs,
        best=[found, *(split for split in ranked if split != found)],
        as_it_is=as_it_is,
        tried=tried,
        model_error=MODEL_ERROR,
        wall_s=round(time.monotonic() - began_s, 1),
        job=job_of(job, found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One setting's new value, and the split with it."""

    kind: str
    """Of those with the same kind one is kept."""
    what: str
    value: str
    split: Split
    predicted: bool

    @property
    def words(self) -> str:
        return f"{self.what} {self.value}"


class _Planner:
    def __init__(
        self,
        job: Job,
        splits: Splits,
        run: Trials,
        goal: str,
        seeds: Sequence[int],
        say: Callable[[str], None],
        score_steps: float | None,
    ) -> None:
        self._job = job
        self._splits = splits
        self._run = run
        self._goal = goal
        self._seeds = seeds
        self._say = say
        self._base = job if score_steps is None else build_job(at_half(job, score_steps))
        """What is simulated, but for the split."""

    def best_splits(self, best: int, nothing: str) -> tuple[list[Split], float, Split]:
        """Simulated, the best first; the margin that it was found with; and the job's own, which is among them if it
        fits."""
        own = self._splits.own_split()
        margins: list[float] = []
        chosen: list[Split] = []
        for number in range(best):
            margin = MAX_MARGIN ** (number / max(1, best - 1))
            ranked = self._splits.search(self._splits.own, margin, self._say)
            for split in [split for split in ranked if split not in (*chosen, own)][:1]:
                margins.append(margin)
                chosen.append(split)
        fits = self._splits.fits(own)
        if not (chosen or fits):
            raise JobError(f"plan: no split of {nothing}; raise one of them")
        words = [f"split {number + 1}" for number in range(len(chosen))]
        *played, as_it_is = self._played([*chosen, own], [*words, "the job as it is"])
        if fits:
            played.append(as_it_is)
            margins.append(MAX_MARGIN)
        order = sorted(range(len(played)), key=lambda number: played[number].value(self._goal))
        return [played[number] for number in order], margins[order[0]], as_it_is

    def with_settings(self, best: Split, margin: float, settings: Sequence[str]) -> tuple[Split, list[Tried]]:
        """The best split with the other settings that gain, and all that were tried."""
        first = best
        changes = [change for name in SETTINGS if name in settings for change in self._changes(name, best, margin)]
        if not changes:
            return best, []
        before = best.value(self._goal, self._seeds[0])
        played = self._played([change.split for change in changes], [change.words for change in changes], alone=True)
        gains = [1.0 - split.value(self._goal) / before for split in played]
        drawn = best.played[0].tokens
        lengths = [split.tokens / drawn for split in played]
        order = sorted(range(len(changes)), key=lambda number: -gains[number])
        kept: list[int] = []
        for number in order:
            change = changes[number]
            if (
                gains[number] < GAIN
                or lengths[number] < 1.0 - SHORTER
                or any(changes[other].kind == change.kind for other in kept)
            ):
                continue
            together = self._together(first, best, change.split)
            with_it = self._played([together], [f"with {change.words}"])[0]
            if self._better(with_it, best):
                best, kept = with_it, [*kept, number]
        return best, [
            Tried(
                what=change.what,
                value=change.value,
                gain=round(gains[number], 4),
                tokens=round(lengths[number], 4),
                predicted_s=change.split.predicted_s if change.predicted else None,
                kept=number in kept,
            )
            for number, change in enumerate(changes)
        ]

    def _better(self, new: Split, old: Split) -> bool:
        """With every seed, and by enough."""
        each = all(new.value(self._goal, seed) < old.value(self._goal, seed) for seed in self._seeds)
        return each and new.value(self._goal) < (1.0 - GAIN) * old.value(self._goal)

    def _together(self, first: Split, best: Split, change: Split) -> Split:
        """`change` was made of the first split; `best` is the same with what was kept since."""
        moved = (change.train_gpus, change.pools) != (first.train_gpus, first.pools)
        source = change if moved else best
        variant = Variant(
            bound=best.bound if change.bound == self._job.rollout.staleness else change.bound,
            free=best.free or change.free,
            apart=change.apart or best.apart,
        )
        made = self._splits.again(source, variant)
        return msgspec.structs.replace(made, settings={**best.settings, **change.settings})

    # --- what is tried --------------------------------------------------------------------------------------------

    def _changes(self, name: str, best: Split, margin: float) -> Iterator[_Change]:
        match name:
            case "bound":
                yield from self._bounds(best)
            case "affinity":
                yield from self._freed(best, margin)
            case "prefill":
                yield from self._prefill(best, margin)
            case "spares":
                groups = self._job.rollout.groups_per_step
                counts = dict.fromkeys(max(1, groups // part) for part in SPARE_GROUPS)
                yield from self._keys(best, "rollout.spare_groups", counts)
                yield from self._keys(best, "rollout.spare_members", SPARE_MEMBERS)
            case "bucket":
                sizes = [max(1, round(self._job.weights.bucket_mb * times)) for times in BUCKETS]
                yield from self._keys(best, "weights.bucket_mb", sizes)
            case "split":
                near = self._splits.neighbours(best, self._splits.own)
                value = self._predicted(margin)
                for split in sorted(near, key=value)[:NEIGHBOURS_SIMULATED]:
                    yield _Change(kind="split", what="GPUs", value=gpus(split), split=split, predicted=True)

    def _predicted(self, margin: float) -> Callable[[Split], float]:
        def value(split: Split) -> float:
            step_s = max(split.other_s, margin * split.rollout_s)
            return step_s * (split.price if self._goal == "cost" else 1.0)

        return value

    def _bounds(self, best: Split) -> Iterator[_Change]:
        """Predictions of pools with other bounds are too far off to search splits by. What a larger bound leaves over
        goes to the trainer: one engine's GPUs of it."""
        own = self._job.rollout.staleness
        for bound in (own + change for change in BOUNDS):
            if bound >= 1:
                variant = Variant(bound=bound)
                yield from self._as_it_is_and(
                    self._splits.shifted(best, variant), best, variant, "bound", "rollout.staleness", str(bound)
                )

    def _freed(self, best: Split, margin: float) -> Iterator[_Change]:
        """Other tasks on a pool make other sizes of it best: so all are looked at again."""
        if any(task.affinity != "auto" for task in self._job.tasks):
            variant = Variant(bound=best.bound, free=True)
            moved = self._splits.search(variant, margin, self._say)[:1]
            yield from self._as_it_is_and(moved, best, variant, "affinity", "tasks.affinity", "as predicted best")

    def _as_it_is_and(
        self, moved: Sequence[Split], best: Split, variant: Variant, kind: str, what: str, value: str
    ) -> Iterator[_Change]:
        """With the GPUs as they are, where that changes anything, and moved."""
        same = self._splits.again(best, variant)
        if (same.affinity, same.bound) != (best.affinity, best.bound):
            yield _Change(kind=kind, what=what, value=value, split=same, predicted=True)
        for split in moved:
            if (split.train_gpus, split.pools) != (same.train_gpus, same.pools):
                words = f"{value}, GPUs {gpus(split)}"
                yield _Change(kind=kind, what=what, value=words, split=split, predicted=True)

    def _prefill(self, best: Split, margin: float) -> Iterator[_Change]:
        found: list[Split] = []
        for apart in self._splits.pairs():
            if engine_counts(self._splits.pools, best.pools, apart)[apart.decode]:
                found.append(self._splits.again(best, Variant(bound=best.bound, apart=apart)))
        for split in sorted(found, key=self._predicted(margin))[:PAIRS_SIMULATED]:
            assert split.apart is not None
            yield _Change(kind="prefill", what="prefill", value=in_words(split.apart), split=split, predicted=True)

    def _keys(self, best: Split, key: str, values: Iterable[int]) -> Iterator[_Change]:
        *_, name = key.split(".")
        section = self._job.rollout if key.startswith("rollout.") else self._job.weights
        for value in values:
            if value != getattr(section, name):
                split = msgspec.structs.replace(best, settings={key: value}, played=[])
                yield _Change(kind=key, what=key, value=str(value), split=split, predicted=False)

    def _played(self, found: Sequence[Split], words: Sequence[str], *, alone: bool = False) -> list[Split]:
        """Simulated, with all seeds or the first `alone`."""
        jobs = [(word, job_of(self._base, split)) for word, split in zip(words, found, strict=True)]
        seeds = self._seeds[:1] if alone else self._seeds
        return [
            msgspec.structs.replace(split, played=played)
            for split, played in zip(found, self._run.play(jobs, seeds), strict=True)
        ]


def gpus(split: Split) -> str:
    return " + ".join([f"train {split.train_gpus}", *(f"{pool} {count}" for pool, count in split.pools.items())])


def in_words(apart: Apart) -> str:
    return f"{apart.workers} on {apart.prefill} for {apart.decoders} on {apart.decode}"


def job_of(job: Job, split: Split) -> ParsedJson:
    """The job with this split and its settings; tasks go where they are predicted to go best."""
    raw = job.model_dump(mode="json", exclude_defaults=True)
    raw["train"] = {**raw.get("train", {}), "gpus": split.train_gpus, "pool": job.train_pool.name}
    raw["rollout"] = {**raw.get("rollout", {}), "staleness": split.bound}
    for key, value in split.settings.items():
        section, name = key.split(".")
        raw[section] = {**raw.get(section, {}), name: value}
    counts = engine_counts(job.engine_pools, split.pools, split.apart)
    raw["pools"] = [
        kept
        for pool in raw["pools"]
        if (kept := _pool(pool, counts, split, keep=pool["name"] in _needed(job, split))) is not None
    ]
    measured = job.sim.engine.measured
    if gone := [name for name in measured if not counts.get(name, 1)]:
        left = {name: each for name, each in _mapping(raw["sim"]["engine"]["measured"]).items() if name not in gone}
        raw["sim"] = {**raw["sim"], "engine": {**raw["sim"]["engine"], "measured": left}}
    for task in raw["tasks"]:
        shares = split.affinity[task["name"]]
        task["affinity"] = next(iter(shares)) if len(shares) == 1 else "auto"
    return raw


def _needed(job: Job, split: Split) -> tuple[str, ...]:
    """Pools that are used for something else than engines of their own."""
    return (job.train_pool.name, *((split.apart.prefill,) if split.apart is not None else ()))


def _pool(pool: ParsedJson, counts: Mapping[str, int], split: Split, *, keep: bool) -> ParsedJson | None:
    """As a job file has it; None where nothing is left for it to do."""
    name = str(pool["name"])
    if name not in counts:
        return pool
    if not counts[name]:
        rest = {key: value for key, value in pool.items() if key != "engines"}
        return rest if keep or pool.get("slots") else None
    engines: dict[str, Json] = {**_mapping(pool["engines"]), "count": counts[name]}
    apart = split.apart
    if apart is not None and apart.decode == name:
        engines["prefill"] = {
            "pool": apart.prefill,
            "workers": apart.workers,
            "gpus": apart.gpus,
            "decoders": apart.decoders,
        }
    return {**pool, "engines": engines}


def _mapping(value: object) -> dict[str, Json]:
    assert isinstance(value, dict)
    return value

"""Why each task ran where it did, and how each version of the weights got there: a fold over a run's events. `rollart
explain`.

Decisions and predictions come from the `affinity` events, what then happened from the others.
"""

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from rollart.events import schema
from rollart.events.log import Fold
from rollart.events.schema import attempt_of, task_set
from rollart.report.weights import EngineFigures, VersionFigures, VersionFold


class Reassignment(msgspec.Struct, frozen=True, kw_only=True):
    """A task was given other pools."""

    t: float
    pools: Mapping[str, float]
    reason: str


class TaskPlacement(msgspec.Struct, kw_only=True):
    """Where one task ran, and why. The fold fills it in as it reads."""

    affinity: str
    """As the job declares it."""
    pools: Mapping[str, float] = {}
    """Pool -> its share of the task, by the last look."""
    reason: str = ""
    profile: schema.Profile | None = None
    predicted: Mapping[str, schema.Alone] = {}
    """Pool -> what it would do with this task alone."""
    last_look: str = ""
    attempts: dict[str, int] = {}
    """Pool -> attempts that were assigned to it."""
    calls: dict[str, int] = {}
    """Pool -> generate calls it served."""
    changes: list[Reassignment] = []
    fallbacks: dict[str, int] = {}
    """Reason -> calls that another pool served."""


class Placements(msgspec.Struct, kw_only=True):
    """What `rollart explain --json` prints."""

    name: str | None = None
    clock: str | None = None
    looks: int = 0
    """How often the assignment was reconsidered."""
    predicted_step_s: Mapping[str, float | None] = {}
    engines: Mapping[str, int] = {}
    speeds: Mapping[str, schema.Speed] = {}
    """Pool -> what was measured of its engines, beside the table."""
    tasks: dict[str, TaskPlacement] = {}
    weights: list[VersionFigures] = []
    """Push, arrival and bytes, and what each engine pulled and exposed, of each version."""


class Explain(Fold):
    """Feed it every event of a run, in order; `result` may be read at any time."""

    def __init__(self) -> None:
        self.result = Placements()
        self._task_of: dict[str, TaskPlacement] = {}
        """By attempt under way."""
        weights = VersionFold(keep=True)
        self.result.weights = weights.versions
        super().__init__(weights)

    def _on_run(self, event: schema.Run) -> None:
        self.result.name, self.result.clock = event.name, event.clock
        for name, task in event.tasks.items():
            declared = "" if task.affinity == "auto" else f"declared: {task.affinity}"
            self.result.tasks[name] = TaskPlacement(affinity=task.affinity, reason=declared)

    def _on_affinity(self, event: schema.Affinity) -> None:
        result = self.result
        result.looks += 1
        result.predicted_step_s, result.engines = event.step_s, event.engines
        result.speeds = event.speeds
        for name, task in result.tasks.items():
            task.pools, task.last_look = event.plan[name], event.reason
            task.profile, task.predicted = event.profiles[name], event.predicted[name]
            if result.looks == 1 or name in event.moves:
                task.changes.append(Reassignment(t=event.t, pools=event.plan[name], reason=event.reason))
                if task.affinity == "auto":
                    task.reason = event.reason

    def _on_start(self, event: schema.Start) -> None:
        task = self._task_of[event.id] = self.result.tasks[task_set(event.task)]
        _count(task.attempts, event.pool)

    def _on_send(self, event: schema.Send) -> None:
        task = self._task_of[attempt_of(event.id)]
        _count(task.calls, event.pool)
        if event.fallback:
            _count(task.fallbacks, f"{event.fallback}: {event.pool} served instead")

    def _on_end(self, event: schema.End) -> None:
        self._task_of.pop(event.id, None)

    def _on_killed(self, event: schema.Killed) -> None:
        self._task_of.clear()


def words(result: Placements) -> str:
    """The same for people."""
    simulated = ", simulated" if result.clock == "virtual" else ""
    steps = ", ".join(f"{pool} {_seconds(value)}" for pool, value in result.predicted_step_s.items())
    lines = [f"{result.name}{simulated}: {result.looks} looks at the assignment"]
    lines.append(f"predicted for a step, by pool: {steps}")
    for pool, speed in result.speeds.items():
        lines.append(f"{pool}, measured beside the table of its hardware")
        lines.append(f"  prefill     {_rate(speed.prefill, 1e6, 'us a token', 'prompt tokens')}")
        lines.append(f"  decode      {_rate(speed.decode, 1e3, 'ms a step', 'steps')}")
    for name, task in result.tasks.items():
        lines += ["", f"{name} -> {_shares(task.pools)}   (affinity: {task.affinity})"]
        lines.append(f"  why         {task.reason}")
        lines.append(f"  profile     {_profile(task.profile)}")
        for pool, alone in task.predicted.items():
            lines.append(
                f"  on {pool:<8} {_seconds(alone.trajectory_s)} a trajectory, {_seconds(alone.step_s)} a step, "
                "if the task were alone there"
            )
        lines.append(f"  last look   {task.last_look}")
        lines.append(f"  attempts    {_counts(task.attempts)}")
        for change in task.changes:
            lines.append(f"  t = {change.t:>9,.1f} s  {_shares(change.pools)}: {change.reason}")
        for reason, count in task.fallbacks.items():
            lines.append(f"  fallback    {count} calls: {reason}")
        if not task.fallbacks:
            lines.append("  fallback    none")
    if result.weights:
        lines += [
            "",
            "weights, by version, in seconds: push, arrival, GB; engines (of several the median): pull / exposed",
        ]
    for figures in result.weights:
        engines = "; ".join(f"{who} {_brought(ones)}" for who, ones in _by_pool(figures.engines).items())
        parts = f"{_plain(figures.push_s):>8} {_plain(figures.arrival_s):>8} {figures.bytes / 1e9:>8.3f}"
        lines.append(f"  {figures.version:>6} {parts}  {engines}")
    return "\n".join(lines)


def _by_pool(engines: Mapping[str, EngineFigures]) -> dict[str, list[EngineFigures]]:
    """An engine alone by its name; those of a pool that has several together."""
    pools: dict[str, list[str]] = {}
    for name in engines:
        pools.setdefault(name.rpartition("-")[0], []).append(name)
    return {
        names[0] if len(names) == 1 else f"{pool} x {len(names)}": [engines[name] for name in names]
        for pool, names in pools.items()
    }


def _brought(engines: Sequence[EngineFigures]) -> str:
    crossed = sum(one.crossed_bytes for one in engines)
    densities = [one.density for one in engines if one.density is not None]
    exposed = [one.exposed_s for one in engines if one.exposed_s is not None]
    came = f", {crossed / 1e9:.3f} GB came" if crossed else ""
    changed = f", {statistics.median(densities):.1%} changed".replace("%", " %") if densities else ""
    return f"{_median([one.pull_s for one in engines])} / {_median(exposed)}{came}{changed}"


def _median(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    low, high = min(seconds), max(seconds)
    span = f" ({low:.2f} to {high:.2f})" if f"{low:.2f}" != f"{high:.2f}" else ""
    return f"{statistics.median(seconds):.2f}{span}"


def _profile(profile: schema.Profile | None) -> str:
    if profile is None or not profile.trajectories:
        return "nothing measured"
    hits = profile.cached_tokens / max(1.0, profile.prompt_tokens)
    return (
        f"{profile.turns:.1f} turns, {profile.new_tokens:,.0f} new prompt tokens, {profile.decode_tokens:,.0f} "
        f"decoded, {hits:.0%} of prompts from the cache, {profile.elsewhere_s:.1f} s elsewhere "
        f"({profile.trajectories} trajectories)"
    )


def _rate(rate: schema.Rate | None, scale: float, unit: str, what: str) -> str:
    if rate is None:
        return "nothing measured"
    used = "" if rate.believed else "; not used yet: too little was seen"
    return (
        f"{rate.table_s * scale:.3g} {unit} by the table, {rate.measured_s * scale:.3g} measured: {rate.factor:.2f} "
        f"times as long ({rate.windows} windows, {rate.units:,} {what}{used})"
    )


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def _shares(pools: Mapping[str, float]) -> str:
    return ", ".join(name if share == 1.0 else f"{name} {share:.0%}" for name, share in pools.items()) or "no pool yet"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"

"""Results for people: tables in the terminal, and the live view of a training run."""

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import UNSET
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollart.causes import first_line
from rollart.events import schema
from rollart.events.log import Reader
from rollart.events.schema import Event, task_set
from rollart.report.fold import SummaryFold
from rollart.report.reports import ChaosReport, PoolReport, PoolsReport, Role
from rollart.report.summary import Play, Plays, Progress, Summary, TaskSummary

DRAW_EVERY_S = 1.0
"""On a terminal."""
LINE_EVERY_S = 10.0
"""Elsewhere."""
UNWRAPPED = 200
"""Columns of a table that is not shown on a terminal."""
RECENT_STEPS = 20
"""The time left is estimated from the pace of these steps."""
RECENT_EPISODES = 200
"""The rewards shown are means over these."""


def show_summary(summary: Summary, out: Path) -> None:
    clock = "simulated, on the virtual clock" if summary.clock == "virtual" else "on the real clock"
    step, staleness, groups, weights, cost = (
        summary.step_time_s, summary.staleness, summary.groups, summary.weights, summary.cost,
    )  # fmt: skip
    waste = ", ".join(f"{how} {row.trajectories}" for how, row in summary.waste.items() if row.trajectories)
    rows = {
        "steps": f"{summary.steps} in {summary.time_s:,.0f} s",
        "step time": f"mean {step.mean:.1f} s, p50 {step.p50:.1f} s, p95 {step.p95:.1f} s",
        "throughput": f"{summary.throughput_tokens_per_s:,.0f} trained tokens/s",
        "staleness": f"bound {staleness.bound}, max {staleness.max}, in steps {staleness.max_steps}",
        "wasted trajectories": waste or "none",
        "groups": f"{groups.trained} trained, {groups.lost} lost, {groups.trained_twice} trained twice",
        "weights": f"push {weights.push_s:.1f} s, arrival {weights.arrival_s:.1f} s, pull {weights.pull_s:.1f} s, "
        f"exposed {weights.exposed_s:.2f} s",
        "cost": f"{cost.total:.2f}, wasted {cost.wasted:.2f}, idle {cost.idle:.2f}",
    }
    print_table(f"{summary.name} ({summary.mode}), {clock}", (), rows.items())
    print_table(
        "tasks",
        ("task", "pool", "trained share", "with gradient", "stale share", "reward", "turns", "tokens", "of all begun"),
        (
            (
                name, row.pool, f"{row.trained_share:.2f} of {row.share:.2f}", _gradients(row),
                f"{row.stale_share:.2f}", f"{row.reward:.3f}", f"{row.turns:.1f}", f"{row.lengths.trained_tokens:.0f}",
                f"{row.lengths.admitted_tokens:.0f}",
            )
            for name, row in summary.tasks.items()
        ),
    )  # fmt: skip
    print_table(
        "pools",
        ("pool", "engines", "utilisation", "requests", "fallbacks"),
        (
            (name, str(row.engines), f"{row.utilisation:.2f}", f"{row.requests:,}", str(row.fallbacks))
            for name, row in summary.pools.items()
        ),
    )
    if summary.eval:
        show_eval(summary.eval)
    names = list(summary.evaluations)
    for name in dict.fromkeys(names[:1] + names[-1:]):
        show_failed(summary.evaluations[name], f"{name}: ")
    for name, row in summary.tasks.items():
        for text in _trouble(name, row):
            _warn(text)
    for text, times in list(Counter(summary.warnings).items())[:10]:
        _warn(f"warning: {text}" + (f" ({times} times)" if times > 1 else ""))
    Console().print(f"run directory: {out}", markup=False)


def print_table(title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Without columns: pairs of a name and its value."""
    names = tuple(columns)
    table = Table(*names, title=title, title_justify="left", show_header=bool(names))
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no edge to wrap at
        console = Console(width=UNWRAPPED)
    console.print(table)


def _warn(text: str) -> None:
    Console().print(text, style="yellow", markup=False)


def show_pools(report: PoolsReport) -> None:
    has = ((node.name, ", ".join(_amount(*item) for item in node.resources.items())) for node in report.nodes)
    print_table(f"cluster: {report.cluster.type}", ("machine", "has"), has)
    columns = ("pool", "hardware", "role", "workers", "each needs", "tasks", "stand-ins")
    print_table("pools", columns, (_role_cells(pool, role) for pool in report.pools for role in pool.roles))
    if report.devices:
        print_table("devices", ("worker", "GPUs"), ((name, ", ".join(own)) for name, own in report.devices.items()))
    for text in report.missing:
        Console().print(f"missing: {text}", style="red", markup=False)
    for name, other in report.fallbacks.items():
        Console().print(f"pool {name} has no engine: {other or 'nobody'} would serve its tasks", markup=False)


def _amount(resource: str, value: float) -> str:
    return f"{resource} {value / 2**30:.4g} GiB" if "memory" in resource else f"{resource} {value:.4g}"


def _role_cells(pool: PoolReport, role: Role) -> Iterable[str]:
    needs = [f"{role.each.cpus:g} CPU", f"{role.each.gpus:g} GPU" if role.each.gpus else "", pool.resource]
    served = (", ".join(pool.tasks), ", ".join(pool.stand_ins)) if role.role == "rollout" else ("", "")
    placed = f"{role.placed} of {role.workers}"
    return pool.name, pool.hardware, role.role, placed, ", ".join(filter(None, needs)), *served


def show_chaos(report: ChaosReport) -> None:
    console = Console()
    console.print(
        f"{report.plans} fault plans in {report.wall_s:.0f} s: {report.violations} violations, "
        f"{report.deadlocks} deadlocks, {report.lost} groups lost, {report.trained_twice} trained twice"
    )
    rows = ((kind, str(row.fired), str(row.during_swap)) for kind, row in report.faults.items())
    print_table(None, ("fault", "fired", "during a swap"), rows)
    for failure in report.failures[:10]:
        console.print(f"seed {failure.seed}: {failure.text}", markup=False)


def show_eval(tasks: Mapping[str, Progress]) -> None:
    """Held-out mean reward before and after, and of the control where there is one."""

    def cells(task: str, play: str, row: Progress) -> Iterable[str]:
        control = "" if row.control is UNSET else earned(row.control, rate=row.rate)
        before, after = (earned(mean, rate=row.rate) for mean in (row.before, row.after))
        return task, play, before, after, control, _episodes(row)

    rows = (
        (task, play, row) for task, own in tasks.items() for play, row in (("sampled", own), ("greedy", own.greedy))
    )
    columns = ("task", "play", "before", "after", "control", "episodes")
    print_table("held-out", columns, (cells(task, play, row) for task, play, row in rows if row is not UNSET))


def show_plays(tasks: Plays, model: str) -> None:
    """One evaluation, with the 95 % interval of its mean."""
    print_table(
        model,
        ("task", "play", "mean reward", "95 % interval", "episodes"),
        (
            (task, play, earned(row.reward, rate=row.rate), _interval(row), _episodes(row))
            for task, plays in tasks.items()
            for play, row in plays.items()
        ),
    )


def show_failed(tasks: Plays, before: str = "") -> None:
    """Of one evaluation: how many episodes of each task failed, and why."""
    for task, plays in tasks.items():
        for play, row in plays.items():
            if row.failed:
                which = f"task {task!r}" if play == "sampled" else f"task {task!r}, {play}"
                _warn(f"{before}{which}: {row.failed} of {row.episodes} episodes failed, most often {row.reason}")


def _interval(row: Play) -> str:
    if row.reward is None or row.std is None:
        return ""
    half = 1.96 * row.std / row.scored**0.5
    return " to ".join(earned(value, rate=row.rate) for value in (row.reward - half, row.reward + half))


def earned(mean: float | None, *, rate: bool) -> str:
    """A mean reward: as a percentage only where every reward was 0 or 1, so that it is a rate of success."""
    if mean is None:
        return "none scored"
    return f"{mean:.1%}" if rate else f"{mean:.3f}"


def _gradients(row: TaskSummary) -> str:
    """Of the trained groups: those whose members did not all earn the same."""
    return f"{row.with_gradient} of {row.trained}"


def _trouble(name: str, row: TaskSummary) -> list[str]:
    """Warnings about a task that fails, or whose groups carry no gradient."""
    told = []
    if row.state != "in":
        told.append(f"task {name!r} is out of the mix ({row.probes} probes): {first_line(row.out_reason)}")
    if row.failures:
        where = ", ".join(f"{times} {what}" for what, times in row.failed_at.items())
        told.append(f"task {name!r}: {row.failures} failures ({where}), most often {first_line(row.reasons[0])}")
    if row.trained and not row.with_gradient:
        told.append(
            f"task {name!r}: none of its {row.trained} trained groups carried a gradient: in each all members "
            "earned the same"
        )
    return told


def _episodes(row: Play | Progress) -> str:
    """How many; and how many were scored, where that is fewer."""
    return f"{row.episodes}" if row.scored == row.episodes else f"{row.episodes}, {row.scored} scored"


class LiveView:
    """A reader of events that shows how far a run is, also while no events come. Its errors never end the run."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._live = (
            Live(console=Console(stderr=True), auto_refresh=False, transient=True) if sys.stderr.isatty() else None
        )
        self._drawing: asyncio.Task[None] | None = None
        self._ends_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._rewards: dict[str, deque[float]] = {}
        self._down: dict[str, str] = {}
        """Rewards that nobody computes at the moment, and what is said of each."""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def watch(self, summary: SummaryFold, waits: Callable[[], str]) -> Reader:
        """Begin to draw, in a task that ends with the run's event loop. `waits` says what the run waits for."""
        self._drawing = asyncio.get_running_loop().create_task(self._draw_on(summary, waits))
        return self._read

    def _read(self, event: Event) -> None:
        match event:
            case schema.Killed():  # what came before is the history of a resumed run
                self._ends_s.clear()
                self._down.clear()
            case schema.RewardOutage():
                told = f"nobody answers, on_outage is {event.policy} ({first_line(event.reason)})"
                self._down[event.reward] = f"{event.reward}: {told}"
            case schema.RewardBack():
                self._down.pop(event.reward, None)
            case schema.StepEnd():
                self._ends_s.append(event.t)
            case schema.End() if event.reward is not None:
                task = task_set(event.task)
                self._rewards.setdefault(task, deque(maxlen=RECENT_EPISODES)).append(event.reward)

    async def _draw_on(self, summary: SummaryFold, waits: Callable[[], str]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            while True:
                self._draw(loop.time() - began_s, summary.result(), waits())
                await asyncio.sleep(LINE_EVERY_S if self._live is None else DRAW_EVERY_S)
        except Exception as error:  # a display that breaks must not end the run
            what = f"{type(error).__name__}: {error}"
            print(f"rollart: the display broke and is off, the run goes on: {what}", file=sys.stderr, flush=True)

    def _left(self, done: int) -> str:
        """From the pace of the last steps, since the first ones include the start-up."""
        if len(self._ends_s) < 2:
            return ""
        pace_s = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return f", about {pace_s * (self._steps - done):.0f} s left"

    def _draw(self, passed_s: float, result: Summary, waits: str) -> None:
        done, staleness = result.steps, result.staleness
        head = f"step {done}/{self._steps}, " if self._steps else ""
        head = f"{head}{passed_s:.0f} s{self._left(done)}"
        means = (f"{name} {sum(last) / len(last):.2f}" for name, last in sorted(self._rewards.items()))
        trouble = [*self._down.values(), *(text for name, row in result.tasks.items() for text in _trouble(name, row))]
        busy = (f"{name} {row.utilisation:.0%}" for name, row in result.pools.items())
        rows = {
            "recent reward": ", ".join(means) or "none yet",
            "groups with a gradient": ", ".join(f"{name} {_gradients(row)}" for name, row in result.tasks.items()),
            "trouble": "; ".join(trouble) or "none",
            "staleness": f"max {staleness.max} of {staleness.bound}, in steps {staleness.max_steps}",
            "engines busy": ", ".join(busy),
            "throughput": f"{result.sampled_tokens_per_s:.0f} sampled tokens/s",
            "waits": waits or "none",
        }
        if self._live is None:
            print("; ".join([head, *(f"{name}: {text}" for name, text in rows.items())]), file=sys.stderr, flush=True)
            return
        table = Table(title=head, show_header=False, title_justify="left")
        for name, text in rows.items():
            table.add_row(name, Text(text))
        self._live.update(table, refresh=True)

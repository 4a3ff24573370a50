"""What `rollart plan` and `rollart sim --sweep` found, as tables."""

from collections.abc import Iterable, Iterator

from rich.console import Console

from rollart.report.reports import PlanReport, Split, SweepReport
from rollart.report.show import print_table


def show_sweep(report: SweepReport) -> None:
    """A row for each combination; the bar is its step time."""
    longest = max(row.step_s for row in report.rows)
    columns = ("changed", "step, s", "p95", "tokens/s", "cost", "stale", "")
    rows = (
        (
            " ".join(row.changes),
            f"{row.step_s:,.1f}",
            f"{row.p95_step_s:,.1f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.cost:,.2f}",
            str(row.stale),
            "#" * round(30 * row.step_s / longest) if row.state == "finished" else row.state,
        )
        for row in report.rows
    )
    print_table("simulated", columns, rows)


def show_plan(report: PlanReport) -> None:
    """The best ways to use the GPUs, what else was tried on the best, and how sure that is."""
    scored = report.score is not None
    columns = ("", "train", "roll out", "with", "step, s", "range", "predicted", "waits", "age", "cost", "longest")

    def cells(name: str, split: Split) -> Iterable[str]:
        low_s, high_s = split.range_s(report.model_error)
        return (
            name,
            str(split.train_gpus),
            ", ".join(f"{pool} {gpus}" for pool, gpus in split.pools.items()),
            ", ".join(_changed(split, report.as_it_is)),
            f"{split.step_s:,.1f}",
            f"{low_s:,.0f} to {high_s:,.0f}",
            f"{split.predicted_s:,.1f}",
            f"{split.waits:.0%}",
            f"{split.age:.1f}",
            f"{split.cost_of_a_step:,.2f}",
            split.bottleneck,
            *([f"{split.value(report.goal) / 3600:,.2f} h"] if scored else []),
        )

    own = report.as_it_is
    rows = [
        cells(f"{number}, the job's" if split == own else str(number), split)
        for number, split in enumerate(report.best, start=1)
    ]
    if own not in report.best:
        rows.append(cells("the job's", own))
    title = f"GPUs; simulated; the best of {report.considered} by {report.goal}"
    print_table(title, (*columns, *([f"to {report.score:g}"] if scored else [])), rows)
    if report.tried:
        tried = (
            (
                one.what,
                one.value,
                f"{one.gain:+.1%}",
                "" if one.predicted_s is None else f"{one.predicted_s:,.1f}",
                f"{one.tokens - 1.0:+.1%}",
                "yes" if one.kept else "",
            )
            for one in report.tried
        )
        title = f"on the best split: how much less of {report.goal} each takes alone"
        print_table(title, ("setting", "value", "gain", "predicted step, s", "tokens", "kept"), tried)
    _print_notes(report)


def _changed(split: Split, own: Split) -> Iterator[str]:
    """What else is not as in the job."""
    if split.bound != own.bound:
        yield f"rollout.staleness {split.bound}"
    if split.apart is not None:
        apart = split.apart
        yield f"prefill {apart.workers} on {apart.prefill} for {apart.decoders} on {apart.decode}"
    if split.free:
        yield "tasks moved"
    yield from (f"{key} {value}" for key, value in split.settings.items())


def _print_notes(report: PlanReport) -> None:
    best, console = report.best[0], Console()
    where = (
        f"{task} on {' and '.join(f'{pool} ({share:.0%})' if share < 1 else pool for pool, share in shares.items())}"
        for task, shares in best.affinity.items()
    )
    console.print(f"The first one: {', '.join(where)}.")
    if report.score is not None:
        console.print(
            f"The score takes {report.score_steps:,.0f} steps on fresh trajectories, by sim.tasks; older ones count as "
            "sim.train.age_discount says, which nobody has measured, and work thrown away counts as its time alone."
        )
    console.print(
        f"{report.runs} runs, {report.wall_s:.0f} s. Range: of the seeds, and costs that are off by up to "
        f"{report.model_error:.0%} where they were measured (docs/evaluation.md). Waits: share of the time in which "
        "the trainer waits for a batch. Age: versions from a trajectory's first token to the weights that train on it. "
        "Cost: of a step. Tokens: of a trajectory that is trained on; a change that leaves out long ones is not kept."
    )

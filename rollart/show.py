"""Results for people: tables in the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show_summary(summary: dict[str, Any], out: Path) -> None:
    console = Console()
    clock = "simulated, on the virtual clock" if summary["clock"] == "virtual" else "on the real clock"
    step, staleness, weights = summary["step_time_s"], summary["staleness"], summary["weights"]
    table = Table(title=f"{summary['name']} ({summary['mode']}), {clock}", show_header=False, title_justify="left")
    table.add_row("steps", f"{summary['steps']} in {summary['time_s']:,.0f} s")
    table.add_row("step time", f"mean {step['mean']:.1f} s, p50 {step['p50']:.1f} s, p95 {step['p95']:.1f} s")
    table.add_row("throughput", f"{summary['throughput_tokens_per_s']:,.0f} trained tokens/s")
    table.add_row("staleness", f"bound {staleness['bound']}, max {staleness['max']}, in steps {staleness['max_steps']}")
    waste = ", ".join(f"{how} {row['trajectories']}" for how, row in summary["waste"].items() if row["trajectories"])
    table.add_row("wasted trajectories", waste or "none")
    groups = summary["groups"]
    table.add_row(
        "groups", f"{groups['trained']} trained, {groups['lost']} lost, {groups['trained_twice']} trained twice"
    )
    table.add_row(
        "weights",
        f"push {weights['push_s']:.1f} s, pull {weights['pull_s']:.1f} s, exposed {weights['exposed_s']:.1f} s",
    )
    table.add_row(
        "cost",
        f"{summary['cost']['total']:.2f}, of it wasted {summary['cost']['wasted']:.2f}, idle {summary['cost']['idle']:.2f}",
    )
    console.print(table)
    tasks = Table(
        "task",
        "pool",
        "trained share",
        "stale share",
        "reward",
        "turns",
        "sampled tokens",
        title="tasks",
        title_justify="left",
    )
    for name, row in summary["tasks"].items():
        tasks.add_row(
            name, row["pool"], f"{row['trained_share']:.2f} of {row['share']:.2f}", f"{row['stale_share']:.2f}",
            f"{row['reward']:.3f}", f"{row['turns']:.1f}", f"{row['sampled_tokens']:.0f}",
        )  # fmt: skip
    console.print(tasks)
    pools = Table("pool", "engines", "utilisation", "requests", "fallbacks", title="pools", title_justify="left")
    for name, row in summary["pools"].items():
        pools.add_row(
            name, str(row["engines"]), f"{row['utilisation']:.2f}", f"{row['requests']:,}", str(row["fallbacks"])
        )
    console.print(pools)
    for text in summary["warnings"][:10]:
        console.print(f"warning: {text}", style="yellow", markup=False)
    console.print(f"run directory: {out}", markup=False)


def show_chaos(report: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{report['plans']} fault plans in {report['wall_s']:.0f} s: {report['violations']} violations, "
        f"{report['deadlocks']} deadlocks, {report['lost']} groups lost, {report['trained_twice']} trained twice"
    )
    table = Table("fault", "fired", "during a swap")
    for kind, row in report["faults"].items():
        table.add_row(kind, str(row["fired"]), str(row["during_swap"]))
    console.print(table)
    for failure in report["failures"][:10]:
        console.print(f"seed {failure['seed']}: {failure['text']}", markup=False)

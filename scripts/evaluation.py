"""Writes the tables and plots of docs/evaluation.md. `python -m scripts.evaluation`, run from the repository.

The table of measurements is computed; those of the paper's experiments come from docs/evaluation/paper.json, which
`python -m benchmarks.paper --json` prints.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.anchors import ANCHORS, error
from rollart.report.charts import bars

PAGE = Path(__file__).resolve().parent.parent / "docs" / "evaluation.md"
FIGURES = PAGE.parent / "evaluation" / "paper.json"
PLOT = PAGE.parent / "evaluation" / "modes.svg"


def anchors() -> str:
    lines = ["| source | what | measured | predicted | error | |", "|---|---|---|---|---|---|"]
    for anchor in ANCHORS:
        figures = " | ".join(f"{value:,.4g}" for value in (anchor.measured, anchor.predicted))
        measured, predicted = figures.split(" | ")
        lines.append(
            f"| {anchor.source} | {anchor.what} | {measured} {anchor.unit} | {predicted} | {error(anchor):+.1%} | "
            f"{'fitted' if anchor.fitted else ''} |"
        )
    return "\n".join(lines)


def experiment(name: str) -> str:
    """One experiment of docs/evaluation/paper.json as a table."""
    rows: list[dict[str, Any]] = json.loads(FIGURES.read_text())["experiments"][name]
    if not any("paper" in row for row in rows):
        more = {"times_the_step": "times the step", "by_seed": "by seed"}
        key = next((key for key in more if any(key in row for row in rows)), "")
        lines = [f"| | ours | {more.get(key, '')} |", "|---|---|---|"]
        for row in rows:
            told = row.get(key, "")
            words = ", ".join(map(str, told)) if isinstance(told, list) else told
            lines.append(f"| {row['what']} | {row['ours']} | {words} |")
        return "\n".join(lines)
    lines = ["| | paper | ours | ours / paper | |", "|---|---|---|---|---|"]
    for row in rows:
        paper = row.get("paper", "")
        told = f"{paper[0]} to {paper[1]}" if isinstance(paper, list) else f"{paper:,.4g}" if paper else ""
        kind = "" if "paper" not in row else "calibrated" if row["calibrated"] else "compared"
        lines.append(f"| {row['what']} | {told} | {row['ours']:,} | {row.get('ratio', '')} | {kind} |")
    return "\n".join(lines)


def plot() -> str:
    """Step times of the modes, for each model."""
    rows = json.loads(FIGURES.read_text())["experiments"]["D"]
    times = {row["what"].removesuffix(", s a step"): row["ours"] for row in rows if row["what"].endswith("s a step")}
    models = list(dict.fromkeys(name.split(", ")[0] for name in times))
    modes = list(dict.fromkeys(name.split(", ")[1] for name in times))
    series = {model: [times[f"{model}, {mode}"] for mode in modes] for model in models}
    return bars("Seconds a step, simulated: the paper's set-up D", modes, series, " s")


def written(page: str) -> str:
    """The page with every part between markers made anew."""
    parts = {"anchors": anchors(), **{name: experiment(name) for name in re.findall(r"<!-- paper (\w+) -->", page)}}
    for name, part in parts.items():
        marker = name if name == "anchors" else f"paper {name}"
        page = re.sub(
            rf"(?s)<!-- {marker} -->.*?<!-- /{marker} -->",
            lambda _, marker=marker, part=part: f"<!-- {marker} -->\n{part}\n<!-- /{marker} -->",  # type: ignore[misc]
            page,
        )
    return page


def main() -> int:
    PLOT.write_text(plot())
    PAGE.write_text(written(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

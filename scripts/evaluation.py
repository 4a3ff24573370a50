"""Writes the tables and plots of docs/evaluation.md. `python -m scripts.evaluation`, run from the repository.

The table of measurements is computed; those of the paper's experiments come from docs/figures/paper.json, which
`python -m benchmarks.paper --json` prints.
"""

import re
import sys
from pathlib import Path

from benchmarks.anchors import ANCHORS, error

PAGE = Path(__file__).resolve().parent.parent / "docs" / "evaluation.md"


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


def written(page: str) -> str:
    """The page with every part between markers made anew."""
    for name, part in (("anchors", anchors()),):
        page = re.sub(rf"(?s)<!-- {name} -->.*?<!-- /{name} -->", f"<!-- {name} -->\n{part}\n<!-- /{name} -->", page)
    return page


def main() -> int:
    PAGE.write_text(written(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Rewards over time of one or several runs, as one drawing: `python -m scripts.curves RUN [RUN ...] --out FILE.svg`.

From each run directory: the rewards of every step (`metrics.jsonl`, a mean of the last `--window` steps that had the
task) as lines, and the held-out evaluations (`events.jsonl`) as dots. One panel for each task, one colour for each run.
"""

import argparse
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 300, 190, 42
COLOURS = ("#1f6fb2", "#d1662b", "#3a8f4d", "#8a5bb5", "#555555")
Points = list[tuple[float, float]]


@dataclass
class Curves:
    """Of one run."""

    name: str
    trained: dict[str, Points] = field(default_factory=dict)
    """Task -> (x, reward)."""
    held_out: dict[str, Points] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--by", choices=("seconds", "steps"), default="seconds")
    parser.add_argument("--window", type=int, default=5, help="steps that a point of a line is the mean of")
    options = parser.parse_args()
    found = [read(run, options.by, options.window) for run in options.runs]
    options.out.write_text(draw(found, options.by))
    print(options.out)


def read(run: Path, by: str, window: int) -> Curves:
    curves = Curves(run.name)
    recent: dict[str, deque[tuple[float, float]]] = {}
    """Task -> rewards of the last steps: their sum, and of how many."""
    for row in lines(run / "metrics.jsonl"):
        x = row["time_s"] if by == "seconds" else row["step"] + 1
        for key, value in row.items():
            task, _, what = key.partition("/")
            if what == "reward/mean":
                last = recent.setdefault(task, deque(maxlen=window))
                count = row.get(f"{task}/reward/scored", 1)
                last.append((count * value, count))
                curves.trained.setdefault(task, []).append((x, sum(one for one, _ in last) / sum(n for _, n in last)))
    for event in lines(run / "events.jsonl"):
        if event.get("e") == "eval" and event["play"] == "sampled":
            x = event["t"] if by == "seconds" else float(event["name"].removeprefix("eval"))
            curves.held_out.setdefault(event["task"], []).append((x, event["reward"]))
    return curves


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def draw(found: Sequence[Curves], by: str) -> str:
    tasks = list(dict.fromkeys(task for curves in found for task in curves.trained))
    longest = max((x for curves in found for points in curves.trained.values() for x, _ in points), default=1.0)
    longest = max(longest, max((x for one in found for points in one.held_out.values() for x, _ in points), default=0))
    parts = []
    for number, task in enumerate(tasks):
        left, top = MARGIN + number * (WIDTH + MARGIN), 24

        def at(point: tuple[float, float], left: int = left, top: int = top) -> str:
            return f"{left + WIDTH * point[0] / longest:.1f},{top + HEIGHT * (1 - min(1.0, max(0.0, point[1]))):.1f}"

        parts.append(f'<text x="{left}" y="{top - 8}" font-weight="bold">{escape(task)}</text>')
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            begin, end = at((0, share)).split(","), at((longest, share)).split(",")
            parts.append(f'<path d="M{begin[0]} {begin[1]}H{end[0]}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{float(begin[1]) + 4}" text-anchor="end">{share:g}</text>')
        for share in (0.0, 0.5, 1.0):
            x = left + WIDTH * share
            parts.append(f'<text x="{x}" y="{top + HEIGHT + 16}" text-anchor="middle">{longest * share:.0f}</text>')
        for curves, colour in zip(found, COLOURS, strict=False):
            points = " ".join(at(point) for point in curves.trained.get(task, []))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            for point in curves.held_out.get(task, []):
                across, down = at(point).split(",")
                parts.append(f'<circle cx="{across}" cy="{down}" r="4" fill="{colour}"/>')
    below = 24 + HEIGHT + 38
    parts.append(f'<text x="{MARGIN}" y="{below}">{by}; lines: rewards in training, dots: held out</text>')
    for number, (curves, colour) in enumerate(zip(found, COLOURS, strict=False)):
        x = MARGIN + 340 + 150 * number
        parts.append(f'<text x="{x}" y="{below}" fill="{colour}" font-weight="bold">{escape(curves.name)}</text>')
    width = MARGIN + max(1, len(tasks)) * (WIDTH + MARGIN)
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    size = f'width="{width}" height="{below + 12}"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{ground}\n{body}\n</svg>\n'


if __name__ == "__main__":
    main()

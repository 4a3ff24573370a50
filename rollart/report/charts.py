"""Plots as SVG text: bars of one or several series. Used by `rollart sim --sweep`, and by the pages of docs/."""

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#3b6ea5", "#d1813a", "#5a9e6f", "#8a5aa0", "#a04a4a")
WIDTH, BAR, GAP, LABEL, TOP = 720, 18, 14, 250, 44
"""Pixels: of the plot, of a bar, between groups, of the labels' column, above the first group."""


def bars(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str = "") -> str:
    """Horizontal bars, for each label one of each series."""
    longest = max((value for values in series.values() for value in values), default=0.0) or 1.0
    group = BAR * len(series) + GAP
    height = TOP + group * len(labels) + 8
    scale = (WIDTH - LABEL - 90) / longest
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>',
    ]
    for number, name in enumerate(series):
        at = LABEL + 130 * number
        lines.append(f'<rect x="{at}" y="27" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>')
        lines.append(f'<text x="{at + 15}" y="36">{escape(name)}</text>')
    for row, label in enumerate(labels):
        top = TOP + row * group
        lines.append(f'<text x="{LABEL - 8}" y="{top + group / 2 - 2:g}" text-anchor="end">{escape(label)}</text>')
        for number, values in enumerate(series.values()):
            y, width = top + number * BAR, max(1.0, values[row] * scale)
            colour = COLOURS[number % len(COLOURS)]
            lines.append(f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{colour}"/>')
            lines.append(f'<text x="{LABEL + width + 6:.1f}" y="{y + 12}">{values[row]:,.4g}{escape(unit)}</text>')
    return "\n".join([*lines, "</svg>", ""])

"""Line charts as SVG, with nothing but text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 60, 190, 40, 40
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000")


def chart(title: str, labels: Sequence[str], lines: Mapping[str, Sequence[float]], *, log: bool = False) -> str:
    """`lines`: a value for each of `labels`. With `log` values must be above 0."""
    place = math.log10 if log else float
    values = [place(value) for line in lines.values() for value in line]
    low, high = (min(values), max(values)) if log else (0.0, max(values))
    span = (high - low) or 1.0

    def x(n: int) -> float:
        return LEFT + n * (WIDTH - LEFT - RIGHT) / max(len(labels) - 1, 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (place(value) - low) / span * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for step in range(5):
        raw = low + span * step / 4
        value = 10**raw if log else raw
        out.append(
            f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    out += [
        f'<text x="{x(n):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{escape(label)}</text>'
        for n, label in enumerate(labels)
    ]
    # Names stand where their lines end, moved apart where they would overlap.
    free = float(TOP)
    for number, (name, line) in sorted(enumerate(lines.items()), key=lambda item: y(item[1][1][-1])):
        colour = COLOURS[number % len(COLOURS)]
        dash = ' stroke-dasharray="5 3"' if number >= len(COLOURS) else ""
        points = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in enumerate(line))
        free = max(free, y(line[-1]))
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{WIDTH - RIGHT + 10}" y="{free + 4:.1f}" fill="{colour}">{escape(name)}</text>'
        )
        free += 14
    return "\n".join([*out, "</svg>\n"])

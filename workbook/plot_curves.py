"""Curves on log axes, named at their right ends: one quantity over another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from workbook import style
from workbook.chart import (
    MARGIN,
    SMALL,
    WIDTH,
    Chart,
    Page,
    around,
    draw_ticks,
    log_ticks,
    width_of,
)
from workbook.style import LINE, SOFT, Picture

__all__ = ["curves", "lines_chart"]

LINES = 3.0  # inches that the lines are high
COLOURS = (style.EAGER, style.OURS, style.BAD, style.ALGEBRA, style.COMPILE, style.TRIED)


def curves(
    xs: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    title: str,
    axes: tuple[str, str],
    caption: str = "",
) -> Picture:
    """Lines over common `xs`, both axes logarithmic; axes: what x is, what y is.

    A point that is 0, infinite or NaN has no place on a log axis and is left out. ValueError where
    a line has another length than `xs`, or no point at all.
    """
    shown = {}
    for name, ys in lines.items():
        if len(ys) != len(xs):
            raise ValueError(
                f"lines: {name!r} has {len(ys)} points, wants {len(xs)}, one for each x"
            )
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if x > 0 and 0 < y < math.inf]
        if not points:
            raise ValueError(f"lines: {name!r} has no point above 0 and finite: nothing to draw")
        shown[name] = points
    colours = dict(zip(shown, COLOURS * len(shown), strict=False))
    ends = [(n, style.error_text(pts[-1][1]), pts[-1][1], colours[n]) for n, pts in shown.items()]
    chart = lines_chart(
        title, caption, ends,
        limits=(min(xs), max(xs)),
        heights=around([y for points in shown.values() for _, y in points], 2.0),
        tick_text=lambda x: f"{x:g}",
        height_text=style.error_text,
        names=axes,
    )  # fmt: skip
    for name, points in shown.items():
        chart.axes.plot(*zip(*points, strict=True), "o-", color=colours[name], lw=2.2, ms=4)
    said = [
        f"{name}: " + ", ".join(f"{style.error_text(y)} at {x:g}" for x, y in points)
        for name, points in shown.items()
    ]
    return Picture(chart.figure, f"{title}. {axes[1]} over {axes[0]}. {'; '.join(said)}.")


def lines_chart(
    title: str,
    caption: str,
    ends: Sequence[tuple[str, str, float, str]],
    *,
    limits: tuple[float, float],
    heights: tuple[float, float],
    tick_text: Callable[[float], str],
    height_text: Callable[[float], str],
    names: tuple[str, str],
) -> Chart:
    """Log axes for lines that are named at their right ends: `ends` are (name,
    text of the value, value, colour).

    `names` are those of the two axes; the y axis is in the units of its values.
    """
    page = Page(title, caption, (), LINES, 1)
    ticks = log_ticks(*heights, LINES, lambda tick: 0.3)
    left = MARGIN + 0.08 + max(width_of(height_text(tick), SMALL) for tick in ticks)
    right = WIDTH - MARGIN - 0.1 - max(width_of(name, bold=True) for name, *_ in ends)
    axes = page.axes(left, right - left, limits)
    axes.set(yscale="log", ylim=heights)
    page.text(MARGIN, page.above - 0.09, names[1], size=SMALL, color=SOFT, va="bottom")
    draw_ticks(axes, right - left, LINES, tick_text, names[0])
    for tick in ticks:
        part = math.log(heights[1] / tick) / math.log(heights[1] / heights[0])
        axes.axhline(tick, color=LINE, lw=0.7, zorder=0)
        where = {"ha": "right", "size": SMALL, "color": SOFT}
        page.text(left - 0.07, page.above + part * LINES, height_text(tick), **where)
    span = math.log(heights[1] / heights[0]) / LINES
    ends = sorted(ends, key=lambda end: -end[2])
    places = apart([math.log(heights[1] / y) / span for *_, y, _ in ends], 0.4, LINES)
    for (name, value, _, colour), place in zip(ends, places, strict=True):
        page.text(right + 0.08, page.above + place, name, bold=True, color=colour)
        page.text(right + 0.08, page.above + place + 0.17, value, size=SMALL, color=colour)
    return Chart(page.figure, axes, [], right - left)


def apart(wanted: Sequence[float], gap: float, last: float) -> list[float]:
    """Ascending places, `gap` apart at least: as wanted, or further down, or up where the last one
    would lie beyond `last`."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap) if places else place)
    for i in reversed(range(len(places))):
        most = places[i + 1] - gap if i + 1 < len(places) else last
        places[i] = min(places[i], most)
    return places

"""The figure of how it scales: time over B, K and N side by side, and where ours is overtaken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbook import crossings, legend, stats, style
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
from workbook.crossings import Crossing, Point
from workbook.journal import Records
from workbook.legend import CROSS, REFERENCES, Timed
from workbook.record import AXES
from workbook.style import LINE, SOFT, Picture, duration, factor, tick_time

__all__ = ["scaling"]

HIGH = 2.7  # inches of the panels
BETWEEN = 0.36  # inches between two of them
NAMES = (*REFERENCES, "fused")
FLOOR = {"color": style.FLOOR, "lw": 1.3, "ls": (0, (4, 2))}
EVEN = {"marker": "o", "ms": 9, "mfc": style.PAPER, "mec": style.INK, "lw": 0}

Panels = dict[str, list[Point]]


def scaling(records: Any, route: str = "float32") -> Picture:
    """Time per call over each axis that was swept, on log axes: PyTorch's ways, ours, the floor.

    route: of the baselines, float32 or tf32. A ring where ours is as fast as the best of the others
    and a crossing is near, a cross where ours is outside the accuracy rule. What did not run is
    named in the caption. ValueError without records of a sweep, or with those of several problems,
    cards or modes.
    """
    found = legend.alike(crossings.of_sweeps(records, "scaling"), "scaling", crossings.ABOUT)
    panels = {axis: crossings.points_of(found, axis, route) for axis in AXES}
    panels = {axis: points for axis, points in panels.items() if _is_compared(points)}
    if not panels:
        crossings.crossing_of((), found[0].how["axis"])  # says what is missing
    crossed = {axis: crossings.crossing_of(points, axis) for axis, points in panels.items()}
    title, shown = _title(crossed), _records(panels)
    heights = around([ms for points in panels.values() for p in points for ms in _times(p)], 1.4)
    page = Page(title, _caption(found, shown, panels), _key(panels, crossed), HIGH, 2)
    ticks = log_ticks(*heights, HIGH, lambda tick: 0.3)
    left = MARGIN + 0.08 + max(width_of(tick_time(tick), SMALL) for tick in ticks)
    width = (WIDTH - MARGIN - 0.1 - left - BETWEEN * (len(panels) - 1)) / len(panels)
    page.text(MARGIN, page.above - 0.31, "time per call, log scale", size=SMALL, color=SOFT)
    for tick in ticks:
        part = math.log(heights[1] / tick) / math.log(heights[1] / heights[0])
        where = {"ha": "right", "size": SMALL, "color": SOFT}
        page.text(left - 0.07, page.above + part * HIGH, tick_time(tick), **where)
    for number, (axis, points) in enumerate(panels.items()):
        at = left + number * (width + BETWEEN)
        chart = _panel(page, at, width, heights, ticks, _axis_name(found, axis), points)
        _lines(chart, axis, points)
        _evens(chart, axis, points, crossed[axis])
    said = [_said(axis, points, crossed[axis]) for axis, points in panels.items()]
    first = found[0]
    where = f"{first.problem} on {first.card or 'unknown card'}, {first.mode} mode"
    return Picture(page.figure, f"{title}. {where}. {' '.join(said)}")


def _is_compared(points: Sequence[Point]) -> bool:
    return any("fused" in p.timings and not math.isnan(p.ratio) for p in points)


def _panel(
    page: Page, left: float, width: float, heights: tuple[float, float], ticks: Sequence[float],
    name: str, points: Sequence[Point],
) -> Chart:  # fmt: skip
    """Empty axes with their grid; the limits leave room for half a mark at each end."""
    axes = page.axes(left, width, around([p.value for p in points], 1.5))
    axes.set(yscale="log", ylim=heights)
    draw_ticks(axes, width, HIGH, lambda n: style.grouped(f"{n:.10g}"), name)
    for tick in ticks:
        axes.axhline(tick, color=LINE, lw=0.7, zorder=0)
    return Chart(page.figure, axes, [], width)


def _lines(chart: Chart, axis: str, points: Sequence[Point]) -> None:
    """A line a variant, quartiles behind its medians; what is missing leaves a gap."""
    for name in NAMES:
        ran = [(p.value, t.ms, t) for p in points if (t := p.timings.get(name)) and t.ms]
        if not ran:
            continue
        ours, timed = name == "fused", ran[0][2]
        line = {"color": timed.colour, "lw": 2.6 if ours else 1.8, "zorder": 4 if ours else 3}
        marker = "s" if timed.record.route == "tf32" else "o"
        ys = [next((ms for v, ms, _ in ran if v == p.value), math.nan) for p in points]
        chart.axes.plot(
            [p.value for p in points], ys, marker=marker, ms=4, gid=f"{axis}/{name}", **line
        )
        for value, ms, timed in ran:
            q1, _, q3 = stats.quartiles(timed.record.samples_ms)
            bar = {"lw": 4, "alpha": 0.35, "solid_capstyle": "butt", "color": timed.colour}
            chart.axes.plot([value, value], [q1, q3], **bar)
            if ours and timed.bad:
                chart.axes.plot([value], [ms], gid=f"{axis}/wrong/{value}", **CROSS)
    floors = [(p.value, p.floor) for p in points if p.floor]
    if floors:
        chart.axes.plot(*zip(*floors, strict=True), zorder=2, gid=f"{axis}/floor", **FLOOR)


def _evens(chart: Chart, axis: str, points: Sequence[Point], crossing: Crossing) -> None:
    """Rings where ours is as fast as the best of the others, and what sizes these are."""
    edges = crossing.edges
    for x in edges:
        y = _between(points, x)
        chart.axes.axvline(x, color=style.INK, lw=0.8, ls=(0, (1, 2)), zorder=1)
        chart.axes.plot([x], [y], gid=f"{axis}/even/{x:g}", zorder=5, **EVEN)
    if edges:
        named = " and ".join(map(crossings.size_text, edges[:2])) + ", …" * (len(edges) > 2)
        chart.above(edges[0], f"even at {named}", style.INK)


def _between(points: Sequence[Point], x: float) -> float:
    """The time of ours at x, straight on log axes between the sizes beside it."""
    ours = [(p.value, t.ms) for p in points if (t := p.timings.get("fused")) and t.ms]
    below = max((o for o in ours if o[0] <= x * (1 + 1e-12)), default=ours[0])
    above = min((o for o in ours if o[0] >= x * (1 - 1e-12)), default=ours[-1])
    if below[0] == above[0]:
        return below[1]
    part = math.log(x / below[0]) / math.log(above[0] / below[0])
    return below[1] * (above[1] / below[1]) ** part


# --- what it says -------------------------------------------------------------------------------


def _records(panels: Panels) -> Records:
    timed = [t for points in panels.values() for p in points for t in p.timings.values()]
    return Records(t.record for t in timed)


def _times(point: Point) -> list[float | None]:
    timed = [t for t in point.timings.values() if t.ms]
    return [point.floor, *(q for t in timed for q in stats.quartiles(t.record.samples_ms))]


def _title(crossed: dict[str, Crossing]) -> str:
    ratios = [ratio for c in crossed.values() for _, ratio in c.ratios]
    known = [ratio for ratio in ratios if 0 < ratio < math.inf]
    slower = sum(not ratio > 1 for ratio in ratios)
    ends = dict.fromkeys(factor(r, 0.05) for r in (min(known), max(known))) if known else ()
    said = f"the fastest at all {len(ratios)} sizes"
    if slower:
        said = f"not the fastest at {slower} of {len(ratios)} sizes"
    return f"Ours is {' to '.join(ends) or 'not comparably'} as fast as the best of PyTorch, {said}"


def _axis_name(found: Records, axis: str) -> str:
    record = next(r for r in found if r.how["axis"] == axis)
    return f"{axis} ({crossings.others(record, axis)})"


def _caption(found: Records, shown: Records, panels: Panels) -> str:
    first = found[0]
    failed = [
        f"{t.label} at {axis} {p.value}"
        for axis, points in panels.items()
        for p in points
        for t in p.timings.values()
        if t.ms is None
    ]
    said = legend.timing(shown, f"did not run: {', '.join(failed)}" if failed else "")
    return f"{first.problem} on {first.card or 'unknown card'}.\n{said}"


def _key(panels: Panels, crossed: dict[str, Crossing]) -> list[tuple[dict[str, Any], str]]:
    """What lines and marks mean, as far as they occur."""
    every = [p for points in panels.values() for p in points]
    entries = []
    for name in NAMES:
        timed = next((p.timings[name] for p in every if name in p.timings), None)
        if timed:
            entries.append(({"color": timed.colour, "lw": 2.4}, timed.label))
    if any(p.floor for p in every):
        entries.append((FLOOR, "floor"))
    if any(c.edges for c in crossed.values()):
        entries.append((EVEN, "ours is as fast as the best other"))
    if any(_is_wrong(p.timings.get("fused")) for p in every):
        entries.append((CROSS, "outside the accuracy rule"))
    return entries


def _is_wrong(timed: Timed | None) -> bool:
    return timed is not None and timed.ms is not None and timed.bad


def _said(axis: str, points: Sequence[Point], crossing: Crossing) -> str:
    """One axis in words: every median, and where ours is not faster."""
    shape = crossings.others(next(iter(points[0].timings.values())).record, axis)
    numbers = []
    for name in NAMES:
        there = [(p.value, p.timings[name]) for p in points if name in p.timings]
        if there:
            said = ", ".join(f"{t.text} at {value}" for value, t in there)
            numbers.append(f"{there[0][1].label} {said}")
    floors = ", ".join(f"{duration(p.floor, 0.05)} at {p.value}" for p in points if p.floor)
    numbers += [f"floor {floors}"] if floors else []
    where = f"where ours is not the fastest: {crossing.words}"
    return f"Over {axis} ({shape}): {'; '.join(numbers)}; {where}."

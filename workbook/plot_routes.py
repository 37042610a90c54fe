"""The figure of routes: what each way to multiply costs in time, and in accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbook import legend, style
from workbook.chart import SMALL, Chart, around
from workbook.legend import Timed
from workbook.plot_curves import lines_chart
from workbook.style import Picture, error_text, tick_time

__all__ = ["routes"]

NAMES = ("eager", "compile", "fused")
METHODS = {"fp16x3": "three products", "fp16x1": "one product", "tf32": "one of TF32"}
MARKERS = {"tf32": "s"}  # float32 is a disc
FINE = {"tf32": "TF32"}
NEAR = 0.3  # of logarithms: lines whose names would stand on each other


def routes(records: Any) -> Picture:
    """Error against time of eager, compile and ours, in float32 and in TF32, log axes.

    Lines mark eager's own error on each route. What was extrapolated, or is exact, is left out.
    ValueError without two points.
    """
    timings = legend.timings(records, "routes")
    shown = [t for t in timings.values() if t.record.variant in NAMES and _has_point(t)]
    if len(shown) < 2:
        raise ValueError(
            f"routes: records: got {len(shown)} timings with an error, of {', '.join(timings)}; "
            "want two or more: run wb.bench(p, variants=['eager', 'fused'])"
        )
    errors = [t.record.rel_error for t in shown]
    title = _title(shown)
    chart = lines_chart(
        title,
        legend.caption([t.record for t in shown], legend.left_out(records)),
        [(_name(t), f"{t.text}, {error_text(t.record.rel_error)}", t.record.rel_error, t.colour)
         for t in shown],
        limits=around([t.ms for t in shown], 1.6),
        heights=around(errors, 3.0),
        tick_text=tick_time,
        height_text=error_text,
        names=("time per call, log scale: further left is faster",
               "error against float64, log scale: further down is better"),
    )  # fmt: skip
    for timed in shown:
        marker, at = MARKERS.get(timed.record.route, "o"), (timed.ms, timed.record.rel_error)
        chart.axes.plot(*at, marker, ms=8, color=timed.colour, zorder=3, gid=f"point/{timed.key}")
        if timed.bad:
            chart.axes.plot(*at, "x", ms=11, mew=2, color=style.BAD, zorder=4)
    for timed, words in _levels([t for t in shown if t.record.variant == "eager"]):
        _level(chart, timed, words)
    said = [f"{legend.said(t)}, error {error_text(t.record.rel_error)}" for t in shown]
    return Picture(chart.figure, legend.alt(title, [shown[0].record], said, None))


def _has_point(timed: Timed) -> bool:
    error = timed.record.rel_error
    return timed.ms is not None and error is not None and 0 < error < float("inf")


def _name(timed: Timed) -> str:
    method = METHODS.get(timed.record.method, "")
    return timed.label if not method else f"{timed.label}, {method}"


def _levels(eager: Sequence[Timed]) -> list[tuple[Timed, str]]:
    """Eager on each route, and what its line is called; "" where it lies on the one before."""
    names = [FINE.get(t.record.route, t.record.route) for t in eager]
    errors = [math.log(t.record.rel_error) for t in eager]
    if len(eager) == 2 and abs(errors[0] - errors[1]) < NEAR:
        return [(eager[0], f"eager's error in {' and '.join(names)}"), (eager[1], "")]
    return [(t, f"eager's error in {name}") for t, name in zip(eager, names, strict=True)]


def _level(chart: Chart, eager: Timed, words: str) -> None:
    """Eager's own error, along the whole axis."""
    error, left = eager.record.rel_error, chart.axes.get_xlim()[0]
    line = {"color": style.EAGER, "lw": 1.0, "ls": (0, (4, 2)), "zorder": 1}
    chart.axes.axhline(error, gid=f"eager/{eager.record.route}", **line)
    how = {"size": SMALL, "color": style.EAGER, "ha": "left", "va": "bottom"}
    if words:
        chart.text(left * 1.02, error * 1.05, words, **how)


def _title(shown: Sequence[Timed]) -> str:
    """What ours does on each route beside eager on it."""
    of = {t.key: t for t in shown}
    said = []
    for route, words in (("", "float32"), ("/tf32", "TF32")):
        ours, eager = of.get(f"fused{route}"), of.get(f"eager{route}")
        if ours and eager:
            ratio = ours.record.rel_error / eager.record.rel_error
            said.append(
                f"in {words} {legend.times(eager, ours)} as fast as eager, "
                f"with {style.factor(ratio)} its error"
            )
    return f"Ours: {'; '.join(said)}" if said else "Error against time, by route"

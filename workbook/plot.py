"""Records → figures: the ladder of kernels, the waterfall, errors, the overview, the break-even,
how it scales, error against time; the kernel's source → the pipeline.

Each function takes records (or a result that has `.records`) and returns a Picture. What it can
not draw from is a ValueError that says what is missing; runs that failed are drawn as failed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from workbook import legend, stats, style
from workbook.chart import SMALL, Chart, Row, around, row_chart, width_of
from workbook.journal import Records
from workbook.legend import CROSS, REFERENCES, Timed, times
from workbook.plot_break_even import break_even
from workbook.plot_curves import curves
from workbook.plot_errors import errors
from workbook.plot_halves import error_by_family, error_over
from workbook.plot_overview import overview
from workbook.plot_pipeline import pipeline
from workbook.plot_routes import routes
from workbook.plot_scaling import scaling
from workbook.style import Picture, duration, factor, tick_time

__all__ = [
    "Picture",
    "break_even",
    "curves",
    "error_by_family",
    "error_over",
    "errors",
    "ladder",
    "overview",
    "pipeline",
    "routes",
    "scaling",
    "waterfall",
]


TIME_AXIS = "time per call, log scale: further left is faster"
MARK = {"marker": "o", "ms": 7, "color": style.INK, "lw": 0}
PREDICTED = MARK | {"marker": "D", "ms": 10, "mfc": "none", "mew": 1.2}
STEP = {"color": style.ALGEBRA, "lw": 9, "solid_capstyle": "butt"}
HATCH = "//////"


def _dot(chart: Chart, y: float, timed: Timed) -> None:
    """Median and quartiles; TF32 is a square, extrapolated is open, a wrong result is crossed."""
    if timed.ms is None:
        return
    q1, _, q3 = stats.quartiles(timed.record.samples_ms)
    axes, colour = chart.axes, timed.colour
    if not timed.record.extrapolated:
        axes.plot([q1, q3], [y, y], color=colour, lw=3.6, alpha=0.45, solid_capstyle="butt")
    marker = "s" if timed.record.route == "tf32" else "o"
    if timed.record.extrapolated:
        axes.scatter(
            [timed.ms], [y], s=75, marker=marker, facecolor=style.PAPER, edgecolor=colour,
            hatch=HATCH, zorder=4, gid=f"median/{timed.key}",
        )  # fmt: skip
    else:
        axes.plot([timed.ms], [y], marker, ms=7, color=colour, zorder=4, gid=f"median/{timed.key}")
    if timed.bad:
        axes.plot([timed.ms], [y], "x", ms=11, mew=2, color=style.BAD, zorder=5)


def _floor_line(chart: Chart, floor: float | None) -> None:
    """The floor as a line; what lies beyond it is shaded."""
    if floor is None:
        return
    chart.axes.axvspan(chart.axes.get_xlim()[0], floor, color=style.SUNK, lw=0, zorder=-1)
    chart.axes.axvline(floor, color=style.FLOOR, lw=1.3, ls=(0, (4, 2)), zorder=1, gid="floor")
    chart.above(floor, f"floor {duration(floor, 0.01)}", style.FLOOR)


def _row(timed: Timed, *cells: str) -> Row:
    ours = timed.record.variant == "fused" and timed.record.route != "tf32"
    return Row(timed.label, cells, timed.note, bold=ours, bad=timed.bad)


def _time_limits(shown: Sequence[Timed], who: str, *more: float | None) -> tuple[float, float]:
    """Limits around medians and quartiles. ValueError when nothing ran."""
    ran = [t for t in shown if t.ms]
    if not ran:
        raise ValueError(
            f"{who}: records: got {len(shown)} runs, all of them failed ({shown[0].note}); "
            "want one that ran"
        )
    return around([*more, *(q for t in ran for q in stats.quartiles(t.record.samples_ms))])


def _key(shown: Sequence[Timed], predicted: bool) -> list[tuple[dict[str, Any], str]]:
    """What marks mean, as far as they occur."""
    tf32, bad = MARK | {"marker": "s"}, MARK | CROSS
    entries = [
        (True, MARK, "median; a bar behind it spans the quartiles"),
        (any(t.record.route == "tf32" for t in shown), tf32, "in TF32"),
        (predicted, PREDICTED, "predicted before timing"),
        (
            any(t.record.extrapolated and t.ms for t in shown),
            MARK | {"hatch": HATCH},
            "extrapolated",
        ),
        (any(t.bad and t.ms for t in shown), bad, "outside the accuracy rule"),
    ]
    return [(mark, meaning) for there, mark, meaning in entries if there]


# --- the figures ----------------------------------------------------------------------------


def ladder(records: Any) -> Picture:
    """The kernels from the first one to ours, in the order of the ladder, on a log time axis.

    Beside them PyTorch's own ways, the floor, what was predicted, each with its number.
    """
    timings = legend.timings(records, "ladder")
    rungs = [t for t in timings.values() if t.record.variant not in (*REFERENCES, "fused+fold")]
    if not rungs:
        raise ValueError(
            f"ladder: records: got timings of {', '.join(timings)}; want a kernel beside them: "
            "run wb.bench(p) with variants=None"
        )
    rungs.sort(key=legend.order)
    routes = {t.record.route for t in rungs}
    wanted = [timings.get(key) for name in REFERENCES for key in (name, f"{name}/tf32")]
    references = [t for t in wanted if t and t.record.route in routes]
    shown, eager, floor = [*references, *rungs], timings.get("eager"), legend.floor_of(rungs)
    predicted = _predictions(records, rungs)
    rows = [_row(t, t.text, times(eager, t)) for t in shown]
    split = len(references)
    groups = [("PyTorch", rows[:split]), ("Kernels, first to last", rows[split:])]
    parts = [(Row(name, header=True), *part) for name, part in groups if part]
    title = _ladder_title(rungs, eager, floor)
    chart = row_chart(
        title,
        [row for part in parts for row in part],
        headers=("median", "speed-up\nover eager"),
        limits=_time_limits(shown, "ladder", floor, *predicted.values()),
        tick_text=tick_time,
        axis_name=TIME_AXIS,
        caption=legend.caption([t.record for t in shown], legend.left_out(records)),
        key=_key(shown, bool(predicted)),
    )
    _floor_line(chart, floor)
    middles = [y for y, row in zip(chart.middles, sum(parts, ()), strict=True) if not row.header]
    for y, timed in zip(middles, shown, strict=True):
        _dot(chart, y, timed)
        if timed.key in predicted:
            where, how = ([predicted[timed.key]], [y]), PREDICTED | {"mec": timed.colour}
            chart.axes.plot(*where, zorder=5, gid=f"predicted/{timed.key}", **how)
    said = [legend.said(t, predicted.get(t.key)) for t in shown]
    return Picture(chart.figure, legend.alt(title, [shown[0].record], said, floor))


def _predictions(records: Any, rungs: Sequence[Timed]) -> dict[str, float]:
    """key -> the last prediction in ms that is about the same thing as the rungs."""
    keys, about, found = {t.key for t in rungs}, rungs[0].record, {}
    for record in Records(getattr(records, "records", records)).query(kind="prediction"):
        same = all(getattr(record, n) in ("", {}, getattr(about, n)) for n in _PREDICTED_FOR)
        value, key = record.value, Timed(record).key
        if same and key in keys and value is not None and math.isfinite(value) and value > 0:
            found[key] = value
    return found


_PREDICTED_FOR = ("problem", "card", "size", "shape", "device")


def _ladder_title(rungs: Sequence[Timed], eager: Timed | None, floor: float | None) -> str:
    ours = next((t for t in rungs if t.record.variant == "fused" and not t.bad), None)
    ran = [t for t in rungs if not t.bad]
    if ours is None or eager is None or eager.ms is None:
        return f"{len(ran)} of {len(rungs)} kernels ran, none of these known to be wrong"
    steps = sum(t.record.variant not in ("fused", "tried") for t in rungs)
    first = f"From {ran[0].text} to {ours.text} in {steps} kernels: " if ran[0] is not ours else ""
    left = f", {factor(ours.ms / floor, ours.spread)} the floor" if floor else ""
    return f"{first}{times(eager, ours)} as fast as eager{left}"


def waterfall(records: Any) -> Picture:
    """From eager over the algebra to ours and on to the floor, each step with its factor.

    Eager and the algebra keep their steps, crossed out, where they are outside the accuracy rule;
    a kernel has to be right. Below, torch.compile and the TF32 baselines on the same axis.
    """
    timings = legend.timings(records, "waterfall")
    ours = _ours(timings)
    steps = [t for t in (timings.get("eager"), timings.get("algebra"), ours) if t and t.ms]
    if len(steps) < 2 or steps[0].key != "eager":
        ran = ", ".join(key for key, timed in timings.items() if not timed.bad or timed in steps)
        raise ValueError(
            f"waterfall: records: got timings of {ran or 'nothing'}; want eager and "
            "algebra or a kernel that is right: run wb.bench(p, variants=['eager', 'fused'])"
        )
    floor, ours = legend.floor_of(timings.values()), ours or steps[-1]
    tried = (timings.get("algebra"), timings.get("fused"))
    failed = [t for t in tried if t and t.bad and t not in steps]
    rows = [_row(t, t.text, times(t, ours)) for t in steps]
    if floor:
        cells = (duration(floor, 0.01), factor(floor / ours.ms, ours.spread))
        rows.append(Row("floor", cells))
    beside = [*failed, *(timings[key] for key in _BESIDE if key in timings)]
    if beside:
        rows += [
            Row("For comparison", header=True),
            *(_row(t, t.text, times(t, ours)) for t in beside),
        ]
    shown = [*steps, *beside]
    low, high = _time_limits(shown, "waterfall", floor)
    title = _waterfall_title(steps, floor)
    chart = row_chart(
        title,
        rows,
        headers=("median", "time\n÷ ours"),
        limits=(low, high * (high / low) ** 0.12),
        tick_text=tick_time,
        axis_name=TIME_AXIS,
        caption=legend.caption([t.record for t in shown], legend.left_out(records)),
        key=[*_key(shown, False), (STEP, "a step, as long as its factor")],
    )
    _steps(chart, steps, floor)
    for y, timed in zip(chart.middles[len(chart.middles) - len(beside) :], beside, strict=True):
        _dot(chart, y, timed)
    said = [*(legend.said(t) for t in shown), *_factors(steps, floor)]
    return Picture(chart.figure, legend.alt(title, [shown[0].record], said, floor))


_BESIDE = ("compile", "eager/tf32", "compile/tf32", "algebra/tf32", "fused/tf32", "fused+fold")


def _ours(timings: dict[str, Timed]) -> Timed | None:
    """The fused op, or else the fastest kernel that is right."""
    fused = timings.get("fused")
    if fused and not fused.bad:
        return fused
    rungs = [t for k, t in timings.items() if legend.is_kernel(t) and not t.bad]
    return min(rungs, key=lambda t: t.ms, default=None)


def _factors(steps: Sequence[Timed], floor: float | None) -> list[str]:
    """The factor of each step, in words."""
    names = {"algebra": "by algebra"}
    pairs = zip(steps, steps[1:], strict=False)
    said = [f"{times(a, b)} {names.get(b.record.variant, 'by the kernel')}" for a, b in pairs]
    if floor:
        said.append(f"{factor(steps[-1].ms / floor, steps[-1].spread)} left to the floor")
    return said


def _waterfall_title(steps: Sequence[Timed], floor: float | None) -> str:
    end = "ours" if legend.is_kernel(steps[-1]) else "the algebra"
    end += " (outside the accuracy rule)" if steps[-1].bad else ""
    how = _factors(steps, floor)
    whole = f"{times(steps[0], steps[-1])} from eager to {end}"
    return f"{whole}: {', '.join(how)}" if len(how) > 1 else whole


def _steps(chart: Chart, steps: Sequence[Timed], floor: float | None) -> None:
    """A bar from each time to the next: on a log axis as long as its factor."""
    _floor_line(chart, floor)
    _dot(chart, chart.middles[0], steps[0])
    ends = [(b.ms, b.colour, times(a, b), b.key) for a, b in itertools.pairwise(steps)]
    if floor:
        text = factor(steps[-1].ms / floor, steps[-1].spread)
        ends.append((floor, style.PAPER, text, "floor"))
    for y, timed in zip(chart.middles, steps, strict=False):
        if timed.bad:
            chart.axes.plot([timed.ms], [y], zorder=5, gid=f"outside/{timed.key}", **CROSS)
    start, below = steps[0].ms, chart.middles
    for (end, colour, text, key), (above, y) in zip(ends, itertools.pairwise(below), strict=False):
        chart.axes.plot([start, start], [above, y - 0.085], color=style.SOFT, lw=0.8, zorder=2)
        _step(chart, y, start, end, text if end <= start else f"{text}, slower", colour, key)
        start = end


def _step(
    chart: Chart, y: float, start: float, end: float, text: str, colour: str, key: str
) -> None:
    """One bar with its factor, inside where it fits, else to the right."""
    low, high = chart.axes.get_xlim()
    left, right = sorted((start, end))
    inches = chart.inches / math.log(high / low)  # of a factor e
    edge = style.BAD if end > start else style.FLOOR if key == "floor" else colour
    bar = {"facecolor": colour, "edgecolor": edge, "lw": 1.2 if edge != colour else 0}
    chart.axes.barh(y, right - left, 0.17, left, zorder=3, gid=f"step/{key}", **bar)
    how = {"size": SMALL, "bold": True, "zorder": 6}
    if math.log(right / left) * inches > width_of(text, SMALL, True) + 0.12:
        colour = style.INK if key == "floor" else style.PAPER
        chart.text(math.sqrt(left * right), y, text, ha="center", color=colour, **how)
    else:
        white = {"facecolor": style.PAPER, "edgecolor": "none", "pad": 0.6}
        chart.text(right * math.exp(0.06 / inches), y, text, ha="left", bbox=white, **how)

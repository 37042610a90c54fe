"""The figure of the break-even: after how many calls the fold has paid for itself."""

from __future__ import annotations

import math
from typing import Any

from workbook import legend, limits, stats, style
from workbook.chart import SMALL, around
from workbook.legend import Timed
from workbook.plot_curves import lines_chart
from workbook.style import Picture, duration, tick_time

__all__ = ["break_even"]


def break_even(records: Any) -> Picture:
    """Total time against the number of calls: eager, and ours with its fold paid once.

    Log axes. ValueError without eager, ours, or a fold time.
    """
    timings = legend.timings(records, "break_even")
    slow, fast = timings.get("eager"), timings.get("fused")
    for name, timed in (("eager", slow), ("fused", fast)):
        if timed is None or timed.bad:
            why = timed.note if timed else f"got timings of {', '.join(timings)}"
            raise ValueError(
                f"break_even: records: {why}; want {name}, timed and right: "
                "run wb.bench(p, variants=['eager', 'fused'])"
            )
    fold, spread = _fold(timings, fast)
    calls = limits.break_even_calls(fold, slow.ms, fast.ms)
    most = 1e3
    if 100 < calls < math.inf:
        most = 10.0 ** math.ceil(math.log10(10 * calls))
    whole = [10 ** (step * math.log10(most) / 200) for step in range(201)]
    lines = {
        slow.label: (slow, [n * slow.ms for n in whole]),
        "ours, with its fold": (fast, [fold + n * fast.ms for n in whole]),
    }
    title = _break_even_title(calls, duration(fold, spread))
    notes = (f"Fold: {duration(fold, spread)}, once", legend.left_out(records))
    chart = lines_chart(
        title,
        legend.caption([slow.record, fast.record], "; ".join(filter(None, notes))),
        [(name, duration(ys[-1]), ys[-1], timed.colour) for name, (timed, ys) in lines.items()],
        limits=(1.0, most),
        heights=around([y for _, ys in lines.values() for y in ys]),
        tick_text=lambda n: style.grouped(f"{n:.10g}"),
        height_text=tick_time,
        names=("calls with the same weights, log scale", "total time, log scale"),
    )
    for timed, ys in lines.values():
        chart.axes.plot(whole, ys, color=timed.colour, lw=2.2, gid=f"total/{timed.key}")
    if 1 <= calls <= most:
        how = {"size": SMALL, "bold": True, "va": "top", "ha": "left"}
        after = stats.significant(calls, math.nan)
        chart.text(calls * 1.12, calls * slow.ms / 1.1, f"even after {after} calls", **how)
        chart.axes.plot(
            [calls], [calls * slow.ms], "o", ms=9, mfc=style.PAPER, mec=style.INK, gid="break even"
        )
    totals = [
        f"{name} {duration(ys[0])} for 1 call, {duration(ys[-1])} for {most:g}"
        for name, (_, ys) in lines.items()
    ]
    said = [f"fold {duration(fold, spread)}", legend.said(slow), legend.said(fast), *totals]
    return Picture(chart.figure, legend.alt(title, [fast.record], said, None))


def _fold(timings: dict[str, Timed], fast: Timed) -> tuple[float, float]:
    """(time of a fold in ms, its spread): as recorded, or from a run that folds in each call."""
    samples = [ms for ms in fast.record.fold_ms or () if math.isfinite(ms) and ms >= 0]
    if samples:
        return stats.median(samples), stats.spread(samples)
    folding = timings.get("fused+fold")
    if folding and folding.ms and folding.ms > fast.ms:
        return folding.ms - fast.ms, math.nan
    raise ValueError(
        "break_even: records: no fold_ms is recorded with fused, and no fused+fold was timed; "
        "want one of them: run wb.bench(p, variants=['eager', 'fused', 'fused+fold'])"
    )


def _break_even_title(calls: float, fold: str) -> str:
    if math.isinf(calls):
        return f"A fold of {fold} never pays here: ours is not faster than eager"
    if calls < 1:
        return f"A fold of {fold} has paid for itself after one call"
    count = style.grouped(str(math.floor(calls) + 1))
    return f"A fold of {fold} has paid for itself after {count} calls"

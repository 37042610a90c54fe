"""The figure of all problems: how many times as fast as PyTorch ours is, on each card."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from workbook import legend, style
from workbook.chart import Row, around, row_chart
from workbook.journal import Record, Records
from workbook.legend import times
from workbook.style import Picture, factor

__all__ = ["overview"]

MARK = {"marker": "o", "lw": 0}


def overview(records: Any, problems: Iterable[Any] | None = None) -> Picture:
    """How many times as fast as eager and torch.compile ours is, for each card and problem.

    `problems` (Problems or slugs) are the ones shown, in this order, measured or not; None means
    those that have records. Of several sizes the largest is shown. Rows: float32 baselines, and
    below them TF32 ones.
    """
    benches = legend.of_one_flush(legend.of_kind(records, "overview", "bench"), "overview")
    names = {r.problem: r.problem for r in benches}
    if problems is not None:
        names = dict((p, p) if isinstance(p, str) else (p.slug, p.title) for p in problems)
    rows: list[Row] = []
    marks: list[tuple[int, str, str, float]] = []  # row, route, baseline, speed-up
    said, shown = [], []
    for card in dict.fromkeys(r.card for r in benches):
        for slug, title in names.items():
            groups = _largest(benches.query(card=card, problem=slug))
            if not groups:
                rows += [Row(title, note=f"{card}: not measured", header=True)]
                said.append(f"{title} on {card}: not measured")
            for group in groups:
                _overview_rows(title, group, rows, marks, said)
                shown += group
    if not marks:
        raise ValueError(
            "overview: records: got no problem with both eager (or compile) and fused timed; "
            "run wb.bench(p, variants=['eager', 'fused'])"
        )
    title = _overview_title(marks)
    low, high = around([1.0, *(value for *_, value in marks)])
    chart = row_chart(
        title,
        rows,
        headers=("over\neager", "over\ntorch.compile"),
        limits=(low, high),
        tick_text=lambda value: f"{style.grouped(f'{value:.10g}')}×",
        axis_name="speed-up of ours, log scale: further right is faster",
        caption=_overview_caption(shown, legend.left_out(records)),
        key=OVERVIEW_KEY,
    )
    chart.axes.axvline(1.0, color=style.FLOOR, lw=1.0, zorder=0.5)
    for number, _, baseline, value in marks:
        y, gid = chart.middles[number], f"speedup/{number}/{baseline}"
        chart.axes.plot([1.0, value], [y, y], color=style.OURS, lw=2.2, zorder=2)
        mark = dict(BASELINES[baseline])
        chart.axes.plot([value], [y], zorder=4, gid=gid, **mark)
    return Picture(chart.figure, f"{title}. {'; '.join(said)}.")


BASELINES = {
    "eager": MARK | {"color": style.EAGER, "ms": 8},
    "compile": MARK | {"color": style.COMPILE, "marker": "D", "ms": 5},
}
OVERVIEW_KEY = [
    (BASELINES["eager"], "over PyTorch eager"),
    (BASELINES["compile"], "over torch.compile"),
]


def _largest(benches: Records) -> list[Records]:
    """For each mode the records of the largest shape, without gradients where there are such."""
    groups: dict[str, Records] = {}
    for record in benches:
        about = repr([getattr(record, name) for name in legend.SAME])
        groups.setdefault(about, Records()).append(record)

    def size(group: Records) -> tuple[float, bool, bool]:
        first = group[0]
        elements = math.prod(v for v in first.shape.values() if isinstance(v, (int, float)))
        return elements, not first.grad, first.dtype in ("", "float32")

    modes = dict.fromkeys(r.mode for r in benches)
    return [max((g for g in groups.values() if g[0].mode == mode), key=size) for mode in modes]


def _overview_rows(
    title: str, group: Records, rows: list[Row], marks: list, said: list[str]
) -> None:
    """Add the rows of one problem on one card: a header, float32 baselines, TF32 baselines."""
    timings = legend.newest(group, "overview")
    mode = f", {group[0].mode} mode" if group[0].mode == "train" else ""
    where = legend.situation(group) + mode
    rows.append(Row(title, note=where, header=True))
    wanted = [("float32 baselines", "", "fused"), ("TF32 baselines", "/tf32", "fused")]
    if "fused/tf32" in timings:
        wanted.append(("TF32, ours too", "/tf32", "fused/tf32"))
    for label, route, name in wanted[: 1 if group[0].device == "cpu" else None]:
        ours, cells, words = timings.get(name), [], []
        mixed = route != "" and name == "fused" and len(wanted) > 2  # ours has a row of that route
        for baseline in BASELINES:
            slow = timings.get(baseline + route)
            cells.append(times(slow, ours))
            if slow and slow.ms and ours and ours.ms:
                its = "mixed" if mixed else route
                marks.append((len(rows), its, baseline, legend.ratio(slow, ours)[0]))
                words.append(f"{cells[-1]} over {baseline}")
        bad = ours is None or ours.bad
        note = (ours.note if ours else "ours was not measured") if bad else ""
        rows.append(Row(label, cells, note, bad=bad))
        said.append(f"{title} on {where}, {label}: {', '.join(words) or 'not measured'}")


def _overview_title(marks: Sequence[tuple[int, str, str, float]]) -> str:
    said = []
    for route, name in (("", "float32"), ("/tf32", "TF32")):
        values = [value for _, its, _, value in marks if its == route]
        ends = dict.fromkeys(factor(v, 0.05) for v in (min(values), max(values))) if values else ()
        said += [f"{' to '.join(ends)} as fast as {name} PyTorch"] if values else []
    return f"Ours is {', '.join(said)}"


def _overview_caption(shown: Sequence[Record], left_out: str) -> str:
    cards = " and ".join(dict.fromkeys(r.card for r in shown))
    more = "Ours is the float32 drop-in; of the baselines some use TF32"
    if any(r.variant == "fused" and r.route == "tf32" for r in shown):
        more = "Ours is the float32 drop-in, except in rows that say TF32, ours too"
    more += f"; {left_out}" if left_out else ""
    return f"On {cards}; size and shape stand above the rows.\n{legend.timing(shown, more)}"

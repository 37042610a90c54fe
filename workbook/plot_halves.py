"""Figures of records of kind "curve": how the error of a product grows, and over which families."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from workbook import style
from workbook.chart import Row, around, row_chart
from workbook.journal import Record, Records
from workbook.plot_curves import COLOURS, curves
from workbook.style import Picture, error_text

__all__ = ["error_by_family", "error_over"]

AXES = {  # sweep -> (what x is, its axis, its value in a record)
    "promotion": ("promoted every", "k between promotions, log scale", lambda r: r.how["promote"]),
    "depth": ("K from", "K, log scale", lambda r: r.shape["K"]),
}
ERROR = "relative error, log scale"
DRIFT = "relative error of the sum of |z|, log scale"
WHOLE, SPREAD = "o", 0.055  # marker; inches between the marks of two methods in a row


def error_over(records: Iterable[Record], sweep: str, *, drift: bool = False) -> Picture:
    """The error of each method over the promotion interval or over K, the float32 product beside.

    drift: how far the sum of |z| is off instead. ValueError without records of that sweep.
    """
    if sweep not in AXES:
        raise ValueError(f"sweep: got {sweep!r}; want one of {', '.join(AXES)}")
    found = _of_sweep(records, sweep)
    what_x, axis, of = AXES[sweep]
    lines: dict[str, dict[float, float]] = {}
    for r in [r for r in found if r.implementation != "emulation"] or found:
        own = r.how.get("drift_eager") if drift else r.rel_error_eager  # drawn as eager is
        lines.setdefault(_float32(r, found), {})[of(r)] = abs(_number(own))
    for r in found:
        ours = r.value if drift else r.rel_error
        lines.setdefault(_name(r, found), {})[of(r)] = abs(_number(ours))
    lines = {what: p for what, p in lines.items() if any(0 < y < math.inf for y in p.values())}
    xs = sorted({of(r) for r in found})
    said = "; ".join(_ends(*line) for line in lines.items())
    title = f"{'Drift of Σ|z|, ' if drift else ''}{what_x} {xs[0]:g} to {xs[-1]:g}: {said}"
    drawn = {what: [points.get(x, math.nan) for x in xs] for what, points in lines.items()}
    axes = (axis, DRIFT if drift else ERROR)
    return curves(xs, drawn, title=title[0].upper() + title[1:], axes=axes, caption=_caption(found))


def _ends(what: str, points: dict[float, float]) -> str:
    there = [y for _, y in sorted(points.items()) if y == y]
    first, last = error_text(there[0]), error_text(there[-1])
    return f"{what} {first}" if first == last else f"{what} {first} to {last}"


def error_by_family(records: Iterable[Record]) -> Picture:
    """A row a family: the worst row's error of each method and of the float32 product, filled.

    Hollow: the worst output's, a column of z. A cross where a method is outside the rule.
    """
    found = _of_sweep(records, "family")
    methods = list(dict.fromkeys(_name(r, found) for r in found))
    colours = dict(zip(methods, COLOURS[1:] * len(methods), strict=False))
    rows, marks = [], []
    for family in dict.fromkeys(r.family for r in found):
        its = {_name(r, found): r for r in found if r.family == family}
        cells = [error_text(its[m].rel_error_rows) if m in its else "–" for m in methods]
        own = next(iter(its.values()))
        bad = [m for m, r in its.items() if r.passed is False]
        note = f"outside the rule: {', '.join(bad)}" if bad else ""
        rows.append(Row(family, [*cells, error_text(own.rel_error_eager_rows)], note))
        marks.append([*((colours[m], r, m) for m, r in its.items()), (style.EAGER, own, "")])
    values = [v for its in marks for _, r, m in its for v in _pair(r, not m)]
    chart = row_chart(
        f"Worst row over {len(rows)} families: {'; '.join(_range(found, m) for m in methods)}",
        rows,
        headers=[*methods, "float32"],
        limits=around(values),
        tick_text=error_text,
        axis_name=ERROR,
        caption=_caption(found),
        key=_key(colours),
    )
    for y, its in zip(chart.middles, marks, strict=True):
        for lane, (colour, record, method) in enumerate(its):
            at = y + (lane - (len(its) - 1) / 2) * SPREAD
            gid = f"{method or 'float32'}/{record.family}"
            filled, hollow = _pair(record, not method)
            how = {"marker": WHOLE if method else "s", "ms": 5.5, "color": colour, "zorder": 4}
            chart.axes.plot([hollow], [at], mfc=style.PAPER, gid=f"output/{gid}", **how)
            chart.axes.plot([filled], [at], gid=f"row/{gid}", **how)
    names = [*methods, "float32"]
    said = [
        f"{r.label}: {', '.join(map(' '.join, zip(names, r.cells, strict=True)))}" for r in rows
    ]
    return Picture(chart.figure, f"Error of the worst row. {'; '.join(said)}. {_caption(found)}")


def _of_sweep(records: Iterable[Record], sweep: str) -> Records:
    records = Records(getattr(records, "records", records))
    found = Records(r for r in records.query(kind="curve") if r.how.get("sweep") == sweep)
    if not found:
        raise ValueError(
            f"records: got {len(records)}, none of kind 'curve' over {sweep}; "
            f"want some: run curves.measure(product, method=..., sweeps=[{sweep!r}])"
        )
    return found


def _name(r: Record, among: Sequence[Record]) -> str:
    """The method; which card or model it ran on, where there is more than one."""
    sources = {(o.implementation == "emulation", o.card) for o in among}
    if len(sources) == 1:
        return r.method
    return f"{r.method}, {'model' if r.implementation == 'emulation' else r.device}"


def _float32(r: Record, among: Sequence[Record]) -> str:
    return f"float32, {r.device}" if len({o.device for o in among}) > 1 else "float32"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _pair(r: Record, eager: bool) -> tuple[float, float]:
    """(error of the worst row, of the worst output); nan where a call failed."""
    outputs = r.how.get("outputs_eager" if eager else "outputs", math.nan)
    return _number(r.rel_error_eager_rows if eager else r.rel_error_rows), float(outputs)


def _range(found: Sequence[Record], method: str) -> str:
    errors = [_number(r.rel_error_rows) for r in found if _name(r, found) == method]
    there = [e for e in errors if e == e]
    if not there:
        return f"{method} did not run"
    return f"{method} {error_text(min(there))} to {error_text(max(there))}"


def _key(colours: dict[str, str]) -> list[tuple[dict[str, Any], str]]:
    mark = {"marker": WHOLE, "ms": 5.5, "lw": 0}
    key = [(mark | {"color": colour}, method) for method, colour in colours.items()]
    key.append((mark | {"marker": "s", "color": style.EAGER}, "float32 product"))
    hollow = mark | {"color": style.INK, "mfc": style.PAPER}
    return [*key, (hollow, "hollow: the worst output, a column of z")]


def _caption(found: Sequence[Record]) -> str:
    """Where the records come from, a line each source."""
    sources: dict[tuple, list[Record]] = {}
    for r in found:
        sources.setdefault((r.card, r.implementation == "emulation"), []).append(r)
    lines = []
    for (card, model), its in sources.items():
        shapes = {n: {r.shape[n] for r in its} for n in its[0].shape}
        shape = ", ".join(f"{n} {max(sizes)}" for n, sizes in shapes.items() if len(sizes) == 1)
        how, r = "A model in float64 on" if model else "Measured on", its[-1]
        lines.append(f"{how} {card}, {shape}, {r.date[:10]}, commit {r.commit[:12] or 'unknown'}")
    return "\n".join(lines)

"""The figure of errors: ours beside eager's own, the limits, and where wrong kernels land."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbook import legend, style
from workbook.chart import Chart, Row, around, row_chart
from workbook.journal import Record, Records
from workbook.style import Picture, error_text

__all__ = ["errors"]

# field -> (style of its mark, what it is)
MARKS = {
    "rel_error_eager": (
        {"marker": "s", "ms": 5, "mfc": style.PAPER, "color": style.EAGER},
        "whole",
    ),
    "rel_error_eager_rows": ({"marker": "s", "ms": 5, "color": style.EAGER}, "worst row"),
    "rel_error": ({"marker": "o", "ms": 6, "mfc": style.PAPER, "color": style.OURS}, "whole"),
    "rel_error_rows": ({"marker": "o", "ms": 6, "color": style.OURS}, "worst row"),
}
LANE = 0.06  # inches that the worst row stands above the middle of a row, and the whole below it
ALLOWED = {"color": "#c3d6ec", "lw": 7.5, "solid_capstyle": "butt"}
# what it limits -> (name of its mark, its lane, its style); each lane has its own limit
BANDS = {
    "worst row": ("limit_rows", -LANE, ALLOWED),
    "whole": ("limit", LANE, ALLOWED | {"color": "#e3ecf6"}),
}
CROSS = legend.CROSS | {"ms": 8}


@dataclass(frozen=True)
class Control:
    """Something wrong on purpose: its error, and whether the rule let it through."""

    name: str
    error: float | None
    accepted: bool


def errors(records: Any, scores: Sequence[dict[str, Any]] | None = None) -> Picture:
    """Relative errors against float64, a row per family and state: ours beside eager's own.

    `records` are those of a check, or its result, which brings `scores` along. A row shows the case
    (of all seeds and shapes) that comes nearest to one of its two limits: the worst row and its
    limit above, the whole and its limit below. At the end: what is wrong on purpose.
    """
    checks = legend.of_kind(records, "errors", "check")
    scores = list((getattr(records, "scores", None) or ()) if scores is None else scores)
    ours = Records(r for r in checks if not r.variant.startswith("wrong_"))
    legend.alike(checks, "errors", ("problem", "card", "route", "mode", "dtype"))
    legend.alike(ours, "errors", ("variant",))
    cases, controls = _cases(ours), _controls(checks, scores)
    rows, drawn = _rows(cases, controls)
    values = [v for r in cases for v in (*(getattr(r, name) for name in MARKS), *_limits(r))]
    values += [control.error for control in controls]
    if not any(v is not None and math.isfinite(v) and v > 0 for v in values):
        values = [1e-8, 1e-6]  # all exact, or all broken: marks stand at the edges
    title = _title(ours, controls)
    more = f"{len(ours)} cases; each row: the one nearest to a limit" if ours else ""
    chart = row_chart(
        title,
        rows,
        headers=("worst\nrow", "its\nlimit"),
        limits=around(values, 2.5),
        tick_text=_tick,
        axis_name="relative error against float64, log scale: further left is better",
        caption=legend.caption(checks, more),
        key=_key(cases, controls),
    )
    for y, item in zip(chart.middles, drawn, strict=True):
        if isinstance(item, Record):
            _case(chart, y, item)
        elif isinstance(item, Control) and item.error is not None:
            _mark(chart, y, item.error, CROSS, f"control/{item.name}")
    said = [_said(r) for r in cases] + [f"{c.name}: {_verdict(c)}" for c in controls]
    about = f"{checks[0].problem}, {legend.situation(checks)}"
    return Picture(chart.figure, f"{title}. {about}. {'; '.join(said)}.")


def _cases(ours: Records) -> list[Record]:
    """For each state and family, in the order they come, the case that is nearest to its limit.

    A case that was refused, as by the reference, has no error to show.
    """
    found: dict[tuple[str, str], Record] = {}
    for record in ours:
        if record.passed and record.rel_error is None:
            continue
        key = (record.state, record.family)
        if key not in found or _nearness(record) > _nearness(found[key]):
            found[key] = record
    states = list(dict.fromkeys(state for state, _ in found))
    return [r for state in states for key, r in found.items() if key[0] == state]


def _limits(record: Record) -> tuple[float | None, float | None]:
    """The limits of the whole error and of the worst row's; older records have one for both."""
    return record.limit, record.how.get("limit_rows", record.limit)


def _nearest(record: Record) -> tuple[float, str, float]:
    """(error / limit, of the whole or the worst row, error) of what is nearest to its limit.

    Infinite where an error is not finite, or none is known.
    """
    errors = zip(("whole", "worst row"), (record.rel_error, record.rel_error_rows), strict=True)
    found = [(math.inf, "worst row", math.nan)]
    for (what, error), limit in zip(errors, _limits(record), strict=True):
        if error is not None:
            found.append(
                (error / (limit or 1.0) if math.isfinite(error) else math.inf, what, error)
            )
    return max(found[1:] or found, key=lambda near: near[0])


def _nearness(record: Record) -> tuple[bool, float]:
    return record.passed is False, _nearest(record)[0]


def _controls(checks: Records, scores: Sequence[dict[str, Any]]) -> list[Control]:
    """From the scores, and from checks of kernels that are wrong: their largest error."""
    found = [Control(s["name"], s.get("rel_error"), bool(s.get("accepted"))) for s in scores]
    for variant in dict.fromkeys(r.variant for r in checks if r.variant.startswith("wrong_")):
        cases = checks.query(variant=variant)
        worst = max(cases, key=_nearness)
        name = variant.removeprefix("wrong_").replace("_", " ")
        error = worst.rel_error if worst.rel_error is not None else worst.rel_error_rows
        found.append(Control(name, error, all(r.passed for r in cases)))
    return found


def _rows(
    cases: Sequence[Record], controls: Sequence[Control]
) -> tuple[list[Row], list[Record | Control | None]]:
    rows: list[Row] = []
    drawn: list[Record | Control | None] = []
    for state in dict.fromkeys(r.state for r in cases):
        rows.append(Row(f"State: {state}" if state else "Families of inputs", header=True))
        drawn.append(None)
        for record in (r for r in cases if r.state == state):
            cells = (error_text(record.rel_error_rows), error_text(_limits(record)[1]))
            bad = record.passed is False
            note = record.reason or ("over the limit" if bad else "")
            rows.append(Row(record.family or "inputs", cells, note, bad=bad))
            drawn.append(record)
    if controls:
        rows.append(Row("Wrong on purpose: whole errors", header=True))
        drawn.append(None)
    for control in controls:
        verdict = "accepted" if control.accepted else "rejected"
        cells = (error_text(control.error), verdict)
        rows.append(Row(control.name, cells, bad=control.accepted))
        drawn.append(control)
    return rows, drawn


def _case(chart: Chart, y: float, record: Record) -> None:
    low, high = chart.axes.get_xlim()
    case = f"{record.state}/{record.family}"
    for limit, what in zip(_limits(record), ("whole", "worst row"), strict=True):
        name, lane, shade = BANDS[what]
        if limit is not None and limit > low:
            end, lane = min(limit, high), y + lane
            chart.axes.plot([low, end], [lane, lane], zorder=1, gid=f"{name}/{case}", **shade)
            ends = [lane - 0.052, lane + 0.052]
            chart.axes.plot([end, end], ends, color=style.INK, lw=1.4, zorder=2)
    for name, (mark, what) in MARKS.items():
        value = getattr(record, name)
        if value is not None:
            _mark(chart, y + BANDS[what][1], value, {"lw": 0, **mark}, f"{name}/{case}")
    if record.passed is False and (record.rel_error, record.rel_error_rows) != (None, None):
        _, what, error = _nearest(record)
        _mark(chart, y + BANDS[what][1], error, CROSS | {"ms": 11}, f"outside/{case}")


def _mark(chart: Chart, y: float, value: float, mark: dict[str, Any], gid: str | None) -> None:
    """A mark at its value; one for 0 at the left edge, for inf and nan at the right one."""
    low, high = chart.axes.get_xlim()
    if not math.isfinite(value):
        mark = mark | {"marker": ">" if mark["marker"] != "x" else "x"}
        value = high
    elif value <= 0:
        mark, value = mark | {"marker": "<"}, low
    chart.axes.plot([value], [y], clip_on=False, zorder=4, gid=gid, **mark)


def _title(ours: Records, controls: Sequence[Control]) -> str:
    failed, through = [r for r in ours if r.passed is False], [c for c in controls if c.accepted]
    judged = sum(record.passed is True for record in ours)
    many = f"all {judged}" if judged == len(ours) else f"{judged} of {len(ours)}"
    parts = [f"Within the limit in {many} cases"] if ours else []
    if failed:
        parts = [f"Outside the limit in {len(failed)} of {len(ours)} cases"]
    if through:
        parts.append(f"{len(through)} of {len(controls)} wrong results accepted")
    elif controls:
        parts.append(f"all {len(controls)} wrong results rejected")
    return "; ".join(parts)


def _key(cases: Sequence[Record], controls: Sequence[Control]) -> list[tuple[dict, str]]:
    who = {"rel_error_rows": "ours", "rel_error": "ours"}
    there = [n for n in reversed(MARKS) if any(getattr(r, n) is not None for r in cases)]
    key = [({"lw": 0, **MARKS[n][0]}, f"{who.get(n, 'eager')}, {MARKS[n][1]}") for n in there]
    if any(r.limit is not None for r in cases):
        halves = {"worst row": "upper half", "whole": "lower half"}
        key += [(BANDS[what][2], f"allowed, {what} ({half})") for what, half in halves.items()]
    return key + ([(CROSS, "wrong")] if controls or any(r.passed is False for r in cases) else [])


def _tick(value: float) -> str:
    digits, power = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(power)}" if value != 1 else "1"


def _verdict(control: Control) -> str:
    return f"{error_text(control.error)}, {'accepted' if control.accepted else 'rejected'}"


def _said(record: Record) -> str:
    about = ", ".join(part for part in (record.state, record.family) if part) or "inputs"
    if record.rel_error is None and record.rel_error_rows is None:
        return f"{about}: {record.reason or 'no error recorded'}"
    numbers = f"ours {error_text(record.rel_error)}, worst row {error_text(record.rel_error_rows)}"
    eager = f"eager {error_text(record.rel_error_eager)}"
    eager += f", worst row {error_text(record.rel_error_eager_rows)}"
    failed = f", outside: {record.reason}".rstrip(": ") if record.passed is False else ""
    whole, rows = map(error_text, _limits(record))
    return f"{about}: {numbers}, {eager}, limit {whole}, of the worst row {rows}{failed}"

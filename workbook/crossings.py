"""Records of sweeps → what stands at each size, and where ours stops being the fastest.

Ours is held against the best of eager, torch.compile and the algebra at each size. Between two
sizes the ratio of the two is a straight line on log axes; it crosses 1 where ours is as fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workbook import legend, stats, style
from workbook.journal import Record, Records
from workbook.legend import REFERENCES, Timed
from workbook.record import AXES

__all__ = ["ABOUT", "Crossing", "Point", "crossing_of", "of_sweeps", "others", "points_of",
           "size_text"]  # fmt: skip

ABOUT = ("problem", "card", "mode", "grad", "dtype")  # what one figure, one row is about


@dataclass(frozen=True)
class Point:
    """What was timed at one size: keys eager, compile, algebra, fused; floor in ms."""

    value: int
    timings: dict[str, Timed]
    floor: float | None

    @property
    def best(self) -> Timed | None:
        """The fastest of PyTorch's ways; None where none of them ran."""
        others = (self.timings.get(name) for name in REFERENCES)
        return min((t for t in others if t and t.ms), key=lambda t: t.ms, default=None)

    @property
    def ratio(self) -> float:
        """Best / ours, paired where both have equal rounds: above 1 where ours is the fastest.

        inf where ours alone ran, 0 where ours did not or is outside the accuracy rule; nan without
        either.
        """
        ours, best = self.timings.get("fused"), self.best
        if ours is None or ours.bad:
            return math.nan if best is None else 0.0
        return math.inf if best is None else legend.ratio(best, ours)[0]


@dataclass(frozen=True)
class Crossing:
    """Over one axis: (size, best / ours) in rising order, and the spans where ours is not faster.

    A span is (from, to), None at an end that no sampled size bounds.
    """

    axis: str
    ratios: tuple[tuple[int, float], ...]
    spans: tuple[tuple[float | None, float | None], ...] = field(default=())

    @property
    def words(self) -> str:
        """Where ours is not faster: nowhere, everywhere, up to 210, from 5 300, from 3 to 40."""
        if not self.spans:
            return "nowhere"
        return " and ".join(_span(*span) for span in self.spans)

    @property
    def edges(self) -> list[float]:
        """The sizes at which ours is as fast as the best of the others."""
        return [edge for span in self.spans for edge in span if edge is not None]


def of_sweeps(given: Any, who: str) -> Records:
    """The records of sweeps among them. ValueError without any."""
    every = Records(getattr(given, "records", given))
    found = Records(r for r in every.query(kind="curve") if r.how.get("axis") in AXES)
    if not found:
        raise ValueError(
            f"{who}: records: got {len(every)} records, none of a sweep; want some: run "
            "wb.sweep(p, 'K'), or load some with wb.swept(p)"
        )
    return found


def points_of(found: Records, axis: str, route: str = "float32") -> list[Point]:
    """The points over an axis, baselines by that route, in rising order; of each size the newest.
    None of a size that has no baseline by it.

    Ours is that of the route too, where it was timed, else the float32 drop-in. ValueError where
    the other sizes differ.
    """
    its = Records(r for r in found if r.how.get("axis") == axis)
    rests = list(dict.fromkeys(others(r, axis) for r in its))
    if len(rests) > 1:
        raise ValueError(
            f"records: got several shapes beside {axis}: {'; '.join(rests)}; want one sweep over it"
        )
    points = []
    for value in sorted({r.shape[axis] for r in its}):
        here = Records(r for r in its if r.shape[axis] == value)
        timings = legend.newest(here, "sweep")
        suffix = "" if route == "float32" else f"/{route}"
        keyed = {name: timings.get(name + suffix) for name in (*REFERENCES, "fused")}
        keyed["fused"] = keyed["fused"] or timings.get("fused")
        kept = {name: timed for name, timed in keyed.items() if timed}
        if not any(name in kept for name in REFERENCES):
            continue  # timed by the other route alone
        points.append(Point(value, kept, legend.floor_of(kept.values())))
    return points


def crossing_of(points: Sequence[Point], axis: str) -> Crossing:
    """Where ours is not faster than the best of the others over those points.

    ValueError where ours and another way were timed together nowhere.
    """
    there = [p for p in points if "fused" in p.timings and len(p.timings) > 1]
    ratios = tuple((p.value, p.ratio) for p in there if not math.isnan(p.ratio))
    if not ratios:
        raise ValueError(
            f"records: got no size of {axis} with both fused and one of {', '.join(REFERENCES)} "
            "timed; run wb.sweep(p, ...) with variants=None"
        )
    return Crossing(axis, ratios, tuple(_spans(ratios)))


def _spans(ratios: Sequence[tuple[int, float]]) -> list[tuple[float | None, float | None]]:
    spans, start, inside = [], None, not ratios[0][1] > 1
    for one, two in itertools.pairwise(ratios):
        if (one[1] > 1) == (two[1] > 1):
            continue
        edge = _edge(one, two)
        if inside:
            spans.append((start, edge))
        start, inside = edge, not inside
    return [*spans, (start, None)] if inside else spans


def _edge(one: tuple[int, float], two: tuple[int, float]) -> float:
    """The size between two at which the ratio is 1, straight on log axes."""
    a, b = (math.log(ratio) if ratio > 0 else -math.inf for _, ratio in (one, two))
    if math.isinf(a) or math.isinf(b):  # something did not run there: the edge is where both did
        part = 0.5 if math.isinf(a) and math.isinf(b) else float(math.isinf(a))
    else:
        part = a / (a - b)
    return math.exp(math.log(one[0]) + part * (math.log(two[0]) - math.log(one[0])))


def _span(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "everywhere"
    if low is None:
        return f"up to {size_text(high)}"
    return f"from {size_text(low)}" + ("" if high is None else f" to {size_text(high)}")


def size_text(value: float) -> str:
    """A size as it is, an interpolated one with two digits."""
    whole = round(value)
    exact = abs(value - whole) < 1e-9 * value
    return style.grouped(str(whole) if exact else f"{float(stats.significant(value, math.nan)):g}")


def others(record: Record, axis: str) -> str:
    """The rest of a shape: "B 1024, N 8192"."""
    return ", ".join(f"{name} {value}" for name, value in record.shape.items() if name != axis)

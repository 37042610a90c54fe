"""Recorded sweeps → those that are shown, and a table of where ours stops being the fastest."""

from __future__ import annotations

import math

from workbook import chains, crossings, style
from workbook.crossings import Crossing
from workbook.journal import Record, Records
from workbook.legend import REFERENCES
from workbook.precision import ROUTES
from workbook.prose import Text
from workbook.record import AXES
from workbook.results import key_of, records
from workbook.spec import Problem
from workbook.tables import is_stale

__all__ = ["crossovers", "swept"]

FULL = 6  # sizes of a sweep that is shown before a newer one of fewer, as a first look has
BASELINES = {"float32": "float32", "tf32": "TF32"}
HEAD = ("problem", "card", "baselines", *(f"over {axis}" for axis in AXES))


def swept(
    p: Problem | str, *, device: str = "cuda", mode: str = "eval", **equals: object
) -> Records:
    """The recorded sweeps of a problem, one an axis, all of one card; none where none is recorded.

    Those of the kernels as they are now go before stale ones, newer before older. equals: other
    fields, such as card="...".
    """
    kept = records(p, kind="curve", device=device, mode=mode, **equals)
    cards = [_shown(kept.query(card=card)) for card in dict.fromkeys(r.card for r in kept)]
    return max(filter(None, cards), key=_of_card, default=Records())


def crossovers(kept: Records | None = None) -> Text:
    """Where ours is not faster than the best of eager, the algebra and, where it was timed,
    torch.compile, by axis.

    A row a problem, mode, card and route of the baselines. kept: records of sweeps, such as
    `wb.sweep` returns; those in data/ and .runs/ if not given.
    """
    every = records(kind="curve") if kept is None else kept.query(kind="curve")
    rows = []
    for p in chains.problems():
        for mode in p.modes:
            its = every.query(problem=p.slug, mode=mode)
            for card in sorted({(r.device != "cuda", r.card) for r in its}):
                shown = _shown(its.query(card=card[1]))
                rows += [_row(p, shown, route) for route in ROUTES if _has(shown, route)]
    if not rows:
        return Text("no sweeps are recorded")
    said = (
        "Sizes at which ours is not faster than the best of eager, the algebra in plain torch and, "
        "where the row says so, torch.compile; the others as at paper size (GPU) or laptop size "
        "(CPU). Then the least and the most that this best takes, over ours."
    )
    head = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    return Text("\n".join([*head, *rows]) + f"\n\n{said}")


def _shown(kept: Records) -> Records:
    """Of each axis the run that is shown; kept: of one problem, mode and card."""
    found = Records()
    for axis in AXES:
        runs: dict[str, Records] = {}
        for record in kept:
            if record.how.get("axis") == axis:
                runs.setdefault(record.run, Records()).append(record)
        compared = [run for run in runs.values() if _sizes(run)]
        found += max(compared, key=_worth, default=Records())
    return found


def _sizes(run: Records) -> set[int]:
    """Sizes at which ours was timed beside one of the others."""
    axis = run[0].how["axis"]
    ours = {r.shape[axis] for r in run if r.variant == "fused" and r.samples_ms}
    return ours & {r.shape[axis] for r in run if r.variant in REFERENCES and r.samples_ms}


def _worth(run: Records) -> tuple:
    """Of the run that is shown, the largest."""
    count = len(_sizes(run))
    compiled = any(r.variant == "compile" for r in run)
    return count >= FULL, _is_fresh(run), count, compiled, run[0].date, run[0].run


def _of_card(shown: Records) -> tuple:
    return _is_fresh(shown), len({r.run for r in shown}), max(r.date for r in shown)


def _is_fresh(run: Records) -> bool:
    """Of today's kernels."""
    ours = {(r.problem, key_of(r), r.kernels_digest): r for r in run if r.variant == "fused"}
    return not any(is_stale(chains.problem(r.problem), r) for r in ours.values())


def _has(shown: Records, route: str) -> bool:
    return any(r.variant in REFERENCES and r.route == route and r.samples_ms for r in shown)


def _row(p: Problem, shown: Records, route: str) -> str:
    first: Record = shown[0]
    name = f"`{p.slug}`" + (f", {first.mode}" if len(p.modes) > 1 else "")
    card = first.card + ("" if _is_fresh(shown) else " (stale)")
    cells = [_cell(shown, axis, route) for axis in AXES]
    compiled = any(r.variant == "compile" and r.route == route and r.samples_ms for r in shown)
    baselines = BASELINES[route] + (", torch.compile too" if compiled else "")
    return "| " + " | ".join([name, card, baselines, *cells]) + " |"


def _cell(shown: Records, axis: str, route: str) -> str:
    points = crossings.points_of(shown, axis, route)
    compared = any("fused" in p.timings and not math.isnan(p.ratio) for p in points)
    return _words(crossings.crossing_of(points, axis)) if compared else "–"


def _words(crossing: Crossing) -> str:
    """ "up to 75; 0.76× at 1 to 2.2× at 4 096"."""
    known = [(ratio, size) for size, ratio in crossing.ratios if 0 < ratio < float("inf")]
    ends = dict.fromkeys((min(known), max(known)) if known else ())
    said = [f"{style.factor(ratio, 0.05)} at {crossings.size_text(size)}" for ratio, size in ends]
    return "; ".join(filter(None, (crossing.words, " to ".join(said))))

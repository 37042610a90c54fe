"""The command `sweep`: variants over B, K and N, a table an axis."""

from __future__ import annotations

import argparse

from workbook import crossings
from workbook.chains import problem
from workbook.journal import Records
from workbook.legend import Timed
from workbook.lines import print_lines
from workbook.results import key_of, line
from workbook.scaling import sweep
from workbook.style import duration, factor

__all__ = ["run"]


def run(arguments: argparse.Namespace, device: str) -> int:
    """0; what could not run is in the records with its reason."""
    values, compile_at = _sizes(arguments, "values"), _sizes(arguments, "compile_at")
    names = arguments.variants.split(",") if arguments.variants else None
    for slug in arguments.slugs:
        for axis in arguments.axis:
            found = sweep(
                problem(slug), axis, values=values, device=device, mode=arguments.mode,
                variants=names, routes=arguments.route, compile_at=compile_at,
                rounds=arguments.rounds, budget_s=arguments.budget, keep=arguments.keep,
                progress=True,
            )  # fmt: skip
            if arguments.json:
                print_lines(map(line, found))
            else:
                print(f"{slug} on {found[0].card}, {found[0].mode}\n{_table(found, axis)}\n")
    return 0


def _sizes(arguments: argparse.Namespace, name: str) -> list[int] | None:
    text = getattr(arguments, name)
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        option = name.replace("_", "-")
        raise ValueError(f"--{option}: got {text!r}, wants sizes such as 32,512,8192") from None


def _table(found: Records, axis: str) -> str:
    """A row a size, a column a variant; below, where ours is not the fastest, and what failed."""
    keys = list(dict.fromkeys(map(key_of, found)))
    points = crossings.points_of(found, axis)
    rows = [[f"{axis} ({crossings.others(found[0], axis)})", *keys, "floor", "best / ours"]]
    for point in points:
        here = {key_of(r): Timed(r).text for r in found if r.shape[axis] == point.value}
        floor = duration(point.floor, 0.05) if point.floor else "–"
        ratio = factor(point.ratio, 0.05) if 0 < point.ratio < float("inf") else "–"
        rows.append([str(point.value), *(here.get(key, "–") for key in keys), floor, ratio])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if any("fused" in p.timings and p.best for p in points):
        lines.append(f"ours is not the fastest: {crossings.crossing_of(points, axis).words}")
    failed = dict.fromkeys(f"{key_of(r)} failed: {r.reason}" for r in found if not r.samples_ms)
    return "\n".join([*lines, *failed])

"""The time of each variant, said before it is timed: from a rule of its own, or from floors."""

from __future__ import annotations

from collections.abc import Sequence

from workbook import ceilings, compare, journal, limits, paths, split
from workbook.journal import Record, Records
from workbook.spec import Problem, Size, Variant
from workbook.variants import chosen_variants, method_of

__all__ = ["predict"]

_FLOORS = {
    "before": "floor of the work before the algebra",
    "after": "floor of the work after the algebra",
    "fold": "floor of the work after the algebra and of the fold",
}


def predict(
    p: Problem,
    *,
    size: str | Size | None = None,
    device: str | None = None,
    mode: str = "eval",
    variants: Sequence[str | Variant] | None = None,
) -> Records:
    """The time of each variant before it is timed, from its own rule or the floor of its work.

    Records of kind "prediction", value in ms, appended to .runs/.
    """
    size, device = compare.defaults(size, device)
    reach, shape = ceilings.measure_ceilings(device), p.shape(size)
    base = compare.base_of(p, size, device, mode)
    found = Records()
    for v in chosen_variants(p, variants, device, mode):
        ours = method_of(p, v, shape, device, mode, reach)
        how = split.METHODS[v.route] if ours else v.route  # as the floor of a bench
        floor = limits.floor_ms(p.least(v.reads, shape, how), reach, how)
        value = v.predict(shape, reach) if v.predict else floor.ms
        note = "its own rule" if v.predict else _FLOORS[v.reads]
        found.append(
            Record(kind="prediction", variant=v.name, implementation=v.implementation,
                   route=v.route, value=value, unit="ms", note=note, **base)
        )  # fmt: skip
    journal.append(found, journal.place(found[0], paths.runs()))
    return found

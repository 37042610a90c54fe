"""What figures say about records: which are shown, their names, colours, notes and captions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbook import stats, style
from workbook.journal import Record, Records
from workbook.style import duration, error_text, factor

__all__ = [
    "CROSS",
    "REFERENCES",
    "SAME",
    "Timed",
    "alike",
    "alt",
    "caption",
    "floor_of",
    "is_kernel",
    "label",
    "left_out",
    "newest",
    "of_kind",
    "of_one_flush",
    "order",
    "ratio",
    "said",
    "situation",
    "times",
    "timing",
    "timings",
]

SAME = ("problem", "card", "size", "shape", "mode", "grad", "dtype")  # what one figure is about
NAMES = {
    "eager": "PyTorch eager",
    "compile": "torch.compile",
    "algebra": "same algebra, plain torch",
    "cpu": "best CPU kernel",
    "fused": "ours (ModelNew)",
    "fused+fold": "ours, weights just changed",
    "tried": "your kernel",
}
REFERENCES = ("eager", "compile", "algebra")
COLOURS = {
    "eager": style.EAGER,
    "compile": style.COMPILE,
    "algebra": style.ALGEBRA,
    "tried": style.TRIED,
}
CROSS = {"marker": "x", "ms": 9, "mew": 2, "color": style.BAD, "lw": 0}  # a wrong result
UNITS = ("_s", "_ms", "_us", "_bytes", "_MB")
CACHES = {
    "flush read": "cold cache (flushed by reading)",
    "flush write": "cold cache (flushed by writing)",
    "flush none": "warm cache",
}
RUNG = re.compile(r"(?:cpu_)?(\d+)_(.+)")


@dataclass(frozen=True)
class Timed:
    """A timed variant as figures show it."""

    record: Record

    @property
    def key(self) -> str:
        """Name and route: eager, eager/tf32."""
        record = self.record
        return record.variant + (f"/{record.route}" if record.route not in ("", "float32") else "")

    @property
    def label(self) -> str:
        return label(self.record.variant) + (" · TF32" if self.record.route == "tf32" else "")

    @property
    def colour(self) -> str:
        return COLOURS.get(self.record.variant, style.OURS)

    @property
    def ms(self) -> float | None:
        """The median; None for a run that failed."""
        median = self.record.median_ms
        return median if median is not None and math.isfinite(median) and median > 0 else None

    @property
    def spread(self) -> float:
        """IQR / median; unknown (nan) for an extrapolation."""
        return math.nan if self.record.extrapolated else stats.spread(self.record.samples_ms)

    @property
    def text(self) -> str:
        return "failed" if self.ms is None else duration(self.ms, self.spread)

    @property
    def bad(self) -> bool:
        return self.ms is None or self.record.passed is False

    @property
    def note(self) -> str:
        """What is wrong or special about it, in words; "" when nothing is."""
        record = self.record
        if self.ms is None:
            return f"did not run: {record.reason or 'no reason recorded'}"
        if record.passed is False:
            numbers = f"error {error_text(record.rel_error)}, limit {error_text(record.limit)}"
            known = record.rel_error is not None and record.limit is not None
            return (
                f"outside the accuracy rule: {record.reason or (numbers if known else 'see check')}"
            )
        said = record.reason.startswith("extrapolated")
        special = record.reason if said else f"extrapolated: {record.reason}".rstrip(": ")
        return special if record.extrapolated else ""


def label(variant: str) -> str:
    """What figures call a variant: "cpu_02_folded_one_chain" is "2  folded one chain"."""
    rung = RUNG.fullmatch(variant)
    name = f"{int(rung[1])}  {rung[2]}" if rung else variant
    return NAMES.get(variant, name.replace("_", " "))


def order(timed: Timed) -> tuple[int, int, str]:
    """Numbered rungs, other kernels, ours, then the reader's own."""
    rung = RUNG.fullmatch(timed.record.variant)
    last = {"fused": 2, "tried": 3}
    return (
        0 if rung else last.get(timed.record.variant, 1),
        int(rung[1]) if rung else 0,
        timed.key,
    )


def said(timed: Timed, predicted: float | None = None) -> str:
    """A timing in words, for alternative texts."""
    before = f"predicted {duration(predicted)}" if predicted else ""
    extra = ", ".join(part for part in (before, timed.note) if part)
    return f"{timed.label.replace('  ', ' ')} {timed.text}" + (f" ({extra})" if extra else "")


def of_kind(given: Any, who: str, kind: str) -> Records:
    """The records of a kind, from records or a result that has them. ValueError without any."""
    every = Records(getattr(given, "records", given))
    found = every.query(kind=kind, protocol="", part="")  # a training step is no variant's time
    if not found:
        make = "wb.check(p)" if kind == "check" else "wb.bench(p)"
        raise ValueError(
            f"{who}: records: got {len(every)} records, none of kind {kind!r}; "
            f"want at least one: run {make}, or load some with wb.records(p)"
        )
    return found


def alike(records: Records, who: str, names: Iterable[str] = SAME) -> Records:
    """The same records; ValueError when they are not about one thing."""
    for name in names:
        values = {repr(getattr(record, name)): None for record in records}
        if len(values) > 1:
            raise ValueError(
                f"{who}: records: got several values of {name}: {', '.join(values)}; a figure "
                f"wants one: choose with records.query({name}={next(iter(values))})"
            )
    return records


def timings(given: Any, who: str) -> dict[str, Timed]:
    """key -> the newest timing of each variant, all of one problem, card, size and shape."""
    benches = [r for r in of_kind(given, who, "bench") if not r.variant.startswith("wrong_")]
    if not benches:
        raise ValueError(f"{who}: records: got only controls (wrong_…); want eager and kernels")
    return newest(of_one_flush(alike(Records(benches), who), who), who)


def _flushes(benches: Iterable[Record]) -> list[str]:
    """How the cache was emptied in what was timed, "" where that is not recorded; no doubles."""
    return list(dict.fromkeys(r.how.get("flush", "") for r in benches if r.samples_ms))


def of_one_flush(benches: Records, who: str) -> Records:
    """The timings whose cache was emptied in one way: by reading, where there are several.

    ValueError when there are several and none of them is that. `left_out` says what is missing.
    """
    found = _flushes(benches)
    if len(found) < 2:
        return benches
    if "read" not in found:
        raise ValueError(
            f"{who}: records: got several values of how['flush']: "
            f"{', '.join(map(repr, found))}; a figure wants one: choose with "
            f"[r for r in records if r.how.get('flush') == {found[0]!r}]"
        )
    kept = ("read",), ("read", "")  # what failed before it was timed may not say how
    return Records(r for r in benches if r.how.get("flush", "") in kept[not r.samples_ms])


def left_out(given: Any) -> str:
    """For a caption: which timings `of_one_flush` left out; "" when it left out none."""
    benches = Records(getattr(given, "records", given)).query(kind="bench", part="")
    found = _flushes(r for r in benches if not r.variant.startswith("wrong_"))
    others = [CACHES.get(f"flush {how}", "unknown cache") for how in found if how != "read"]
    return f"left out: timings with a {' or a '.join(others)}" if len(found) > 1 else ""


def newest(benches: Records, who: str) -> dict[str, Timed]:
    found: dict[str, Timed] = {}
    for record in benches.newest(("variant", "route")):
        timed = Timed(record)
        if timed.key in found:
            alike(Records([found[timed.key].record, record]), who, ("implementation", "method"))
        found[timed.key] = timed
    return found


def ratio(slow: Timed, fast: Timed) -> tuple[float, float]:
    """(slow / fast, its spread): paired where both come from one run."""
    if slow is fast:
        return 1.0, 1.0
    a, b = slow.record.samples_ms, fast.record.samples_ms
    one_run = slow.record.run == fast.record.run != "" and len(a) == len(b)
    if one_run and not (slow.record.extrapolated or fast.record.extrapolated):
        ratio = stats.paired_ratio(a, b)
        return ratio.median, math.nan if ratio.pairs < 2 else (ratio.q3 - ratio.q1) / ratio.median
    return slow.ms / fast.ms, math.hypot(slow.spread, fast.spread)


def is_kernel(timed: Timed) -> bool:
    """Whether it is a rung of the ladder or ours."""
    return timed.record.variant not in (*REFERENCES, "fused+fold")


def times(slow: Timed | None, fast: Timed | None) -> str:
    """How many times as fast `fast` is, in words for a cell."""
    known = slow and fast and slow.ms and fast.ms
    return factor(*ratio(slow, fast)) if known else "–"


def floor_of(timings: Iterable[Timed]) -> float | None:
    """The floor recorded with ours, or else with any kernel."""
    ordered = sorted(timings, key=lambda t: t.record.variant != "fused")
    floors = [t.record.floor_ms for t in ordered if t.record.floor_ms]
    return next((ms for ms in floors if math.isfinite(ms) and ms > 0), None)


# --- what a figure says about itself --------------------------------------------------------


def situation(records: Sequence[Record]) -> str:
    """Card, size and shape: "NVIDIA H100, paper size (B 1024, K 8192, N 8192)"."""
    shapes = list({repr(r.shape): r.shape for r in records if r.shape}.values())
    sizes = list(dict.fromkeys(r.size for r in records if r.size))
    size = f"{' and '.join(sizes)} size" if sizes else "size not recorded"
    shape = f"{len(shapes)} shapes"
    if len(shapes) == 1:
        shape = ", ".join(f"{name} {value}" for name, value in shapes[0].items())
    return f"{records[0].card or 'unknown card'}, {size}" + (f" ({shape})" if shapes else "")


def _how(records: Sequence[Record]) -> str:
    """How it was timed, from the records: what they agree on."""
    counts = sorted({len(r.samples_ms) for r in records if r.samples_ms})
    many = " to ".join(dict.fromkeys(str(count) for count in (*counts[:1], *counts[-1:])))
    parts = [f"median and quartiles of {many} samples"] if counts else []
    for name, value in records[0].how.items():
        if isinstance(value, (str, int, float)) and all(r.how.get(name) == value for r in records):
            name, _, unit = name.rpartition("_") if name.endswith(UNITS) else (name, "", "")
            number = f"{value:g}" if isinstance(value, float) else str(value)
            text = f"{name.replace('_', ' ')} {number} {unit}".strip()
            parts.append(CACHES.get(text, text.removesuffix(" True")))
    mode = f"{records[0].mode} mode" if records[0].mode else ""
    parts += [word for word in (mode, "with gradients" * records[0].grad) if word]
    return ", ".join(parts)


def timing(records: Sequence[Record], more: str = "") -> str:
    """How it was timed, `more`, date and commit, as sentences."""
    dates = sorted({r.date[:10] for r in records if r.date})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    commits = sorted({r.commit[:7] + ("+" if r.dirty else "") for r in records if r.commit})
    made = ", ".join([*([when] if when else []), *(f"commit\u00a0{c}" for c in commits[:2])])
    parts = [part for part in (_how(records), more, made) if part]
    return "".join(f"{part[:1].upper()}{part[1:]}. " for part in parts).rstrip()


def caption(records: Sequence[Record], more: str = "") -> str:
    """Two lines: problem, card, size and shape; then what `timing` says."""
    first = f"{records[0].problem or 'no problem named'} on {situation(records)}"
    return f"{first}.\n{timing(records, more)}"


def alt(what: str, records: Sequence[Record], said: Iterable[str], floor: float | None) -> str:
    """The alternative text: what is shown, of what, and every number."""
    numbers = [*said, *([f"floor {duration(floor, 0.01)}"] if floor else [])]
    return f"{what}. {records[0].problem}, {situation(records)}. {'; '.join(numbers)}."

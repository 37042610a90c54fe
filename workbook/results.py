"""Timings as a person reads them: a run's table and ratios, a record's line, the kept records."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass

from workbook import journal, limits, paths, stats
from workbook.ceilings import ceilings_of
from workbook.journal import Record, Records
from workbook.spec import Problem

__all__ = ["BenchResult", "key_of", "line", "records", "variant_of"]

LINE = ("problem", "variant", "implementation", "route", "device", "card", "size", "shape", "mode",
        "flush", "median_ms", "floor_ms", "fold_ms", "launches", "peak_bytes", "rel_error",
        "rel_error_eager", "passed", "extrapolated", "reason", "date", "commit", "run")  # fmt: skip


@dataclass(frozen=True)
class BenchResult:
    """Records of kind "bench", one a variant, all of one run; of a training step one a part."""

    records: Records

    def __getitem__(self, variant: str) -> Record:
        """The record of a variant key such as "fused" or "eager/tf32"."""
        for record in self.records:
            if key_of(record) == variant:
                return record
        known = ", ".join(map(key_of, self.records))
        raise KeyError(f"variant: got {variant!r}; this run has {known}")

    def ratio(self, slow: str = "eager", fast: str = "fused") -> stats.Ratio:
        """slow / fast, the median over pairs of samples of the same round."""
        a, b = self[slow].samples_ms, self[fast].samples_ms
        pairs = min(len(a), len(b))
        return stats.paired_ratio(a[:pairs], b[:pairs])

    def break_even_calls(self, slow: str = "eager", fast: str = "fused") -> float:
        """Calls after which folding once and calling `fast` has cost less than calling `slow`."""
        fold = stats.median(self[fast].fold_ms or (0.0,))
        return limits.break_even_calls(fold, self[slow].median_ms, self[fast].median_ms)

    def frame(self) -> object:
        """A pandas DataFrame, a row a variant."""
        return self.records.frame()

    def _rows(self) -> list[tuple[str, ...]]:
        eager = {r.part: r.median_ms for r in self.records if variant_of(r) == "eager"}
        return [_row(record, eager.get(record.part)) for record in self.records]

    def __str__(self) -> str:
        rows = [_COLUMNS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        def cells(row: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) + "</tr>"

        body = "".join(cells(row, "td") for row in self._rows())
        return f"<table><thead>{cells(_COLUMNS, 'th')}</thead><tbody>{body}</tbody></table>"


_COLUMNS = (
    "variant",
    "time",
    "over eager",
    "of the floor",
    "GB/s (of the ceiling)",
    "launches",
    "error",
    "rule",
    "",
)


def variant_of(record: Record) -> str:
    """Variant and route, as in Variant.key."""
    tf32 = record.route == "tf32"
    return f"{record.variant}/tf32" if tf32 else record.variant


def key_of(record: Record) -> str:
    """The same, and of a training step the part: "eager/tf32", "fused step"."""
    return " ".join(filter(None, (variant_of(record), record.part)))


def _row(record: Record, eager_ms: float | None) -> tuple[str, ...]:
    ms = record.median_ms
    if ms is None:
        return (key_of(record), "failed", "", "", "", "", "", "", record.reason)
    spread = stats.spread(record.samples_ms)
    speedup = f"{stats.significant(eager_ms / ms, spread)}×" if eager_ms else ""
    floor = f"{100 * record.floor_ms / ms:.0f} %" if record.floor_ms and record.bytes_moved else "–"
    rate = _rate(record, ms) if record.bytes_moved else ""
    error = "" if record.rel_error is None else f"{record.rel_error:.1e}"
    rule = {True: "within", False: "outside", None: ""}[record.passed]
    launches = "" if record.launches is None else str(record.launches)
    time = f"{stats.significant(ms, spread)} ms"
    notes = "; ".join(
        filter(None, (record.reason, "wide spread" * stats.is_wide(record.samples_ms)))
    )
    return (key_of(record), time, speedup, floor, rate, launches, error, rule, notes)


def _rate(record: Record, ms: float) -> str:
    """Bytes that must move over the time, and as a part of the read bandwidth measured there.

    Of the run's own ceiling; a record from before it was kept is held against the newest one.
    """
    rate = record.bytes_moved / ms / 1e6
    reach, own = ceilings_of(record.card), record.how.get("read_gbs")
    best = own or (reach.read_gbs if reach else None)
    return f"{rate:.0f} ({100 * rate / best:.0f} %)" if best else f"{rate:.0f}"


def line(record: Record) -> dict:
    """A bench record as the command line prints it: medians, no samples."""
    full = {**dataclasses.asdict(record), "median_ms": record.median_ms, "variant": key_of(record)}
    full["flush"] = record.flush
    full["fold_ms"] = stats.median(record.fold_ms) if record.fold_ms else None
    return {name: full[name] for name in LINE}


def records(p: Problem | str | None = None, **equals: object) -> Records:
    """Records kept in data/ and made here (.runs/): of a problem, and with these values.

    What is in both is there once.
    """
    loaded = journal.load([paths.data(), paths.runs()])
    found = {r.to_json(): r for r in loaded}.values()
    if p is not None:
        equals["problem"] = p if isinstance(p, str) else p.slug
    return journal.query(found, **equals)
